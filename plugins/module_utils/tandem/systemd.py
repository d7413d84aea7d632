"""systemd as Tandem uses it: units by name, jobs for several units at once, the journal of a failure."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from .problems import TandemError

_PROPERTIES = ("ActiveState", "SubState", "MainPID", "NRestarts", "UnitFileState", "Result", "ActiveEnterTimestamp")


@dataclass(frozen=True)
class Unit:
    """State of a unit now."""

    name: str
    active: str
    sub: str
    main_pid: int
    restarts: int
    enabled: bool
    result: str
    since: str


def run(*words: str, check: bool = True, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """systemctl with `words`. Raises TandemError with its own words where it fails and `check` is set."""
    done = subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False, timeout=timeout)
    if check and done.returncode:
        raise TandemError(f"systemctl {' '.join(words)} failed: {done.stderr.strip() or done.returncode}")
    return done


def show(name: str) -> Unit:
    """The unit's state; `inactive` for one that systemd does not know."""
    text = run("show", name, *(f"--property={prop}" for prop in _PROPERTIES)).stdout
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return Unit(
        name=name,
        active=values["ActiveState"],
        sub=values["SubState"],
        main_pid=int(values.get("MainPID") or 0),
        restarts=int(values.get("NRestarts") or 0),
        enabled=values.get("UnitFileState") == "enabled",
        result=values.get("Result", ""),
        since=values.get("ActiveEnterTimestamp", ""),
    )


def start(units: Sequence[str]) -> bool:
    """Starts all in one job, resets what counts against their start limits, and returns whether all became ready."""
    run("reset-failed", *units, check=False)
    return run("start", *units, check=False).returncode == 0


def stop(units: Sequence[str]) -> None:
    """Stops all in one job, those in a restart loop as well; TimeoutStopSec of each unit bounds it."""
    if units:
        run("stop", *units)


def journal(unit: str, lines: int = 25) -> str:
    """The unit's last journal lines."""
    command = ["journalctl", f"--unit={unit}", f"--lines={lines}", "--no-pager", "--output=cat"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout.rstrip()
