"""Kernel packages: verbatim, verified, whole or absent."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from ansible.module_utils.tandem import kernels, uv
from ansible.module_utils.tandem.problems import TandemError
from by_path import load
from module_run import run_module
from wheels import make_wheel, sha256

PYTHON = "/usr/bin/python3"
module = load("plugins/modules", "tandem_kernels")
action = load("plugins/action", "tandem_kernels")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tree as an operator may have it."""
    root = tmp_path / "source"
    (root / "mla/kernels").mkdir(parents=True)
    (root / "mla/__init__.py").write_text("NAME = 'mla'\n")
    (root / "mla/kernels/decode.cu").write_text("// a kernel\n")
    (root / "mla/empty.py").touch()
    (root / "sitecustomize.py").write_text("import mla\n")
    (root / "mla/tune.sh").write_text("#!/bin/sh\n")
    (root / "mla/tune.sh").chmod(0o755)
    return root


class Host:
    """A host's /opt/tandem, and the module with what the action plugin would have sent."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "opt"
        self.sent = folder / "sent"
        self.sent.mkdir()

    def row(self, source: Path, name: str = "mla", **changes: Any) -> dict[str, Any]:
        if source.is_dir():
            digest, archive = kernels.tree_digest(source), self.sent / f"{name}.tar.gz"
            with archive.open("wb") as out:
                kernels.pack(source, out)
        else:
            digest, archive = sha256(source), self.sent / source.name
            shutil.copyfile(source, archive)
        return {
            "name": name,
            "id": f"{name}-{digest[:8]}",
            "kind": "directory" if source.is_dir() else "wheel",
            "source": str(source),
            "archive": str(archive),
            "sha256": digest,
            "roles": ["prefill", "decode"],
            "env": {"SGLANG_SM120_MMA_FLASHMLA": "1"},
            **changes,
        }

    def stage(self, *rows: dict[str, Any], check: bool = False, **changes: Any) -> dict[str, Any]:
        params = {"kernels": rows, "root": str(self.root), "python": PYTHON, **changes}
        result: dict[str, Any] = run_module(module.main, params, check=check)
        return result

    def path(self, row: dict[str, Any]) -> Path:
        return self.root / "kernels" / str(row["id"])

    def left(self) -> list[str]:
        return sorted(entry.name for entry in (self.root / "kernels").iterdir())

    def give_uv(self) -> None:
        program = self.root / "tools" / f"uv-{uv.UV_VERSION}" / "bin" / "uv"
        program.parent.mkdir(parents=True)
        found = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert found, "no uv beside the tests' Python; `make setup` installs it"
        program.symlink_to(found)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def content(root: Path) -> dict[str, tuple[bytes, int]]:
    return {name: (file.read_bytes(), file.stat().st_mode & 0o777) for name, file in kernels.tree_files(root)}


# The digest


def test_the_digest_is_the_same_wherever_the_tree_is(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copy)
    os.utime(tmp_path / "copy/mla/__init__.py", (1, 1))
    (tmp_path / "copy/mla/__init__.py").chmod(0o640)
    assert kernels.tree_digest(tmp_path / "copy") == kernels.tree_digest(source) == kernels.tree_digest(str(source))


def test_the_digest_is_written_down(tmp_path: Path) -> None:
    """Control node and hosts may run different releases of this code: the digest must not drift."""
    (tmp_path / "a.py").write_text("x = 1\n")
    assert kernels.tree_digest(tmp_path) == "42a91da6a32b77d278fc2d026a72aa230bc3036a4ac9bda72d79c111a999ae43"


@pytest.mark.parametrize("change", ["content", "name", "run", "more", "less", "moved"])
def test_the_digest_sees_every_change_that_a_copy_would_carry(source: Path, change: str) -> None:
    before = kernels.tree_digest(source)
    match change:
        case "content":
            (source / "mla/__init__.py").write_text("NAME = 'mlb'\n")
        case "name":
            (source / "mla/empty.py").rename(source / "mla/void.py")
        case "run":
            (source / "mla/tune.sh").chmod(0o644)
        case "more":
            (source / "mla/more.py").touch()
        case "less":
            (source / "mla/empty.py").unlink()
        case "moved":
            (source / "mla/empty.py").rename(source / "empty.py")
    assert kernels.tree_digest(source) != before


def test_bytecode_is_left_out(source: Path) -> None:
    before = kernels.tree_digest(source)
    (source / "mla/__pycache__").mkdir()
    (source / "mla/__pycache__/x.cpython-311.pyc").write_bytes(b"x")
    assert kernels.tree_digest(source) == before


@pytest.mark.parametrize("odd", ["link", "folder link", "pipe"])
def test_what_cannot_be_copied_verbatim_is_refused_by_name(source: Path, odd: str) -> None:
    match odd:
        case "link":
            (source / "mla/odd").symlink_to("/etc/passwd")
        case "folder link":
            (source / "mla/odd").symlink_to("/etc")
        case "pipe":
            os.mkfifo(source / "mla/odd")
    with pytest.raises(TandemError, match=r"mla/odd: found a link or a special file"):
        kernels.tree_digest(source)


def test_an_empty_tree_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    with pytest.raises(TandemError, match="found no file"):
        kernels.tree_digest(tmp_path / "a")


# Packing


def test_what_is_unpacked_is_what_was_packed(source: Path, tmp_path: Path) -> None:
    (source / "mla/__pycache__").mkdir()
    (source / "mla/__pycache__/x.pyc").touch()
    first, second = io.BytesIO(), io.BytesIO()
    kernels.pack(source, first)
    os.utime(source / "mla/__init__.py", (1, 1))
    kernels.pack(source, second)
    (tmp_path / "a.tar.gz").write_bytes(first.getvalue())
    kernels.unpack(tmp_path / "a.tar.gz", tmp_path / "out")
    assert content(tmp_path / "out") == content(source)
    assert not list((tmp_path / "out").rglob("__pycache__"))


@pytest.mark.parametrize("name", ["../out.py", "/etc/out.py", "a/../../out.py", "a//b.py"])
def test_an_archive_cannot_write_elsewhere(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as bad:
        entry = tarfile.TarInfo(name)
        bad.addfile(entry, io.BytesIO())
    with pytest.raises(TandemError, match="expected plain files"):
        kernels.unpack(tmp_path / "bad.tar.gz", tmp_path / "out")


def test_a_broken_archive_is_said(tmp_path: Path) -> None:
    (tmp_path / "bad.tar.gz").write_bytes(b"no archive")
    with pytest.raises(TandemError, match="no readable archive"):
        kernels.unpack(tmp_path / "bad.tar.gz", tmp_path / "out")


# Directories on a host


@pytest.mark.usefixtures("strict_umask")
def test_a_directory_is_copied_verbatim(host: Host, source: Path) -> None:
    row = host.row(source)
    result = host.stage(row)
    assert result["changed"], result
    assert result["kernels"] == [
        {"id": row["id"], "name": "mla", "path": str(host.path(row)), "action": "install", "reason": "absent"}
    ]
    there, here = content(host.path(row)), content(source)
    assert {name: data for name, (data, _) in there.items()} == {name: data for name, (data, _) in here.items()}
    assert {name: oct(mode) for name, (_, mode) in there.items()} == {
        name: "0o755" if name == "mla/tune.sh" else "0o644" for name in here
    }
    assert all(folder.stat().st_mode & 0o777 == 0o755 for folder in (host.path(row), host.path(row) / "mla"))
    assert host.left() == [row["id"], f"{row['id']}.verified.json"]


def test_a_second_run_reads_no_content(host: Host, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = host.row(source)
    host.stage(row)

    def read(_: object) -> NoReturn:
        pytest.fail("read the files")

    monkeypatch.setattr(kernels, "tree_digest", read)
    result = host.stage({**row, "archive": None})
    assert not result["changed"]
    assert not result["failed"], result


def test_a_file_that_was_only_touched_is_no_change(host: Host, source: Path) -> None:
    row = host.row(source)
    host.stage(row)
    os.utime(host.path(row) / "mla/__init__.py", (1, 1))
    assert not host.stage(row)["changed"]


@pytest.mark.parametrize("spoil", ["edited", "removed", "added", "linked", "marker gone", "marker garbage", "all gone"])
def test_what_is_not_as_it_was_verified_is_put_in_place_again(host: Host, source: Path, spoil: str) -> None:
    row = host.row(source)
    host.stage(row)
    there, marker = host.path(row), host.root / "kernels" / f"{row['id']}.verified.json"
    match spoil:
        case "edited":
            (there / "mla/__init__.py").write_text("NAME = 'mlx'\n")
        case "removed":
            (there / "mla/empty.py").unlink()
        case "added":
            (there / "mla/added.py").touch()
        case "linked":
            (there / "mla/added.py").symlink_to("empty.py")
        case "marker gone":
            marker.unlink()
        case "marker garbage":
            marker.write_text("[]")
        case "all gone":
            shutil.rmtree(there)
    said = host.stage({**row, "archive": None}, check=True)
    assert said["changed"]
    assert said["kernels"][0]["reason"].split()[0].strip(":") in ("altered", "unfinished", "absent", "its")
    assert host.stage(row)["changed"]
    assert content(there) == content(source)
    assert not host.stage(row)["changed"]


def test_check_mode_on_an_empty_host_says_all_and_touches_nothing(host: Host, source: Path) -> None:
    row = {**host.row(source), "archive": None}
    result = host.stage(row, check=True)
    assert result["changed"]
    assert result["diff"][0]["before"] == "absent\n"
    assert row["sha256"] in result["diff"][0]["after"]
    assert not host.root.exists()


def test_a_new_content_is_a_new_directory_and_the_live_one_stays(host: Host, source: Path) -> None:
    old = host.row(source)
    host.stage(old)
    (source / "mla/__init__.py").write_text("NAME = 'two'\n")
    new = host.row(source)
    host.stage(new)
    assert (host.path(old) / "mla/__init__.py").read_text() == "NAME = 'mla'\n"
    assert (host.path(new) / "mla/__init__.py").read_text() == "NAME = 'two'\n"


def test_only_what_serves_the_kinds(host: Host, source: Path) -> None:
    rows = [host.row(source, "both"), host.row(source, "prefill", roles=["prefill"])]
    result = host.stage(*rows, kinds=["decode"])
    assert [row["name"] for row in result["kernels"]] == ["both"]


def test_an_archive_that_is_not_the_plans_is_refused(host: Host, source: Path) -> None:
    row = host.row(source)
    result = host.stage(row | {"sha256": "0" * 64})
    assert result["failed"]
    assert f"expected {'0' * 64}" in result["msg"]
    assert not host.path(row).exists()
    assert host.stage(row)["changed"]
    assert host.left() == [row["id"], f"{row['id']}.verified.json"]


@pytest.mark.parametrize("step", ["swap", "open_to_all"])
def test_an_end_at_any_step_is_made_good_by_the_next_run(
    host: Host, source: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def die(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    row = host.row(source)
    with monkeypatch.context() as patch:
        patch.setattr(uv, step, die)
        with pytest.raises(KeyboardInterrupt):
            host.stage(row)
    assert not host.path(row).exists()
    assert host.stage(row)["changed"]
    assert host.left() == [row["id"], f"{row['id']}.verified.json"]


def test_an_end_before_it_is_recorded_counts_as_unfinished(
    host: Host, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    row = host.row(source)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "write_atomically", die)
        with pytest.raises(KeyboardInterrupt):
            host.stage(row)
    result = host.stage(row)
    assert result["kernels"][0]["reason"].startswith("unfinished")
    assert not host.stage(row)["changed"]


# Wheels on a host


def test_a_wheel_is_installed_into_its_own_directory_without_dependencies(host: Host, tmp_path: Path) -> None:
    host.give_uv()
    wheel = make_wheel(tmp_path / "w", "indexer", "1.0", {"indexer.py": "X = 1\n"}, requires=["nosuchpackage"])
    row = host.row(wheel, "indexer")
    assert host.stage(row)["changed"]
    assert (host.path(row) / "indexer.py").read_text() == "X = 1\n"
    record = json.loads((host.root / "kernels" / f"{row['id']}.verified.json").read_text())
    assert record["sha256"] == sha256(wheel)
    assert not host.stage({**row, "archive": None})["changed"]

    (host.path(row) / "indexer.py").write_text("X = 2\n")
    assert host.stage(row)["changed"]
    assert (host.path(row) / "indexer.py").read_text() == "X = 1\n"


def test_a_wheel_for_another_python_is_refused_in_uvs_words(host: Host, tmp_path: Path) -> None:
    host.give_uv()
    row = host.row(make_wheel(tmp_path / "w", "indexer", "1.0", {"x.py": ""}, tag="cp36-cp36m-linux_x86_64"), "indexer")
    result = host.stage(row)
    assert result["failed"]
    assert "kernel package indexer: uv did not install" in result["msg"]
    assert "cp36" in result["msg"] or "3.6" in result["msg"]
    assert not host.path(row).exists()


def test_a_wheel_that_changed_on_the_way_is_refused(host: Host, tmp_path: Path) -> None:
    row = host.row(make_wheel(tmp_path / "w", "indexer", "1.0", {"x.py": ""}), "indexer")
    Path(row["archive"]).write_bytes(b"other")
    result = host.stage(row)
    assert result["failed"]
    assert f"expected {row['sha256']}" in result["msg"]


@pytest.mark.parametrize(
    "name", ["indexer.whl", "indexer-1.0.whl", "../indexer-1.0-py3-none-any.whl", "a b-1-p-a-p.whl"]
)
def test_a_name_that_is_no_wheels_is_refused(name: str) -> None:
    with pytest.raises(TandemError, match="no wheel's"):
        kernels.wheel_name(name)


def test_the_name_of_a_wheel_is_its_packages() -> None:
    assert kernels.wheel_name("my_indexer-1.0+cu13-2-cp311-abi3-manylinux_2_28_x86_64.whl") == "my_indexer"


# On the control node


def test_sound_packages_have_no_fault(host: Host, source: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "w", "indexer", "1.0", {"x.py": ""})
    assert action.faults(host.row(source)) == action.faults(host.row(wheel)) == []


def test_a_package_that_is_not_what_the_plan_says_is_named(host: Host, source: Path, tmp_path: Path) -> None:
    directory = host.row(source)
    wheel = host.row(make_wheel(tmp_path / "w", "indexer", "1.0", {"x.py": ""}), "indexer")
    (source / "mla/__init__.py").write_text("NAME = 'other'\n")
    Path(wheel["source"]).write_bytes(b"other")
    for row in (directory, wheel):
        (problem,) = action.faults(row)
        assert problem.where == f"tandem_kernels {row['name']}.sha256"
        assert problem.found == row["sha256"]
    (source / "mla/odd").symlink_to("/etc/passwd")
    assert "link or a special file" in action.faults(directory)[0].found
    shutil.rmtree(source)
    Path(wheel["source"]).unlink()
    assert "no directory" in action.faults(directory)[0].found
    assert "no wheel" in action.faults(wheel)[0].found
