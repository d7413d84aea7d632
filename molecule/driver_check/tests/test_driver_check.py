"""What driver_check left on a host whose GPU tool is stood in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from testinfra.host import Host

REPORT = "/var/lib/tandem/driver_check.json"
GPU_ROWS = {
    "nvidia_smi",
    "driver_loaded",
    "driver_version",
    "gpu_count",
    "gpu_declared",
    "gpu_order",
    "gpu_model",
    "gpu_memory",
    "gpu_numa",
}


@pytest.fixture
def report(host: Host) -> dict[str, Any]:
    file = host.file(REPORT)
    assert (file.user, file.mode) == ("root", 0o644)
    kept: dict[str, Any] = json.loads(file.content_string)
    return kept


@pytest.fixture
def status(report: dict[str, Any]) -> dict[str, set[str]]:
    """The ids of the rows of each status."""
    return {name: {row["id"] for row in report["findings"] if row["status"] == name} for name in report["counts"]}


def test_the_stood_in_tool_is_believed_and_the_kernel_is_not_made_up(
    report: dict[str, Any], status: dict[str, set[str]]
) -> None:
    assert status["warn"] == {"driver_loaded", "gpu_numa"}
    assert status["pass"] >= GPU_ROWS - {"driver_loaded", "gpu_numa"}
    assert not status["fail"]
    rows = [row for row in report["findings"] if row["id"] == "gpu_numa"]
    assert len(rows) == 2  # one for each instance
    assert all("sysfs has no such PCI device" in row["observed"] for row in rows)
    assert {row["reason"] for row in rows} == {"no cards in a container"}
    assert [gpu["numa_node"] for gpu in report["gpus"]] == [None] * 8


def test_what_is_said_of_the_system_is_true(host: Host, report: dict[str, Any]) -> None:
    assert host.run("systemctl --version").stdout.split()[1] == report["host"]["systemd"]
    assert host.run("ldd --version").stdout.splitlines()[0].split()[-1] == report["host"]["glibc"]
    assert host.file("/sys/devices/system/node/online").content_string.strip() == "0"
    assert report["host"]["numa"] == {"online": [0], "with_cpus": [0], "with_memory": [0]}
    assert host.run("uname -r").stdout.strip() == report["host"]["kernel"]
