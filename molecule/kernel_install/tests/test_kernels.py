"""What the role left on a host: the operator's packages, whole, readable by every user, and nothing that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testinfra.host import Host

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
KERNELS = "/opt/tandem/kernels"
NAMES = ("lab-indexer", "lab-mla")


def place(host: Host, name: str) -> str:
    """The directory of a package."""
    found = [entry for entry in host.file(KERNELS).listdir() if entry.startswith(f"{name}-") and "." not in entry]
    assert len(found) == 1, found
    return f"{KERNELS}/{found[0]}"


def test_there_is_what_was_declared_and_nothing_half(host: Host) -> None:
    there = sorted(entry for entry in host.file(KERNELS).listdir() if entry.startswith(NAMES))
    places = [place(host, name).rpartition("/")[2] for name in NAMES]
    assert there == sorted([*places, *(f"{name}.verified.json" for name in places)])


def test_the_directory_is_the_control_nodes(host: Host) -> None:
    files = {file for file in (PACKAGES / "lab_mla").rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert len(files) == 3
    for file in files:
        there = host.file(f"{place(host, 'lab-mla')}/{file.relative_to(PACKAGES / 'lab_mla')}")
        assert there.content == file.read_bytes()
        assert there.mode == (0o755 if file.name == "tune.sh" else 0o644)
        assert (there.user, there.group) == ("root", "root")


def test_every_user_can_import_both_and_no_dependency_came_along(host: Host) -> None:
    assert host.user().uid != 0
    path = ":".join(place(host, name) for name in NAMES)
    done = host.run(f"PYTHONPATH={path} /usr/bin/python3 -c 'import lab_mla, lab_indexer'")
    assert done.rc == 0, done.stderr
    assert [name for name in host.file(place(host, "lab-indexer")).listdir() if name.endswith(".dist-info")] == [
        "lab_indexer-1.0.dist-info"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_verified_is_recorded(host: Host, name: str) -> None:
    record = json.loads(host.file(f"{place(host, name)}.verified.json").content_string)
    assert place(host, name).endswith(f"-{record['sha256'][:8]}")
    assert record["name"] == name


def test_nothing_was_started(host: Host) -> None:
    units = host.run("systemctl list-units --all --plain --no-legend 'tandem-*'")
    assert units.rc == 0
    assert units.stdout == ""
