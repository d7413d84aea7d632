"""The demo: from a checkout to a question that crossed a real prefill/decode pair."""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.tool import inventory, machine, say, venv
from lab.tool.errors import LabError
from lab.tool.link import Link, connect
from lab.tool.paths import Paths
from lab.tool.setup import setup_stages
from plugins.module_utils.tandem.prometheus import total

HOST = "lab1"
"""The demo's host, as inventory/lab names it."""
PLAIN, STREAMED = 3, 1
"""Questions that are asked each way."""
REQUEST_TIMEOUT = 60.0
"""Seconds for one answer; a second is usual."""
WIDTH = 100
"""Columns of a printed question."""
COUNTER_TIMEOUT = 10.0
"""Seconds after the last answer until the prefill must have counted every transfer."""
KV_MB = "sglang:kv_transfer_total_mb_sum"
KV_TRANSFERS = "sglang:kv_transfer_total_mb_count"
PROMPT_TOKENS = "sglang:prompt_tokens_total"
GENERATED_TOKENS = "sglang:generation_tokens_total"
REQUESTS = "sglang:num_requests_total"

# Runs on the host: what the current releases start. One word of an argv is one line of its file.
_INSTANCES = """
import json, pathlib
found = []
for link in sorted(pathlib.Path("/var/lib/tandem/releases").glob("*/current")):
    row = json.loads((link / "manifest.json").read_text())
    argv = (link / "argv").read_text().splitlines()
    found.append({"name": row["instance"], "kind": row["kind"], "release": row["release"],
                  "host": argv[argv.index("--host") + 1], "port": int(argv[argv.index("--port") + 1])})
print(json.dumps(found))
"""
# Runs on the host: bytes of memory by unit, shared pages split among those that share them.
_MEMORY = """
import collections, json, pathlib, re
sums = collections.Counter()
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        unit = re.search(r"/tandem-([^/]+)[.]service", (process / "cgroup").read_text())
        pss = re.search(r"^Pss: *([0-9]+) kB", (process / "smaps_rollup").read_text(), re.M)
    except OSError:
        continue
    if unit and pss:
        sums[unit[1]] += 1024 * int(pss[1])
print(json.dumps(sums))
"""


@dataclass(frozen=True)
class Instance:
    """An instance on the host and where it can be reached from here."""

    name: str
    kind: str
    release: str
    url: str
    """Its address on the host."""
    local: str
    """The same through the ssh connection."""


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt. Times in seconds."""

    prompt: str
    expected: str
    text: str
    pieces: int
    """Parts that a streamed answer came in; 0 for a plain one."""
    first: float
    seconds: float

    @property
    def right(self) -> bool:
        """Tell whether the text is the expected one."""
        return self.text.strip() == self.expected.strip()


def demo(paths: Paths, _: argparse.Namespace) -> int:
    """Run the demo; 0 if everything worked and every answer was right."""
    say.line(say.bold("Tandem: a prefill/decode pair on this machine, without a GPU\n"))
    stages = say.Stages()
    lab = setup_stages(paths, stages)
    with stages.stage("host") as stage:
        host = lab.up(HOST, "bookworm", "rw")
        inventory.write(lab, [HOST], paths.inventory)
        stage.result = f"{host.name} at {host.address}: systemd and sshd are up"
    with connect(lab, host) as link:
        say.line(f"\n{say.bold('ansible-playbook site.yml')}")
        with stages.stage("deploy") as stage:
            stage.result = deploy(paths, link)
        instances = look(link)
        router = next((one for one in instances if one.kind == "router"), None)
        if router is None:
            raise LabError(f"no router among what {HOST} runs ({', '.join(i.name for i in instances)})")
        workers = sorted((one for one in instances if one.kind != "router"), key=lambda one: one.kind, reverse=True)
        before = {one.name: counters(one) for one in workers}
        with stages.stage("ask") as stage:
            answers = ask(paths, router)
            moved = wait_moved(workers, before, len(answers))
            stage.result = f"{len(answers)} questions, {sum(answer.right for answer in answers)} answered right"
        show_workers(workers, moved)
        show_cost(stages, link.python(_MEMORY), machine.disk_used(paths.cache), paths)
    wrong = [answer for answer in answers if not answer.right]
    for answer in wrong:
        say.line(say.red(f"wrong: {answer.prompt!r}: expected {answer.expected!r}, got {answer.text!r}"))
    idle = [one.name for one in workers if one.kind == "prefill" and not moved[one.name][KV_MB]]
    if idle:
        say.line(say.red(f"{', '.join(idle)} moved no KV bytes: nothing crossed the pair"))
    if wrong or idle:
        return 1
    show_next()
    return 0


def deploy(paths: Paths, link: Link) -> str:
    """Run site.yml, its lines passed on as they come; return what it counted. Raises LabError if it fails."""
    environ = venv.environment(paths)
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        environ["ANSIBLE_FORCE_COLOR"] = "1"
    command = [str(paths.venv / "bin" / "ansible-playbook"), "-i", str(paths.inventory), "site.yml"]
    free = shutil.disk_usage(paths.cache).free
    recap = ""
    with (
        say.Ticker("site.yml is at work", lambda: progress(link, paths.cache, free), quiet=5.0) as ticker,
        subprocess.Popen(
            command,
            cwd=paths.repo,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as playbook,
    ):
        assert playbook.stdout is not None  # noqa: S101 - stdout=PIPE above
        for row in playbook.stdout:
            ticker.write(row.rstrip("\n"))
            recap = recap_of(row) or recap
    if playbook.returncode:
        raise LabError(
            f"site.yml ended with {playbook.returncode}; the reason stands above. {HOST} is left as it is:"
            f" `lab/lab ssh {HOST}` looks at it, `make demo` tries again, `make down` removes it."
        )
    return f"site.yml: {recap}"


def recap_of(row: str) -> str:
    """Return `41 tasks, 23 changed` from a line of Ansible's recap, "" from any other line."""
    found = re.search(rf"{HOST}\b.*ok=(\d+).*changed=(\d+).*unreachable=", row)
    return f"{found[1]} tasks ok, {found[2]} changed" if found else ""


