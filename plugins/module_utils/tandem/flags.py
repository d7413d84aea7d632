"""Checks a command line against the flags that an engine release knows, without that engine.

The data is what `tools/engine_flags.py` dumps from the engine's own argparse parser. argparse also accepts
any unambiguous prefix of a flag; that is refused here, since an abbreviation that works today turns ambiguous at
an upgrade (sglang 0.5.20 made `--cuda-graph-max-bs` one).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .problems import Problem, nearest


@dataclass(frozen=True)
class Flag:
    """One option of an engine. `least` and `most` are the numbers of words that may follow it."""

    names: tuple[str, ...]
    least: int
    most: int | None
    choices: tuple[str, ...] | None
    deprecated: bool


@dataclass
class FlagSet:
    """All options of one engine release."""

    release: str
    flags: list[Flag]
    by_name: dict[str, Flag] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {name: flag for flag in self.flags for name in flag.names}

    @classmethod
    def load(cls, release: str, data: Mapping[str, Any]) -> FlagSet:
        """From the content of a flags.json: {"version": str, "flags": [{flags, action, nargs, choices}]}."""
        return cls(release, [_flag(row) for row in data["flags"]])

    def split(self, argv: Sequence[str]) -> list[tuple[str, list[str]]]:
        """The command line as (flag, its values). Words before the first flag come under an empty name."""
        parts: list[tuple[str, list[str]]] = []
        for word in argv:
            if self._is_flag(word):
                name, equals, value = word.partition("=")
                parts.append((name, [value] if equals else []))
            elif parts:
                parts[-1][1].append(word)
            else:
                parts.append(("", [word]))
        return parts

    def check(self, argv: Sequence[str], where: str) -> list[Problem]:
        """Every fault of a command line: unknown, abbreviated or repeated flags, bad choices, wrong counts."""
        problems: list[Problem] = []
        seen: set[tuple[str, ...]] = set()
        for name, values in self.split(argv):
            flag = self.by_name.get(name)
            if flag is None:
                problems.append(self._unknown(name, values, where))
                continue
            if flag.names in seen:
                problems.append(Problem(where, f"{name} more than once", "each flag once"))
            seen.add(flag.names)
            problems += _check_values(name, flag, values, where)
        return problems

    def _is_flag(self, word: str) -> bool:
        return word.startswith("-") and not _is_number(word)

    def _unknown(self, name: str, values: Sequence[str], where: str) -> Problem:
        if not name:
            return Problem(where, f"the word {values[0]!r} without a flag", "a flag, as in --page-size, 64")
        longer = sorted(known for known in self.by_name if known.startswith(name)) if name.startswith("--") else []
        if longer:
            return Problem(where, f"the abbreviation {name}", f"the full spelling ({', '.join(longer[:4])})")
        return Problem(where, f"the unknown flag {name}{nearest(name, self.by_name)}", f"a flag of {self.release}")


def _flag(row: Mapping[str, Any]) -> Flag:
    least, most = _count(row.get("nargs"), row.get("action") or "")
    choices = row.get("choices")
    return Flag(
        names=tuple(row["flags"]),
        least=least,
        most=most,
        choices=tuple(str(choice) for choice in choices) if choices else None,
        deprecated="Deprecated" in (row.get("action") or ""),
    )


def _count(nargs: Any, action: str) -> tuple[int, int | None]:
    if action == "DeprecatedStoreConstAction":
        return 0, 0
    match nargs:
        case None:
            return 1, 1
        case "?":
            return 0, 1
        case "*":
            return 0, None
        case "+":
            return 1, None
        case _:
            return int(nargs), int(nargs)


def _check_values(name: str, flag: Flag, values: Sequence[str], where: str) -> Iterable[Problem]:
    if len(values) < flag.least or (flag.most is not None and len(values) > flag.most):
        expected = {(0, 0): "no value", (1, 1): "one value", (0, 1): "one value or none", (1, None): "values"}
        yield Problem(where, f"{name} with {len(values)} values", expected.get((flag.least, flag.most), "values"))
    if flag.deprecated:
        yield Problem(where, f"the deprecated {name}", "its successor, see the engine's --help")
    for value in values:
        if flag.choices and value not in flag.choices:
            hint = nearest(value, flag.choices)
            yield Problem(where, f"{name} {value}{hint}", f"one of {', '.join(flag.choices)}")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
