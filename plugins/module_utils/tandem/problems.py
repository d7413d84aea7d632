"""A fault in what the operator wrote: what was found, what was expected, where to change it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Problem:
    """One fault. `where` names a setting and, where known, its file and line."""

    where: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.where}: found {self.found}; expected {self.expected}"


class TandemError(Exception):
    """A fault that ends the work at hand. Its text is the whole message for the operator."""


def report(headline: str, problems: Sequence[Problem]) -> str:
    """All problems as one numbered message, under one headline."""
    unique = list(dict.fromkeys(problems))
    lines = [f"{headline} ({len(unique)} to mend):"]
    lines += [f"  {number}. {problem}" for number, problem in enumerate(unique, 1)]
    return "\n".join(lines)


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the known name that is most like `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
