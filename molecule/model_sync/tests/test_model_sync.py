"""The published revision on a host that has a copy and on one that uses its source in place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testinfra.host import Host

MANIFEST = Path(__file__).resolve().parents[3] / "lab/models/tiny-chat.sha256"
MODELS = "/var/lib/tandem/models/tiny-chat"
REVISION = f"{MODELS}/r1"


def in_place(host: Host) -> bool:
    return str(host.backend.get_hostname()) == "mol-model-place"


def test_every_file_is_the_manifests(host: Host) -> None:
    lines = MANIFEST.read_text(encoding="utf-8")
    checked = host.run("cd %s && echo %s | sha256sum --check --strict", REVISION, lines)
    assert checked.rc == 0, checked.stdout + checked.stderr
    assert checked.stdout.count(": OK") == len(lines.splitlines()) > 3


def test_a_copy_is_a_directory_and_in_place_is_a_link(host: Host) -> None:
    revision = host.file(REVISION)
    if in_place(host):
        assert revision.is_symlink
        assert revision.linked_to == "/srv/models/tiny-chat"
    else:
        assert revision.is_directory
        assert not revision.is_symlink


def test_an_unprivileged_user_reads_it(host: Host) -> None:
    """The tests log in as an ordinary user."""
    assert host.run("id -u").stdout.strip() != "0"
    read = host.run("cat %s/* > /dev/null", REVISION)
    assert read.rc == 0, read.stderr


def test_nothing_half_is_left(host: Host) -> None:
    assert host.run("ls -A %s", MODELS).stdout.split() == ["r1", "r1.verified.json"]
    if not in_place(host):  # what was whole in a bad source waits for the next run
        assert host.run("ls -A /var/lib/tandem/models/bad").stdout.split() == [".r1.partial"]


def test_no_bad_model_was_published(host: Host) -> None:
    assert not host.file("/var/lib/tandem/models/bad/r1").exists


@pytest.mark.parametrize("field", ["size", "mtime_ns", "ctime_ns", "inode"])
def test_what_was_verified_is_what_is_there(host: Host, field: str) -> None:
    kept = json.loads(host.file(f"{MODELS}/r1.verified.json").content_string)["files"]["config.json"]
    read = (
        f"import os,json; s=os.stat('{REVISION}/config.json'); print(s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)"
    )
    size, mtime, ctime, inode = host.run("python3 -c %s", read).stdout.split()
    assert str(kept[field]) == {"size": size, "mtime_ns": mtime, "ctime_ns": ctime, "inode": inode}[field]