def progress(link: Link, cache: Path, free_before: int) -> str:
    """Return what the host is busy with: the units' states, or how much came onto the disk."""
    try:
        units = link.run("systemctl list-units --all --plain --no-legend 'tandem-*.service'", timeout=5.0)
    except LabError:
        return ""
    notes = unit_states(units)
    written = free_before - shutil.disk_usage(cache).free
    if not notes and written > 50 * 10**6:
        notes = f"{say.size(written)} written"
    return notes


def unit_states(listing: str) -> str:
    """Return `prefill-0 activating, decode-0 active` from systemctl's list."""
    rows = [row.split() for row in listing.splitlines()]
    return ", ".join(
        f"{row[0].removeprefix('tandem-').removesuffix('.service')} {row[2]}"
        for row in rows
        if len(row) > 3 and row[1] == "loaded"
    )


def look(link: Link) -> list[Instance]:
    """Return what the host's current releases start, reachable through the connection."""
    return [
        Instance(
            name=row["name"],
            kind=row["kind"],
            release=row["release"],
            url=f"http://{row['host']}:{row['port']}",
            local=f"http://127.0.0.1:{link.forward(row['host'], row['port'])}",
        )
        for row in link.python(_INSTANCES)
    ]


def fetch(url: str, body: Mapping[str, Any] | None = None) -> Iterator[bytes]:
    """Return the lines of a URL's answer, as they come. Raises LabError if there is none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT) as reply:
            yield from reply
    except OSError as error:
        raise LabError(f"{url}: {error}") from error


def counters(worker: Instance) -> dict[str, float]:
    """Return a worker's counters, summed over its processes."""
    text = b"".join(fetch(f"{worker.local}/metrics")).decode()
    return {name: total(text, name) for name in (KV_MB, KV_TRANSFERS, PROMPT_TOKENS, GENERATED_TOKENS, REQUESTS)}


def wait_moved(
    workers: Sequence[Instance], before: Mapping[str, Mapping[str, float]], requests: int
) -> dict[str, dict[str, float]]:
    """Return what each worker counted since, once the prefills have counted as many transfers as there were requests.

    An engine counts a moment after it has answered. If the count does not come in COUNTER_TIMEOUT, what is there is
    returned.
    """
    deadline = time.monotonic() + COUNTER_TIMEOUT
    while True:
        moved = {
            one.name: {name: value - before[one.name][name] for name, value in counters(one).items()} for one in workers
        }
        sent = sum(moved[one.name][KV_TRANSFERS] for one in workers if one.kind == "prefill")
        if sent >= requests or time.monotonic() > deadline:
            return moved
        time.sleep(0.2)


