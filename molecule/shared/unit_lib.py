"""What the scenarios' tests share: systemd and Ansible as an operator sees them, waits on conditions, faults."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testinfra.host import Host

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Play:
    """What a run of ansible-playbook printed, and the numbers of its recap by host."""

    rc: int
    output: str

    def recap(self, host: str) -> dict[str, int]:
        """ok, changed, unreachable, failed, skipped, rescued, ignored."""
        line = re.search(rf"^{re.escape(host)} +: (.*)$", self.output, re.MULTILINE)
        assert line, self.output
        return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", line[1])}

    def tasks(self, host: str) -> int:
        """Tasks that this host ran or skipped."""
        recap = self.recap(host)
        return recap["ok"] + recap["skipped"] + recap["failed"]


def play(playbook: str, *words: str, inventory: Path, extra: dict[str, Any] | None = None) -> Play:
    """Runs a playbook as an operator does, from the repository with its own ansible.cfg."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "MOLECULE_"))}
    command = [str(Path(sys.executable).with_name("ansible-playbook")), playbook, "-i", str(inventory), *words]
    if extra:
        command += ["-e", json.dumps(extra)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return Play(done.returncode, done.stdout + done.stderr)


def run(host: Host, command: str, *, ok: bool = True) -> str:
    """The output of a shell command as root. With `ok` it must succeed."""
    done = host.run("sudo sh -c %s", command)
    assert not ok or done.rc == 0, f"{command}: {done.stdout}{done.stderr}"
    return str(done.stdout)


def show(host: Host, unit: str) -> dict[str, str]:
    """The properties of a unit."""
    lines = run(host, f"systemctl show {unit}").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def wait(what: str, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"after {seconds} s still not: {what}"
        time.sleep(0.2)


def record(host: Host, instance: str) -> dict[str, Any]:
    """The start record of an instance."""
    found: dict[str, Any] = json.loads(run(host, f"cat /run/tandem/{instance}/record.json"))
    return found


def restarted(host: Host, unit: str, old_pid: str) -> Callable[[], bool]:
    """A condition: the unit is active with another main process."""

    def condition() -> bool:
        now = show(host, unit)
        return now["ActiveState"] == "active" and now["MainPID"] not in ("0", old_pid)

    return condition


@contextmanager
def drop_in(host: Host, unit: str, **settings: str) -> Iterator[None]:
    """Adds settings to [Service] for a while: `Environment="A=1"` and the like. Leaves the unit running as before."""
    folder = f"/run/systemd/system/{unit}.d"
    lines = "\\n".join(["[Service]", *(f"{name}={value}" for name, value in settings.items())])
    run(host, f"mkdir -p {folder} && printf '{lines}\\n' > {folder}/fault.conf && systemctl daemon-reload")
    try:
        yield
    finally:
        run(
            host,
            f"rm -r {folder} && systemctl daemon-reload && systemctl stop {unit}; systemctl reset-failed {unit}",
            ok=False,
        )
        run(host, f"systemctl start {unit}")
