"""What a check of a host found: rows with a severity, shown as one table and kept as JSON.

A severity may be changed per host, with a reason: living with one odd host needs no check disabled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from .problems import Problem, nearest

Severity = Literal["fail", "warn"]
Status = Literal["fail", "warn", "skip", "pass"]

SEVERITIES: Final = ("fail", "warn")
# The order of the table: what has to be mended first stands on top.
STATUSES: Final[tuple[Status, ...]] = ("fail", "warn", "skip", "pass")
_COUNTED: Final[Mapping[Status, str]] = {
    "fail": "failed",
    "warn": "warned about",
    "skip": "skipped",
    "pass": "passed",
}


@dataclass(frozen=True)
class Finding:
    """One row: what was found, what was expected, how to fix it, and where the rule comes from."""

    id: str
    status: Status
    observed: str
    expected: str
    fix: str
    source: str
    reason: str = ""
    """Why this host has another severity than the check's own. Empty where it has not."""


@dataclass(frozen=True)
class Override:
    """The operator's severity for one check on one host, and why."""

    severity: Severity
    reason: str


def read_overrides(
    given: Mapping[str, Any], known: Iterable[str], setting: str
) -> tuple[dict[str, Override], list[Problem]]:
    """`{id: {severity: fail|warn, reason: text}}` as overrides, with every fault in it."""
    known = list(known)
    overrides: dict[str, Override] = {}
    problems: list[Problem] = []
    for check, row in given.items():
        where = f"{setting}.{check}"
        severity = row.get("severity") if isinstance(row, Mapping) else None
        reason = str(row.get("reason") or "").strip() if isinstance(row, Mapping) else ""
        extra = sorted(set(row) - {"severity", "reason"}) if isinstance(row, Mapping) else []
        if check not in known:
            problems.append(Problem(where, f"no check of that name{nearest(check, known)}", ", ".join(known)))
        elif severity not in SEVERITIES or extra:
            expected = "a mapping {severity: fail or warn, reason: text}"
            problems.append(Problem(where, repr(row), expected))
        elif not reason:
            problems.append(Problem(where, "no reason", "the reason why this host differs, as `reason`"))
        else:
            overrides[check] = Override("fail" if severity == "fail" else "warn", reason)
    return overrides, problems


def override(findings: Iterable[Finding], overrides: Mapping[str, Override]) -> list[Finding]:
    """The findings with the operator's severities. What passed or was skipped stays so."""
    return [
        replace(row, status=overrides[row.id].severity, reason=overrides[row.id].reason)
        if row.id in overrides and row.status in SEVERITIES
        else row
        for row in findings
    ]


def count(findings: Iterable[Finding]) -> dict[Status, int]:
    """How many findings have each status."""
    counted = Counter(row.status for row in findings)
    return {status: counted[status] for status in STATUSES}


def as_rows(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """The findings as plain data."""
    return [asdict(row) for row in findings]


def table(findings: Sequence[Finding]) -> str:
    """All findings for a person to read, the worst on top; what is not right says how to mend it."""
    counts = count(findings)
    width = max((len(row.id) for row in findings), default=0)
    indent = " " * (width + 10)
    lines = [", ".join(f"{number} {_COUNTED[status]}" for status, number in counts.items() if number) + ":"]
    for status in STATUSES:
        for row in (row for row in findings if row.status == status):
            shown = status.upper() if status in SEVERITIES else status
            lines.append(f"  {shown:<4}  {row.id:<{width}}  {row.observed}")
            if status in SEVERITIES:
                lines.append(f"{indent}expected: {row.expected}")
                lines.append(f"{indent}fix: {row.fix}")
                lines.append(f"{indent}source: {row.source}")
            if row.reason:
                lines.append(f"{indent}set to {status} on this host: {row.reason}")
    return "\n".join(lines)
