#!/usr/bin/env python3
"""Writes the flags.json of an engine release: every option that its own argparse parser knows.

Run with the python of an installed runtime, which need not have a GPU:

    /opt/tandem/runtimes/<id>/bin/python tools/engine_flags.py sglang > engines/sglang-0.5.23/flags.json

Standard output is the JSON text {"version": str, "flags": [{flags, dest, action, nargs, choices, default, help}]},
in the parser's order. What the engine prints while it is imported goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

# Help texts are for a reader of an error message, who wants the sense of a flag and not its manual.
HELP_LIMIT: Final = 300


def sglang() -> argparse.ArgumentParser:
    """The parser of `python -m sglang.launch_server`, built as `prepare_server_args` builds it."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return parser


def router(package: str) -> argparse.ArgumentParser:
    """The parser of `python -m <package>.launch_router`, as `parse_router_args` of that module builds it."""
    parser = argparse.ArgumentParser()
    module = importlib.import_module(f"{package}.router_args")
    module.RouterArgs.add_cli_args(parser, use_router_prefix=False)
    return parser


ENGINES: Final[dict[str, Callable[[], argparse.ArgumentParser]]] = {
    "sglang": sglang,
    "sglang-router": lambda: router("sglang_router"),
    "smg": lambda: router("smg"),
}


def plain(value: Any) -> Any:
    """A default as JSON has it; what JSON has no form for becomes its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def rows(actions: Iterable[argparse.Action]) -> list[dict[str, Any]]:
    """One row an option. Positional arguments have no flag and are left out."""
    return [
        {
            "flags": list(action.option_strings),
            "dest": action.dest,
            "action": type(action).__name__,
            "nargs": action.nargs,
            # Sorted, as text: engines keep some of them in sets, and a dump must not differ from run to run.
            "choices": None if action.choices is None else sorted(str(choice) for choice in action.choices),
            "default": plain(action.default),
            "help": action.help[:HELP_LIMIT] if action.help else action.help,
        }
        for action in actions
        if action.option_strings
    ]


def main(argv: list[str]) -> int:
    """Exit status 0 when the JSON text was written; a missing engine ends with Python's own words."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("engine", choices=sorted(ENGINES), help="the distribution whose parser is dumped")
    engine = options.parse_args(argv).engine
    with contextlib.redirect_stdout(sys.stderr):
        parser = ENGINES[engine]()
        # argparse keeps no public list of its actions.
        data = {"version": importlib.metadata.version(engine), "flags": rows(parser._actions)}
    json.dump(data, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
