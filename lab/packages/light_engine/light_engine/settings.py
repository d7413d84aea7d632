"""What was asked of the process: the engine's flags on the command line, and LIGHT_ENGINE_* in the environment."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

VERSION: Final = "0.5.23"
DEATHS: Final = ("exit", "kill", "scheduler", "hang")


def log(message: str) -> None:
    """Write a line to the log, which is standard error."""
    print(f"light_engine: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Flags:
    """The flags that the stand-in acts on. `given` holds every flag of the command line, for /server_info."""

    model_path: Path
    served_model_name: str
    host: str
    port: int
    mode: str  # "null", "prefill" or "decode"
    bootstrap_port: int
    page_size: int
    kv_cache_dtype: str
    tp_size: int
    context_length: int
    enable_metrics: bool
    given: Mapping[str, Any]


@dataclass(frozen=True)
class Behaviour:
    """How to behave; see the package's docstring. Times in seconds."""

    start_delay: float
    warmup_delay: float
    token_delay: float
    stop_delay: float
    stop_by_kill: bool
    die: str
    die_after: float | None  # None: at the end of loading
    orphans: bool
    wrong: bool
    waiting_timeout: float
    bootstrap_timeout: float
    health_timeout: float
    handshake_timeout: float


class _Parser(argparse.ArgumentParser):
    """An argument parser that knows the engine's flags, or takes any flag."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"light_engine: error: {message}\n")


def parse_flags(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Flags:
    """Read the command line; exit with status 2 on a flag or choice that LIGHT_ENGINE_FLAGS does not know.

    Without LIGHT_ENGINE_FLAGS any flag is taken, with as many values as follow it.
    """
    known = environment.get("LIGHT_ENGINE_FLAGS")
    given = _parse_known(argv, Path(known)) if known else _parse_any(argv)
    model = given.get("model_path")
    if not model:
        raise SystemExit("light_engine: error: the following arguments are required: --model-path")
    path = Path(model)
    if not path.is_dir():
        raise SystemExit(f"light_engine: error: --model-path {path} is not a directory")
    mode = given.get("disaggregation_mode") or "null"
    if mode not in ("null", "prefill", "decode"):
        raise SystemExit(f"light_engine: error: --disaggregation-mode {mode}: expected null, prefill or decode")
    return Flags(
        model_path=path,
        served_model_name=str(given.get("served_model_name") or path),
        host=str(given.get("host") or "127.0.0.1"),
        port=int(given.get("port") or 30000),
        mode=mode,
        bootstrap_port=int(given.get("disaggregation_bootstrap_port") or 8998),
        page_size=int(given.get("page_size") or 1),
        kv_cache_dtype=str(given.get("kv_cache_dtype") or "auto"),
        tp_size=int(given.get("tp_size") or 1),
        context_length=int(given.get("context_length") or 512),
        enable_metrics=bool(given.get("enable_metrics")),
        given=given,
    )


def _parse_known(argv: Sequence[str], flags_file: Path) -> dict[str, Any]:
    parser = _Parser(prog="light_engine", add_help=False, allow_abbrev=True)
    for row in json.loads(flags_file.read_text("utf-8"))["flags"]:
        options: dict[str, Any] = {"dest": row["dest"], "default": None}
        names = row["flags"]
        if row["action"] == "BooleanOptionalAction":
            options["action"] = argparse.BooleanOptionalAction  # which makes the --no-… names itself
            names = [name for name in names if not name.startswith("--no-")]
        elif row["nargs"] == 0 or row["action"].startswith("DeprecatedStoreConst"):
            options |= {"action": "store_const", "const": True}
        else:
            options |= {"nargs": row["nargs"], "choices": row["choices"]}
        # The file gives choices as JSON; argparse compares them with words.
        if options.get("choices"):
            options["choices"] = [str(choice) for choice in options["choices"]]
        parser.add_argument(*names, **options)
    return {name: value for name, value in vars(parser.parse_args(list(argv))).items() if value is not None}


_DESTINATIONS: Final = {"model": "model_path", "tp": "tp_size", "tensor_parallel_size": "tp_size"}


def _parse_any(argv: Sequence[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            name = flag[2:].replace("-", "_")
            name = _DESTINATIONS.get(name, name)
            given[name] = value if equals else True
        elif not name:
            raise SystemExit(f"light_engine: error: unrecognized arguments: {word}")
        elif given[name] is True:
            given[name] = word
        else:
            given[name] = [*(given[name] if isinstance(given[name], list) else [given[name]]), word]
    return given


def read_behaviour(environment: Mapping[str, str] = os.environ) -> Behaviour:
    """Read LIGHT_ENGINE_*; exit on a value that means nothing, since a test with a typo would prove nothing."""

    def seconds(name: str, default: float) -> float:
        text = environment.get(name, str(default))
        try:
            return float(text)
        except ValueError:
            raise SystemExit(f"light_engine: error: {name} is {text!r}, expected seconds") from None

    def choice(name: str, default: str, choices: Sequence[str]) -> str:
        text = environment.get(name, default)
        if text not in choices:
            expected = ", ".join(filter(None, choices))
            raise SystemExit(f"light_engine: error: {name} is {text!r}, expected one of {expected}")
        return text

    starting = environment.get("LIGHT_ENGINE_DIE_WHEN", "starting") == "starting"
    return Behaviour(
        start_delay=seconds("LIGHT_ENGINE_START_DELAY", 0),
        warmup_delay=seconds("LIGHT_ENGINE_WARMUP_DELAY", 0),
        token_delay=seconds("LIGHT_ENGINE_TOKEN_DELAY", 0),
        stop_delay=seconds("LIGHT_ENGINE_STOP_DELAY", 0),
        stop_by_kill=choice("LIGHT_ENGINE_STOP_SIGNAL", "kill", ("kill", "exit")) == "kill",
        die=choice("LIGHT_ENGINE_DIE", "", ("", *DEATHS)),
        die_after=None if starting else seconds("LIGHT_ENGINE_DIE_WHEN", 0),
        orphans=choice("LIGHT_ENGINE_ORPHANS", "0", ("0", "1")) == "1",
        wrong=choice("LIGHT_ENGINE_WRONG", "0", ("0", "1")) == "1",
        waiting_timeout=seconds("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", 300),
        bootstrap_timeout=seconds("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", 300),
        health_timeout=seconds("SGLANG_HEALTH_CHECK_TIMEOUT", 20),
        handshake_timeout=seconds("LIGHT_ENGINE_HANDSHAKE_TIMEOUT", 15),
    )
