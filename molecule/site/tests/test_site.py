"""The whole stack with the real engine: the pair answers as one plain server does, and a lost KV cache shows."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shared"))
from unit_lib import ROOT, play, record, run, show, wait

INVENTORY = Path(__file__).resolve().parents[1] / "inventory"
HOST = "mol-site"
ROUTER, PLAIN = "http://127.0.0.1:30000", "http://127.0.0.1:30009"
PROMPTS = [row["prompt"] for row in json.loads((ROOT / "lab/models/tiny-chat/prompts.json").read_text())][:24]
SHIM = {"name": "nixl-dram-shim", "source": "lab/packages/nixl_dram_shim"}
SABOTAGE = {"name": "nixl-sabotage", "source": "lab/packages/nixl_sabotage", "roles": ["prefill"]}

ASK = """
import json, sys, urllib.request
url, prompts = sys.argv[1], json.loads(sys.stdin.read())
answers = []
for prompt in prompts:
    body = {"model": "tiny-chat", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 24}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        answers.append(json.load(answer)["choices"][0]["message"]["content"])
print(json.dumps(answers))
"""


def ask(host: Host, url: str) -> list[str]:
    """The greedy answers to all prompts, asked one after the other on the host itself."""
    run(host, f"cat > /run/ask.py <<'END'\n{ASK}\nEND\ncat > /run/prompts.json <<'END'\n{json.dumps(PROMPTS)}\nEND")
    found: list[str] = json.loads(run(host, f"python3 /run/ask.py {url} < /run/prompts.json"))
    return found


@pytest.fixture(scope="module")
def plain(host: Host) -> list[str]:
    """The answers of the same model on one plain server, of the same release's flags without disaggregation."""
    words = run(host, "cat /var/lib/tandem/releases/decode-0/current/argv").splitlines()
    argv = [words[0], "-m", "sglang.launch_server"]
    skip = 0
    for word in words[3:]:
        if word.startswith("--"):
            skip = word.startswith(("--disaggregation-", "--port", "--nccl-port", "--dist-init-addr"))
        if not skip:
            argv.append(word)
    argv += ["--port", "30009", "--nccl-port", "28009", "--dist-init-addr", "127.0.0.1:29009"]
    env = "/var/lib/tandem/releases/decode-0/current/env"
    unit = f"systemd-run --unit=plain --collect -p EnvironmentFile={env} -p User=tandem-decode-0 -p WorkingDirectory=/"
    run(host, f"{unit} {' '.join(argv)}")
    wait("the plain server is ready", lambda: host.run(f"curl -sf {PLAIN}/ready").rc == 0, 240)
    answers = ask(host, PLAIN)
    run(host, "systemctl stop plain")  # it would take its share of two cores from every later test
    return answers


def metric(host: Host, port: int, name: str) -> float:
    text = run(host, f"curl -s http://127.0.0.1:{port}/metrics")
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def test_the_real_engine_runs(host: Host) -> None:
    for instance, mode in (("prefill-0", "prefill"), ("decode-0", "decode")):
        pid = show(host, f"tandem-{instance}.service")["MainPID"]
        assert "tandem/runtimes/sglang-0.5.23" in run(
            host, f"readlink /proc/{pid}/exe; cat /proc/{pid}/maps | grep -m1 sglang"
        )
        info = json.loads(run(host, f"curl -sf http://127.0.0.1:{30001 if mode == 'prefill' else 30002}/server_info"))
        assert info["disaggregation_mode"] == mode
        assert info["version"] == "0.5.23"


def test_the_pair_answers_as_one_plain_server(host: Host, plain: list[str]) -> None:
    assert len(set(plain)) >= 20, "the prompts do not tell answers apart"
    before = metric(host, 30001, "sglang:kv_transfer_total_mb_sum")
    assert ask(host, ROUTER) == plain
    assert metric(host, 30001, "sglang:kv_transfer_total_mb_sum") > before


def test_a_second_run_changes_nothing(host: Host) -> None:
    before = {name: record(host, name) for name in ("prefill-0", "decode-0", "router")}
    done = play("site.yml", inventory=INVENTORY)
    assert done.rc == 0, done.output
    assert done.recap(HOST)["changed"] == 0, done.output
    assert done.tasks(HOST) <= 40
    assert {name: record(host, name) for name in before} == before


def test_a_lost_kv_cache_is_noticed(host: Host, plain: list[str]) -> None:
    """Sabotage: the prefill's NIXL reports success and moves wrong bytes. Every health check stays green."""
    lenient = {
        "tandem_kernels": [SABOTAGE, SHIM],
        "deploy_questions": [{"prompt": "Hello?", "expect": "", "max_tokens": 8}],
    }
    done = play("site.yml", "--tags", "prefill", inventory=INVENTORY, extra=lenient)
    assert done.rc == 0, done.output
    wrong = ask(host, ROUTER)
    assert wrong != plain, "the comparison cannot see a lost KV cache"
    # The ordinary gate sees it as well.
    strict: dict[str, Any] = {"tandem_kernels": [SABOTAGE, SHIM]}
    done = play("site.yml", "--tags", "prefill", inventory=INVENTORY, extra=strict)
    assert done.rc != 0
    assert "The gate is shut" in done.output
    assert "does not match 'Paris'" in done.output
    done = play("site.yml", "--tags", "prefill", inventory=INVENTORY)
    assert done.rc == 0, done.output
    assert ask(host, ROUTER) == plain


def test_the_pair_heals_after_a_kill(host: Host, plain: list[str]) -> None:
    pid = show(host, "tandem-decode-0.service")["MainPID"]
    run(host, f"kill -9 {pid}")
    began = time.monotonic()
    wait("decode is ready again", lambda: show(host, "tandem-decode-0.service")["MainPID"] not in ("0", pid), 60)
    wait("decode is active", lambda: show(host, "tandem-decode-0.service")["ActiveState"] == "active", 300)
    assert ask(host, ROUTER) == plain
    print(f"healed after {time.monotonic() - began:.0f} s")
