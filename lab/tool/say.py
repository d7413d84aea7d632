"""What the lab prints: stages with their times, a ticker while something takes long, sizes and durations."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

TICK_TTY = 1.0
"""Seconds between two updates of a ticker's line on a terminal."""
TICK_PLAIN = 10.0
"""Seconds between two lines of a ticker in a pipe or a log."""


def styled(text: str, *codes: str) -> str:
    """Wrap text in terminal attributes (SGR codes such as "1", "32") if stdout is a terminal and NO_COLOR is unset."""
    if not codes or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{';'.join(codes)}m{text}\x1b[0m"


def bold(text: str) -> str:
    """Return the text in bold."""
    return styled(text, "1")


def dim(text: str) -> str:
    """Return the text in a weaker colour."""
    return styled(text, "2")


def green(text: str) -> str:
    """Return the text in green."""
    return styled(text, "32")


def red(text: str) -> str:
    """Return the text in red."""
    return styled(text, "31")


def duration(seconds: float) -> str:
    """Return seconds for a reader: `0.4 s`, `71 s`, `4 min 13 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def size(count: float) -> str:
    """Return bytes for a reader, in decimal units: `812 B`, `34 kB`, `11.2 GB`."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def line(text: str = "") -> None:
    """Print one line at once, also into a pipe."""
    print(text, flush=True)


class Ticker:
    """Shows that a silent step is alive: its label, the elapsed seconds, and a note.

    On a terminal one line is rewritten every second; elsewhere a line appears every ten seconds. `quiet` seconds
    must pass without `touch` before anything is shown.
    """

    def __init__(self, label: str, note: Callable[[], str] = lambda: "", quiet: float = 0.0) -> None:
        """Prepare; the thread runs inside `with`. `note` is called from that thread and must not raise."""
        self._label = label
        self._note = note
        self._quiet = quiet
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._began = self._touched = time.monotonic()
        self._shown = False
        self._tty = sys.stdout.isatty()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Ticker":
        """Start ticking."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop ticking and leave an empty line behind on a terminal."""
        self._done.set()
        self._thread.join()
        self._clear()

    def write(self, text: str) -> None:
        """Print a line of the step's own; the ticker makes way and starts its quiet time again."""
        with self._lock:
            self._clear()
            self._touched = time.monotonic()
            print(text, flush=True)

    def _clear(self) -> None:
        if self._shown and self._tty:
            print("\r\x1b[K", end="", flush=True)
            self._shown = False

    def _run(self) -> None:
        while not self._done.wait(TICK_TTY if self._tty else TICK_PLAIN):
            note = self._note()
            with self._lock:
                now = time.monotonic()
                if self._done.is_set() or now - self._touched < self._quiet:
                    continue
                text = f"  … {self._label}, {now - self._began:.0f} s" + (f": {note}" if note else "")
                if self._tty:
                    print("\r\x1b[K" + dim(text[: _columns() - 1]), end="", flush=True)
                    self._shown = True
                else:
                    print(text, flush=True)


def _columns() -> int:
    try:
        return os.get_terminal_size().columns or 110  # a terminal that does not know its size says 0
    except OSError:
        return 110


@dataclass
class Stages:
    """The stages of a run with their times: one printed line each, and all of them again at the end."""

    rows: list[tuple[str, float]] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator["Stage"]:
        """Time what happens inside; print the stage's line when it ends well."""
        stage = Stage(name)
        began = time.monotonic()
        yield stage
        seconds = time.monotonic() - began
        self.rows.append((name, seconds))
        line(f"{green('ok')}  {name:<12} {stage.result:<72} {dim(f'{duration(seconds):>12}')}")

    def total(self) -> float:
        """Return the seconds of all stages together."""
        return sum(seconds for _, seconds in self.rows)


@dataclass
class Stage:
    """One stage; set `result` to what it found or did."""

    name: str
    result: str = ""
