#!/usr/bin/env python3
"""Pins the packages of engine releases: requirements.in -> requirements.lock, of engines/ and lab/engines/.

    .venv/bin/python tools/engine_locks.py                       # what changed in a requirements.in, nothing else
    .venv/bin/python tools/engine_locks.py --upgrade smg-1.13.0  # the newest versions that it allows

One lock serves every supported Python (3.11 and newer). A lock's content is part of its runtime's id: hosts make a
runtime of the new lock beside the old one, and instances take it with their next release.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")


def command(engine: Path, *, upgrade: bool) -> list[str]:
    """The uv command that pins one engine. Run in the engine's directory, the lock names no path of this machine."""
    words = [str(UV), "pip", "compile", "--quiet", "--no-config", "--no-header", "--universal", "--generate-hashes"]
    words += ["--python-version", "3.11", "requirements.in", "--output-file", "requirements.lock"]
    if (engine / "overrides.in").exists():
        words += ["--override", "overrides.in"]
    return [*words, "--upgrade"] if upgrade else words


def main(argv: Sequence[str]) -> int:
    """Returns uv's exit status, the worst of all."""
    sources = [*sorted(ROOT.glob("engines/*/requirements.in")), *sorted(ROOT.glob("lab/engines/*/requirements.in"))]
    engines = {path.parent.name: path.parent for path in sources}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engine", nargs="*", metavar="ENGINE", help=f"all if none is named: {', '.join(engines)}")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that a requirements.in allows")
    options = parser.parse_args(argv)
    unknown = [name for name in options.engine if name not in engines]
    if unknown:
        parser.error(f"no {unknown[0]}; expected one of {', '.join(engines)}")
    worst = 0
    for name in options.engine or engines:
        done = subprocess.run(
            command(engines[name], upgrade=options.upgrade), cwd=engines[name], stdout=subprocess.DEVNULL, check=False
        )
        print(f"{name}: {'pinned' if done.returncode == 0 else 'failed'}", file=sys.stderr)
        worst = max(worst, done.returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