def ask(paths: Paths, router: Instance) -> list[Answer]:
    """Ask the router some of the model's questions, plain and streamed, and print what it answers."""
    questions = json.loads((paths.models / "prompts.json").read_text(encoding="utf-8"))
    model = json.loads(b"".join(fetch(f"{router.local}/v1/models")))["data"][0]["id"]
    say.line(
        f"\n{say.bold(f'POST {router.url}/v1/chat/completions')}  (model {model}, through ssh: it is bound to loopback)"
    )
    answers = []
    for number, row in enumerate(random.sample(questions, PLAIN + STREAMED)):
        streamed = number >= PLAIN
        say.line(textwrap.indent(textwrap.fill(row["prompt"], WIDTH), "    ").replace("    ", f"  {say.dim('Q')} ", 1))
        print(f"  {say.dim('A')} ", end="", flush=True)
        answer = chat(router.local, model, row["prompt"], row["answer"], streamed)
        verdict = say.green("right") if answer.right else say.red(f"wrong, expected {answer.expected!r}")
        parts = f", streamed in {answer.pieces} parts, the first after {answer.first * 1000:.0f} ms" if streamed else ""
        say.line(f"   {verdict}{say.dim(f', {say.duration(answer.seconds)}{parts}')}")
        answers.append(answer)
    return answers


def chat(base: str, model: str, prompt: str, expected: str, streamed: bool) -> Answer:
    """Ask one question as any OpenAI client does, and print the answer, a streamed one as it comes."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 64,
        "stream": streamed,
    }
    began = time.monotonic()
    lines = fetch(f"{base}/v1/chat/completions", body)
    if not streamed:
        text = str(json.loads(b"".join(lines))["choices"][0]["message"]["content"])
        print(text, end="", flush=True)
        return Answer(prompt, expected, text, 0, 0.0, time.monotonic() - began)
    pieces: list[str] = []
    first = 0.0
    for piece in deltas(lines):
        first = first or time.monotonic() - began
        pieces.append(piece)
        print(piece, end="", flush=True)
    return Answer(prompt, expected, "".join(pieces), len(pieces), first, time.monotonic() - began)


def deltas(lines: Iterable[bytes]) -> Iterator[str]:
    """Return the pieces of text of a streamed answer (server-sent events).

    Raises LabError if the stream ends without its `[DONE]`: an engine that dies ends a stream just so.
    """
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        payload = line[len(b"data:") :].strip()
        if payload == b"[DONE]":
            return
        event = json.loads(payload)
        if "error" in event:
            raise LabError(f"the stream says: {event['error']}")
        for choice in event.get("choices", []):
            if choice.get("delta", {}).get("content"):
                yield str(choice["delta"]["content"])
    raise LabError("the stream ended without [DONE]")


def show_workers(workers: Sequence[Instance], moved: Mapping[str, Mapping[str, float]]) -> None:
    """Print who did what, by the workers' own counters."""
    say.line(f"\n{say.bold('Who did the work')}  (the workers' own /metrics, before and after)")
    for one in workers:
        delta = moved[one.name]
        if one.kind == "prefill":
            account = (
                f"{delta[PROMPT_TOKENS]:.0f} prompt tokens prefilled; {say.size(delta[KV_MB] * 1e6)} of KV cache"
                f" sent over NIXL in {delta[KV_TRANSFERS]:.0f} transfers"
            )
        else:
            account = f"{delta[GENERATED_TOKENS]:.0f} tokens decoded, for {delta[REQUESTS]:.0f} requests"
        say.line(f"  {one.name:<12} {account}")


def show_cost(stages: say.Stages, memory: Mapping[str, int], disk: int, paths: Paths) -> None:
    """Print times, memory and disk."""
    say.line(f"\n{say.bold('What it took')}")
    for name, seconds in [*stages.rows, ("all of it", stages.total())]:
        say.line(f"  {name:<12} {say.duration(seconds):>12}")
    units = ", ".join(f"{name} {say.size(count)}" for name, count in sorted(memory.items()))
    say.line(f"  {'memory':<12} {say.size(sum(memory.values())):>12}   {say.dim(units)}")
    say.line(f"  {'disk':<12} {say.size(disk):>12}   {say.dim(str(paths.cache))}")


def show_next() -> None:
    """Print what to try next."""
    say.line(f"\n{say.bold('Try next')}")
    for command, what in (
        (". .venv/bin/activate", "Ansible and the test tools, in this shell"),
        ("ansible-playbook site.yml", "again: nothing changes"),
        (
            "ansible-playbook site.yml --tags decode --check --diff",
            "what would change; after an edit in inventory/lab, say",
        ),
        ("ansible-playbook site.yml --tags decode", "ship decode alone"),
        ("ansible-playbook playbooks/status.yml", "what runs where, which release"),
        (f"lab/lab ssh {HOST} sudo journalctl -fu tandem-decode-0", "an engine's log"),
        (f"lab/lab ssh {HOST}", "look around: systemctl status 'tandem-*'"),
        ("make down", "remove the host, keep the caches"),
    ):
        say.line(f"  {command:<56} {say.dim(what)}")
