"""The whole stack on the light engine: what each tag does, what bad input does not do, how a bad release goes back."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shared"))
from unit_lib import ROOT, play, record, run, show, wait

INVENTORY = Path(__file__).resolve().parents[1] / "inventory"
HOST = "mol-router"
INSTANCES = ("prefill-0", "decode-0", "router")
QUESTION = "What is the capital of France? Answer with one word."


def releases(host: Host) -> dict[str, tuple[int, str]]:
    """Main PID and release of each instance: equal before and after means that nothing restarted."""
    found = {name: record(host, name) for name in INSTANCES}
    return {name: (row["main_pid"], row["release"]) for name, row in found.items()}


def active(host: Host, unit: str) -> bool:
    return show(host, unit)["ActiveState"] == "active"


def ask(host: Host) -> str:
    body = json.dumps({"model": "tiny-chat", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0})
    command = "curl -s -m 30 -H 'Content-Type: application/json' -d '%s' http://127.0.0.1:30000/v1/chat/completions"
    answer = json.loads(run(host, command % body))
    return str(answer["choices"][0]["message"]["content"])


def test_answers_through_the_router(host: Host) -> None:
    assert "Paris" in ask(host)


def test_everything_binds_loopback(host: Host) -> None:
    listeners = [line.split()[3] for line in run(host, "ss -ltnH").splitlines()]
    ours = [listener for listener in listeners if not listener.endswith((":22", ":53"))]
    assert ours
    assert [listener for listener in ours if not listener.startswith(("127.", "[::1]"))] == []


def test_units_are_as_closed_as_they_can_be(host: Host) -> None:
    for name in INSTANCES:
        text = run(host, f"systemd-analyze security --no-pager tandem-{name}.service | tail -1")
        assert float(text.split(":")[1].split()[0]) < 5.0, text


def test_check_mode_reports_nothing(host: Host) -> None:
    before = releases(host)
    done = play("site.yml", "--check", "--diff", inventory=INVENTORY)
    assert done.rc == 0, done.output
    assert done.recap(HOST)["changed"] == 0, done.output
    assert releases(host) == before


def test_a_second_run_changes_nothing_in_few_tasks(host: Host) -> None:
    before = releases(host)
    done = play("site.yml", inventory=INVENTORY)
    assert done.rc == 0, done.output
    assert done.recap(HOST)["changed"] == 0, done.output
    assert done.tasks(HOST) <= 40
    assert releases(host) == before


# What each tag must run at least: a tag that matches nothing runs nothing and exits 0.
@pytest.mark.parametrize(
    ("tag", "task"),
    [
        ("driver_check", "Check the host against its split"),
        ("model", "Put the model in place"),
        ("kernel", "kernel package"),
        ("prefill", "Stage a release of each prefill"),
        ("decode", "Stage a release of each decode"),
        ("router", "Stage a release of each router"),
    ],
)
def test_each_tag_stands_alone(host: Host, tag: str, task: str) -> None:
    before = releases(host)
    done = play("site.yml", "--tags", tag, inventory=INVENTORY)
    assert done.rc == 0, done.output
    assert done.recap(HOST)["changed"] == 0, done.output
    assert task in done.output
    switches = "TASK [deploy : Switch to the staged releases]" in done.output
    assert switches == (tag in ("prefill", "decode", "router"))
    others = {"prefill": "each decode", "decode": "each prefill", "router": "each decode"}
    assert tag not in others or f"Stage a release of {others[tag]}" not in done.output
    assert releases(host) == before


@pytest.mark.parametrize(("tag", "instance"), [("decode", "decode-0"), ("prefill", "prefill-0")])
def test_a_change_restarts_what_is_its_own(host: Host, tag: str, instance: str) -> None:
    before = releases(host)
    change = {f"{tag}_server_env": {"LIGHT_ENGINE_TOKEN_DELAY": "0.001"}}
    predicted = play("site.yml", "--check", "--diff", "--tags", tag, inventory=INVENTORY, extra=change)
    assert f"+++ after: {instance}: " in predicted.output, predicted.output
    assert "LIGHT_ENGINE_TOKEN_DELAY" in predicted.output
    assert releases(host) == before
    done = play("site.yml", "--tags", tag, inventory=INVENTORY, extra=change)
    assert done.rc == 0, done.output
    after = releases(host)
    assert [name for name in INSTANCES if after[name] != before[name]] == [instance]
    # Reverting is the same content, hence the same release: nothing is built again.
    done = play("site.yml", "--tags", tag, inventory=INVENTORY)
    assert done.rc == 0, done.output
    assert releases(host)[instance][1] == before[instance][1]


def test_skip_tags_leaves_out(host: Host) -> None:
    done = play("site.yml", "--skip-tags", "driver_check,decode,model,kernel", inventory=INVENTORY)
    assert done.rc == 0, done.output
    assert "Stage a release of each decode" not in done.output
    assert releases(host)


def test_a_release_that_does_not_start_goes_back(host: Host) -> None:
    before = releases(host)
    bad = {"decode_server_env": {"LIGHT_ENGINE_DIE": "exit"}}
    done = play("site.yml", "--tags", "decode", inventory=INVENTORY, extra=bad)
    assert done.rc != 0
    assert "decode-0 did not become ready" in done.output
    assert f"The previous release runs again: decode-0 ({before['decode-0'][1]})" in done.output
    after = releases(host)
    assert after["decode-0"][1] == before["decode-0"][1]
    assert after["prefill-0"] == before["prefill-0"]
    assert "Paris" in ask(host)


def test_a_release_that_answers_wrong_goes_back(host: Host) -> None:
    before = releases(host)
    done = play(
        "site.yml", "--tags", "decode", inventory=INVENTORY, extra={"decode_server_env": {"LIGHT_ENGINE_WRONG": "1"}}
    )
    assert done.rc != 0
    assert "The gate is shut" in done.output
    assert releases(host)["decode-0"][1] == before["decode-0"][1]
    assert "Paris" in ask(host)


def test_a_lost_restart_is_found(host: Host) -> None:
    """A run that died after it staged and switched files, before it restarted: the next one sees what really runs."""
    name = "decode-0"
    run(host, f"ln -sfn elsewhere /var/lib/tandem/releases/{name}/current")
    run(host, f"echo '# by hand' >> /etc/systemd/system/tandem-{name}.service && systemctl daemon-reload")
    status = play("playbooks/status.yml", inventory=INVENTORY)
    assert "was changed by hand" in status.output or "is deployed" in status.output
    before = releases(host)
    done = play("site.yml", "--tags", "decode", inventory=INVENTORY)
    assert done.rc == 0, done.output
    assert releases(host) == before, "the right release runs already: files are mended without a restart"
    assert "by hand" not in run(host, f"cat /etc/systemd/system/tandem-{name}.service")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tandem_pagesize": 64}, "did you mean tandem_page_size?"),
    ({"tandem_extra_args": ["--no-such-flag"]}, "the unknown flag --no-such-flag"),
    ({"model_sync_manifest": "nowhere"}, "no file"),
]


@pytest.mark.parametrize(("extra", "message"), BAD)
def test_bad_input_touches_nothing(host: Host, extra: dict[str, Any], message: str) -> None:
    before = releases(host)
    done = play("site.yml", inventory=INVENTORY, extra=extra)
    assert done.rc != 0
    assert message in done.output
    assert done.recap(HOST)["changed"] == 0
    assert releases(host) == before


def test_a_wrong_numa_node_touches_nothing(host: Host) -> None:
    before = releases(host)
    rows = [
        {"name": "prefill-0", "role": "prefill", "numa_node": 7, "port": 30001, "bootstrap_port": 8998},
        {"name": "decode-0", "role": "decode", "numa_node": 0, "port": 30002},
    ]
    done = play("site.yml", inventory=INVENTORY, extra={"tandem_instances": rows})
    assert done.rc != 0
    assert "node 7" in done.output or "NUMA node 7" in done.output, done.output
    assert done.recap(HOST)["changed"] == 0
    assert releases(host) == before


def test_an_unreachable_host_is_named(tmp_path: Path) -> None:
    done = play("site.yml", inventory=INVENTORY, extra={"ansible_host": "127.0.0.1", "ansible_port": 1})
    assert done.rc != 0
    assert done.recap(HOST)["unreachable"] == 1
    assert tmp_path


def test_a_stranger_on_our_port(host: Host) -> None:
    """A hand-started server: found and named, stopped only with consent."""
    run(host, "systemctl stop tandem-decode-0")
    run(host, "systemd-run --unit=stranger --uid=1000 --collect python3 -m http.server 30002 --bind 127.0.0.1")
    wait("the stranger listens", lambda: "30002" in run(host, "ss -ltn"))
    pid = show(host, "stranger")["MainPID"]
    done = play("site.yml", "--tags", "decode", inventory=INVENTORY)
    assert done.rc != 0
    for word in ("30002", pid, "operator", "http.server", "tandem_stop_foreign"):
        assert word in done.output, done.output
    assert show(host, "stranger")["ActiveState"] == "active"
    done = play("site.yml", "--tags", "decode", inventory=INVENTORY, extra={"tandem_stop_foreign": True})
    assert done.rc == 0, done.output
    assert show(host, "stranger")["ActiveState"] == "inactive"
    assert "Paris" in ask(host)


def test_everything_comes_back_after_a_reboot(host: Host) -> None:
    subprocess.run([ROOT / "lab" / "lab", "reboot", HOST], check=True, capture_output=True)
    for name in INSTANCES:
        unit = f"tandem-{name}.service"
        wait(f"{name} is active", partial(active, host, unit), 90)
    wait(
        "the router is ready",
        lambda: "200" in run(host, "curl -s -o /dev/null -w '%{http_code}' 127.0.0.1:30000/readiness"),
    )
    assert "Paris" in ask(host)


def test_stop_and_start_again(host: Host) -> None:
    done = play("playbooks/stop.yml", inventory=INVENTORY)
    assert done.rc == 0, done.output
    assert {show(host, f"tandem-{name}.service")["ActiveState"] for name in INSTANCES} == {"inactive"}
    done = play("site.yml", inventory=INVENTORY)
    assert done.rc == 0, done.output
    assert "Paris" in ask(host)
