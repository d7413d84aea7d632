"""Just enough of the Prometheus text format to read a worker's counters (exposition format 0.0.4)."""

from __future__ import annotations

import re
from collections.abc import Iterator

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+(?P<value>\S+)")


def samples(text: str) -> Iterator[tuple[str, float]]:
    """(name, value) of each sample, labels dropped."""
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match:
            yield match["name"], float(match["value"])


def total(text: str, name: str) -> float:
    """The sum over all labels of the samples called `name`, 0.0 where there is none."""
    return sum(value for sample, value in samples(text) if sample == name)
