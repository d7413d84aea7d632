#!/usr/bin/env python3
"""How long a site.yml that changes nothing takes, beside 40 empty tasks on the same host, in one run.

usage: tools/bench_no_change.py INVENTORY [ROUNDS]     e.g. .venv/bin/python tools/bench_no_change.py inventory/lab
The host must be deployed. Prints seconds (median, and each) and the ratio; these depend on the machine, the ratio less.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EMPTY = "- hosts: tandem_gpu\n  gather_facts: false\n  become: true\n  tasks:\n" + "    - ansible.builtin.ping:\n" * 40


def main(arguments: list[str]) -> int:
    inventory = arguments[0]
    rounds = int(arguments[1]) if len(arguments) > 1 else 3
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty.yml")
        empty.write_text(EMPTY)
        seconds: dict[str, list[float]] = {"site.yml": [], "40 empty tasks": []}
        for _ in range(rounds):
            seconds["site.yml"].append(run(str(ROOT / "site.yml"), inventory))
            seconds["40 empty tasks"].append(run(str(empty), inventory))
    for name, row in seconds.items():
        print(f"{name:<15} {statistics.median(row):6.1f} s   ({', '.join(f'{one:.1f}' for one in row)})")
    ratio = statistics.median(seconds["site.yml"]) / statistics.median(seconds["40 empty tasks"])
    print(f"{'ratio':<15} {ratio:6.2f}")
    return 0


def run(playbook: str, inventory: str) -> float:
    command = [str(Path(sys.executable).with_name("ansible-playbook")), playbook, "-i", inventory]
    began = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
