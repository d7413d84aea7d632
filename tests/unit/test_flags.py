"""The check of a command line against an engine's flag data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible.module_utils.tandem.flags import FlagSet

ENGINES = Path(__file__).resolve().parents[2] / "engines"


@pytest.fixture(scope="module")
def sglang() -> FlagSet:
    return FlagSet.load("sglang-0.5.23", json.loads((ENGINES / "sglang-0.5.23" / "flags.json").read_text()))


@pytest.mark.parametrize(
    "argv",
    [
        ["--page-size", "64"],
        ["--page-size=64"],
        ["--numa-node", "0", "0", "1", "1"],
        ["--trust-remote-code", "--kv-cache-dtype", "fp8_e4m3"],
        ["--watchdog-timeout", "-1"],
        [],
    ],
)
def test_accepts(sglang: FlagSet, argv: list[str]) -> None:
    assert sglang.check(argv, "here") == []


@pytest.mark.parametrize(
    ("argv", "found", "expected"),
    [
        (["--pagesize", "64"], "the unknown flag --pagesize (did you mean --page-size?)", "a flag of sglang-0.5.23"),
        (["--cuda-graph-max-bs", "8"], "the abbreviation --cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
        (["--disaggregation-decode-tp", "4"], "the unknown flag --disaggregation-decode-tp", "a flag of"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8", "fp8_e4m3"),
        (["--page-size"], "--page-size with 0 values", "one value"),
        (["--page-size", "1", "2"], "--page-size with 2 values", "one value"),
        (["--trust-remote-code", "yes"], "--trust-remote-code with 1 values", "no value"),
        (["--page-size", "1", "--page-size", "2"], "--page-size more than once", "once"),
        (["stray"], "the word 'stray' without a flag", "a flag"),
        (["-x"], "the unknown flag -x", "a flag of"),
    ],
)
def test_refuses(sglang: FlagSet, argv: list[str], found: str, expected: str) -> None:
    problems = sglang.check(argv, "here")
    assert len(problems) == 1
    assert found in problems[0].found
    assert expected in problems[0].expected


def test_aliases_are_one_flag(sglang: FlagSet) -> None:
    assert "more than once" in sglang.check(["--tp-size", "2", "--tensor-parallel-size", "4"], "here")[0].found
