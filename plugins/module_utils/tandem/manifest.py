"""A model's manifest: which files a revision consists of, and the SHA-256 of each.

It is what `sha256sum` prints and `sha256sum -c` reads: `<64 hex digits>  <path>` or `<64 hex digits> *<path>` a line,
blank lines and lines that begin with `#` left out. Paths are relative to the model's directory and made of plain
characters: whoever can write a manifest must not be able to reach beyond that directory.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from .problems import Problem

_LINE: Final = re.compile(r"([0-9a-fA-F]{64}) [ *](.*)")
_SEGMENT: Final = re.compile(r"[A-Za-z0-9._+=@,-]+")
_LONGEST_SEGMENT: Final = 255
"""Bytes in a file name (NAME_MAX)."""


@dataclass(frozen=True, order=True)
class Entry:
    """One file of a revision. `sha256` is in lower case."""

    path: str
    sha256: str


def read(text: str, where: str) -> tuple[list[Entry], list[Problem]]:
    """The entries of a manifest, sorted by path, and everything that is wrong with it. `where` names the manifest."""
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        place = f"{where}:{number}"
        matched = _LINE.fullmatch(line)
        if matched is None:
            problems.append(Problem(place, repr(line[:80]), "a line of sha256sum: 64 hex digits, two spaces, a path"))
            continue
        path = matched.group(2)
        while path.startswith("./"):
            path = path[2:]
        fault = _path_fault(path)
        if fault:
            problems.append(Problem(place, f"the path {matched.group(2)!r}, {fault}", "a plain path inside the model"))
        elif path in entries:
            problems.append(Problem(place, f"{path} for the second time", "each file once"))
        else:
            entries[path] = Entry(path, matched.group(1).lower())
    for path in entries:
        for parent in PurePosixPath(path).parents:
            if str(parent) in entries:
                problems.append(Problem(where, f"{parent} as a file and as a folder of {path}", "one of the two"))
    if not entries and not problems:
        problems.append(Problem(where, "no entry", "a line for each file of the model (sha256sum * > FILE)"))
    return sorted(entries.values()), problems


def manifest_digest(text: str) -> str:
    """What identifies the bytes of a revision: the same for every spelling and order of the same entries.

    Raises ValueError for a manifest with faults.
    """
    entries, problems = read(text, "manifest")
    if problems:
        raise ValueError("; ".join(map(str, problems)))
    return digest_of(entries)


def digest_of(entries: Sequence[Entry]) -> str:
    """SHA-256, in hex, over the entries as `read` gives them, in sha256sum's own format."""
    lines = "".join(f"{entry.sha256}  {entry.path}\n" for entry in entries)
    return hashlib.sha256(lines.encode()).hexdigest()


def _path_fault(path: str) -> str:
    if path.startswith("/"):
        return "which is absolute"
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            return f"which has the segment {segment!r}"
        if not _SEGMENT.fullmatch(segment) or segment.startswith("-") or len(segment) > _LONGEST_SEGMENT:
            return f"whose segment {segment[:40]!r} is no plain name (letters, digits and ._+=@,-)"
    return ""
