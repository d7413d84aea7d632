"""Kernel packages as the inventory declares them: their faults, and what they are called on a host."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .kernels import tree_digest
from .problems import Problem, TandemError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_row(row: Mapping[str, Any], root: Path, where: str) -> list[Problem]:
    """Faults of one row of `tandem_kernels` that the control node shows. `root` is the repository."""
    where = f"{where} {row['name']}"
    problems = []
    if not _NAME.fullmatch(row["name"]):
        problems.append(Problem(where, repr(row["name"]), "a name of letters, digits, dots, dashes"))
    source = _source(row, root)
    if row["kind"] == "directory":
        problems += _check_directory(source, where)
    if row["kind"] == "wheel":
        problems += _check_wheel(row, source, where)
    return problems


def plan_row(row: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """The package as the plan carries it. Its id changes with its content."""
    source = _source(row, root)
    digest = tree_digest(source) if row["kind"] == "directory" else row["sha256"]
    return {
        "name": row["name"],
        "id": f"{row['name']}-{digest[:8]}",
        "kind": row["kind"],
        "source": str(source),
        "sha256": digest,
        "env": dict(row["env"]),
        "roles": list(row["roles"]),
    }


def _check_directory(source: Path, where: str) -> list[Problem]:
    expected = "an importable Python tree on the control node"
    if not source.is_dir():
        return [Problem(where, f"no directory {source}", expected)]
    try:
        tree_digest(source)
    except TandemError as error:
        return [Problem(where, str(error), expected)]
    return []


def _check_wheel(row: Mapping[str, Any], source: Path, where: str) -> list[Problem]:
    if not source.is_file() or source.suffix != ".whl":
        return [Problem(where, f"no wheel {source}", "a .whl file on the control node")]
    found = hashlib.sha256(source.read_bytes()).hexdigest()
    if row.get("sha256") != found:
        return [Problem(f"{where}.sha256", str(row.get("sha256")), f"{found}, the wheel's")]
    return []


def _source(row: Mapping[str, Any], root: Path) -> Path:
    return Path(root, row["source"]).resolve()
