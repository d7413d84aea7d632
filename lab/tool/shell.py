"""Programs that the lab starts: as the user, or as root (through sudo for everybody else)."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lab.tool.errors import LabError
from lab.tool.say import Ticker

TAIL = 30
"""Lines of a failed long step that are shown; the rest is in its log."""


def as_root(command: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the command as root would start it: itself for root, else through sudo, with these variables."""
    variables = [f"{name}={value}" for name, value in (environ or {}).items()]
    prefix = ["env", *variables] if variables else []
    if os.geteuid() != 0:
        prefix = ["sudo", *prefix]
    return [*prefix, *command]


def ask_for_root() -> None:
    """Let sudo ask for the password now, before a ticker runs. Raises LabError if it is not given."""
    if os.geteuid() != 0 and subprocess.run(["sudo", "--validate"], check=False).returncode:
        raise LabError("sudo gave no root rights; the lab installs packages and starts containers with them")


def output(command: Sequence[str], timeout: float = 600.0, text_in: str | None = None) -> str:
    """Run a command and return its stdout.

    Raises LabError with its stderr if it fails, is missing, or takes longer than `timeout` seconds.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout, input=text_in, errors="replace"
        )
    except FileNotFoundError as error:
        raise LabError(f"{command[0]} is not installed; run `lab/lab packages`") from error
    except subprocess.TimeoutExpired as error:
        raise LabError(f"`{shlex.join(command)}` did not end within {timeout:.0f} s") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise LabError(f"`{shlex.join(command)}` ended with {done.returncode}: {said}")
    return done.stdout


def succeeds(command: Sequence[str], timeout: float = 600.0) -> bool:
    """Tell whether a command ends with status 0. A missing program or a time-out (seconds) is a no."""
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=timeout).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def long_step(
    command: Sequence[str],
    label: str,
    log: Path,
    environ: Mapping[str, str] | None = None,
    note: Callable[[], str] | None = None,
) -> None:
    """Run a command of minutes: its output goes to `log`, the label and the elapsed seconds to the screen.

    Raises LabError with the end of the log if the command fails.
    """
    with log.open("w", encoding="utf-8") as sink, Ticker(label, note or (lambda: ""), quiet=2.0):
        try:
            # stdin stays: sudo may ask for a password
            done = subprocess.run(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                check=False,
                env=None if environ is None else dict(environ),
            )
        except FileNotFoundError as error:
            raise LabError(f"{command[0]} is not installed; run `lab/lab packages`") from error
    if done.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])
        raise LabError(f"{label}: `{shlex.join(command)}` ended with {done.returncode}. The end of {log}:\n{tail}")


def replace_process(command: Sequence[str]) -> None:
    """Become another program (never returns)."""
    sys.stdout.flush()
    os.execvp(command[0], list(command))  # noqa: S606 - an argument list, no shell
