"""The child process: whatever is answered passes through it, as it passes through a scheduler of the engine.

It takes one JSON value a line on its standard input and writes the line back. It holds a segment in
/dev/shm, whose name the main process knows (`segment`), and which stays if nobody removes it. It ends with
its input, unless started with --orphan.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Final

TITLE: Final = "light_engine::scheduler"
SEGMENT_BYTES: Final = 1 << 20


def segment(pid: int) -> Path:
    """Return the shared memory segment of the scheduler with this process id."""
    return Path(f"/dev/shm/light_engine_{pid}")  # noqa: S108 - 2026-12-01: leaving it behind is the point


def rename(title: str) -> None:
    """Give this process another name, as engines do: by setproctitle if there, else the short one that `comm` holds."""
    if importlib.util.find_spec("setproctitle"):
        importlib.import_module("setproctitle").setproctitle(title)
    else:
        Path("/proc/self/comm").write_text(title[:15], encoding="ascii")


def main() -> None:
    """Run until the input ends."""
    rename(TITLE)
    segment(os.getpid()).write_bytes(bytes(SEGMENT_BYTES))
    for line in sys.stdin:
        print(line, end="", flush=True)
    while "--orphan" in sys.argv:
        signal.pause()


if __name__ == "__main__":
    main()
