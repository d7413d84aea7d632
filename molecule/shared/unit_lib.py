"""What the scenarios' tests share: systemd as an operator sees it, waits on conditions, faults by drop-in."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from testinfra.host import Host


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
        run(host, f"rm -r {folder} && systemctl daemon-reload && systemctl stop {unit}; systemctl reset-failed {unit}", ok=False)
        run(host, f"systemctl start {unit}")
