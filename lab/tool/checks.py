"""What `make check`, `make test` and `make drills` run: each stage with its time, all faults of a stage at once."""

import argparse
import os
import re
import shlex
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from lab.tool import say, venv
from lab.tool.errors import LabError
from lab.tool.paths import Paths
from lab.tool.setup import setup_stages

LAST = "site"
"""The whole-stack scenario: after the roles' own, which fail sooner and say more."""
DRILL = "drill_"
"""Scenarios of this prefix are series of minutes to hours; `make drills` runs them, `make test` does not."""

TICK_QUIET = 5.0
"""Seconds of silence before the linters show that they are at work."""

# molecule puts a rule before every line of what it runs
_SUMMARY = re.compile(r"^[=\s│]*((?:\d+ [a-z]+(?:, )?)+) in [0-9.]+s.*$")
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Outcome:
    """How the stages ended."""

    rows: list[tuple[str, float, bool]] = field(default_factory=list)
    """Name, seconds, success."""
    counts: Counter[str] = field(default_factory=Counter)
    """What pytest counted in all of them: passed, failed, skipped."""
    began: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def failed(self) -> list[str]:
        """Return the names of the stages that failed."""
        return [name for name, _, good in self.rows if not good]


def tests_counted(line: str) -> Counter[str]:
    """Return what a closing line of pytest counts: `3 failed, 40 passed, 1 skipped in 12.3s`. Empty for other lines."""
    found = _SUMMARY.match(_COLOURS.sub("", line).strip())
    counts: Counter[str] = Counter()
    for number, word in _COUNT.findall(found[1]) if found else ():
        counts["failed" if word.startswith("error") else word] += int(number)
    return counts


def scenarios(repo: Path) -> list[str]:
    """Return a checkout's molecule scenarios in the order in which they run: roles by name, the whole stack last."""
    names = [file.parent.name for file in repo.glob("molecule/*/molecule.yml")]
    return sorted(names, key=lambda name: (name.startswith(LAST), name != LAST, name))


def stage(
    paths: Paths, outcome: Outcome, name: str, command: Sequence[str], whole: Callable[[str], None] | None = None
) -> None:
    """Run one stage with the control node's tools first in PATH.

    Its output is passed on as it comes; or, with `whole`, to that in one piece at the end, so that stages may run
    beside each other.
    """
    title = f"\n{say.bold(f'=== {name}')}  {say.dim(shlex.join(command))}"
    held = [f"{title}\n"]
    if whole is None:
        say.line(title)
    began = time.monotonic()
    counts: Counter[str] = Counter()
    with subprocess.Popen(
        command,
        cwd=paths.repo,
        env=venv.environment(paths),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None  # noqa: S101 - stdout=PIPE above
        for line in process.stdout:
            held.append(line)
            if whole is None:
                print(line, end="", flush=True)
            counts += tests_counted(line)
    with outcome.lock:
        if whole is not None:
            whole("".join(held).rstrip("\n"))
        outcome.counts += counts
        outcome.rows.append((name, time.monotonic() - began, process.returncode == 0))


def lint_and_unit(paths: Paths, outcome: Outcome) -> None:
    """Run every linter and the unit tests, two at a time, whatever the others find."""
    commands = {
        "ansible-lint": ["ansible-lint", "--offline", "--strict", "-q"],
        "unit tests": ["pytest", "-n", str(os.cpu_count() or 1)],
        "ruff check": ["ruff", "check"],
        "ruff format": ["ruff", "format", "--check"],
        "yamllint": ["yamllint", "--strict", "."],
        "mypy": ["mypy"],
    }
    with say.Ticker("linters and unit tests", quiet=TICK_QUIET) as ticker, ThreadPoolExecutor(max_workers=2) as pool:
        for done in [pool.submit(stage, paths, outcome, *one, ticker.write) for one in commands.items()]:
            done.result()


def molecule(paths: Paths, outcome: Outcome, names: Sequence[str]) -> None:
    """Run scenarios one after the other, each from nothing to nothing."""
    for name in names:
        stage(paths, outcome, f"molecule {name}", ["molecule", "test", "--scenario-name", name])


def close(outcome: Outcome, stages: say.Stages, skipped: Sequence[str]) -> int:
    """Print the times and what was counted; return the exit status."""
    say.line(f"\n{say.bold('Where the time went')}")
    for name, seconds in stages.rows:
        say.line(f"  {name:<28} {say.duration(seconds):>12}")
    for name, seconds, good in outcome.rows:
        say.line(f"  {name:<28} {say.duration(seconds):>12}  {say.green('ok') if good else say.red('FAILED')}")
    for name in skipped:
        say.line(f"  {name:<28} {'not run':>12}")
    seconds = stages.total() + time.monotonic() - outcome.began
    say.line(f"  {'all of it':<28} {say.duration(seconds):>12}")
    for name in outcome.failed:
        say.line(say.red(f"failed: {name}"))
    # a linter that fails is a failed test as well
    failed = max(outcome.counts["failed"], len(outcome.failed))
    skips = f", {outcome.counts['skipped']} skipped" if outcome.counts["skipped"] else ""
    say.line(f"{outcome.counts['passed']} passed, {failed} failed{skips}")
    return 1 if outcome.failed else 0


def check(paths: Paths, _: argparse.Namespace) -> int:
    """Lint and unit tests."""
    paths.claim()
    stages = say.Stages()
    with stages.stage("tools") as step:
        step.result = venv.ensure(paths)
    outcome = Outcome()
    lint_and_unit(paths, outcome)
    return close(outcome, stages, [])


def test(paths: Paths, options: argparse.Namespace) -> int:
    """Lint, unit tests, and every scenario; or the named scenarios alone."""
    found = scenarios(paths.repo)
    unknown = sorted(set(options.scenarios) - set(found))
    if unknown:
        raise LabError(f"no scenario {', '.join(unknown)} in molecule/; expected one of {', '.join(found)}")
    names = options.scenarios or [name for name in found if not name.startswith(DRILL)]
    stages = say.Stages()
    setup_stages(paths, stages)
    outcome = Outcome()
    if not options.scenarios:
        lint_and_unit(paths, outcome)
        if outcome.failed:
            return close(outcome, stages, [f"molecule {name}" for name in names])
    molecule(paths, outcome, names)
    return close(outcome, stages, [])


def drills(paths: Paths, _: argparse.Namespace) -> int:
    """Run the long series."""
    names = [name for name in scenarios(paths.repo) if name.startswith(DRILL)]
    if not names:
        raise LabError(f"no scenario molecule/{DRILL}* in this checkout")
    stages = say.Stages()
    setup_stages(paths, stages)
    outcome = Outcome()
    molecule(paths, outcome, names)
    return close(outcome, stages, [])
