"""The manifest of a model, and putting a revision in place: whole, verified, once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import tandem_model
from ansible.module_utils.tandem import manifest, model_store
from module_run import run_module

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "config.json": b'{"model_type": "gpt2"}',
    "model-00001-of-00002.safetensors": bytes(range(256)) * 512,
    "model-00002-of-00002.safetensors": bytes(range(255, -1, -1)) * 512,
    "inference/model.py": b"pass\n",
}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest_of(files: dict[str, bytes]) -> str:
    return "".join(f"{sha(data)}  {path}\n" for path, data in files.items())


class Host:
    """A host's source and model folders, and the module that joins them."""

    def __init__(self, root: Path) -> None:
        self.source = root / "share/checkpoint"
        self.target = root / "models/tiny/r1"
        self.record = root / "models/tiny/r1.verified.json"
        self.partial = root / "models/tiny/.r1.partial"
        self.manifest = manifest_of(FILES)
        self.write(FILES)

    def write(self, files: dict[str, bytes]) -> None:
        for path, data in files.items():
            (self.source / path).parent.mkdir(parents=True, exist_ok=True)
            (self.source / path).write_bytes(data)

    def sync(self, *, check: bool = False, **changes: Any) -> dict[str, Any]:
        params = {"path": str(self.target), "source": str(self.source), "manifest": self.manifest, "threads": 2}
        return run_module(tandem_model.main, {**params, **changes}, check=check)

    def published(self) -> dict[str, bytes]:
        return {
            path.relative_to(self.target).as_posix(): path.read_bytes()
            for path in self.target.rglob("*")
            if path.is_file()
        }

    def tree(self) -> dict[str, tuple[int, int]]:
        """Everything under models/, to see that nothing was touched."""
        models = self.target.parent.parent
        return {str(path): (path.lstat().st_ino, path.lstat().st_ctime_ns) for path in models.rglob("*")}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest's temporary folders are private and in /tmp, which the check of what units can read is right about."""
    monkeypatch.setattr(model_store, "_unreadable", lambda _: iter(()))


def flip_a_byte_and_hide_it(path: Path) -> None:
    """Changes the bytes, and puts size and modification time back."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)


# -- the manifest


def test_what_sha256sum_prints_is_read(tmp_path: Path) -> None:
    Host(tmp_path)
    source = tmp_path / "share/checkpoint"
    for arguments in (["sha256sum"], ["sha256sum", "--binary"]):
        text = subprocess.run(
            [*arguments, *sorted(FILES)], cwd=source, check=True, capture_output=True, text=True
        ).stdout
        entries, problems = manifest.read(text, "m")
        assert not problems
        assert {entry.path: entry.sha256 for entry in entries} == {path: sha(data) for path, data in FILES.items()}


def test_the_digest_is_that_of_the_bytes_not_of_the_spelling() -> None:
    text = manifest_of(FILES)
    other = "# made by find\n\n" + "".join(
        line.replace("  ", " *./").replace(line[:64], line[:64].upper()) + "\n" for line in reversed(text.splitlines())
    )
    assert manifest.manifest_digest(other) == manifest.manifest_digest(text.strip())
    assert manifest.manifest_digest(text) != manifest.manifest_digest(manifest_of({**FILES, "config.json": b"{}"}))
    with pytest.raises(ValueError, match="no entry"):
        manifest.manifest_digest("")


ODD = {
    "/etc/passwd": "absolute",
    "../other/config.json": "'..'",
    "a/../../b": "'..'",
    "a//b": "''",
    "a/": "''",
    "a/./b": "'.'",
    "with space.json": "no plain name",
    "new\tline": "no plain name",
    "-rf": "no plain name",
    "naïve.json": "no plain name",
    "back\\slash": "no plain name",
    "$(reboot)": "no plain name",
    "x" * 256: "no plain name",
}


@pytest.mark.parametrize("path", ODD)
def test_paths_that_leave_the_model_or_are_odd_are_refused(path: str) -> None:
    entries, problems = manifest.read(f"{sha(b'')}  {path}\n", "m.sha256")
    assert not entries
    assert [ODD[path] in problem.found for problem in problems] == [True]
    assert problems[0].where == "m.sha256:1"


@pytest.mark.parametrize(
    "text",
    ["", "\n# nothing\n", "abc  config.json", f"SHA256 (config.json) = {sha(b'')}", f"\\{sha(b'')}  a\\nb", "<html>"],
)
def test_what_is_no_manifest_is_refused(text: str) -> None:
    entries, problems = manifest.read(text, "m")
    assert not entries
    assert len(problems) == 1


def test_all_faults_of_a_manifest_are_named_at_once() -> None:
    line = f"{sha(b'')}  "
    _, problems = manifest.read(f"{line}a\n{line}a\n{line}b/c\n{line}b\n{line}/x\nnonsense\n", "m")
    assert [problem.where for problem in problems] == ["m:2", "m:5", "m:6", "m"]


# -- copy


def test_a_model_is_copied_verified_and_published(host: Host) -> None:
    (host.source / "README.md").write_text("not in the manifest", encoding="utf-8")
    planned = host.sync(check=True)
    assert (planned["failed"], planned["changed"]) == (False, True)
    assert not host.target.parent.exists()
    result = host.sync()
    assert (result["failed"], result["changed"], result["diff"]) == (False, True, planned["diff"])
    assert host.published() == FILES
    assert not host.partial.exists()
    assert result["manifest_digest"] == manifest.manifest_digest(host.manifest)
    assert result["files"] == len(FILES)


def test_a_second_run_reads_nothing_and_needs_no_source(host: Host) -> None:
    host.sync()
    for path in FILES:
        (host.source / path).unlink()
    before = host.tree()
    for check in (True, False):
        result = host.sync(check=check)
        assert (result["failed"], result["changed"], result["bytes_read"]) == (False, False, 0)
    assert host.tree() == before


def test_every_user_can_read_a_model_whatever_the_umask(host: Host) -> None:
    for path in FILES:
        (host.source / path).chmod(0o600)
    old = os.umask(0o077)
    try:
        host.sync()
    finally:
        os.umask(old)
    for place in [host.target.parent.parent, host.target.parent, host.target, *host.target.rglob("*")]:
        assert place.stat().st_mode & 0o777 == (0o755 if place.is_dir() else 0o644), place
    assert host.record.stat().st_mode & 0o777 == 0o644


def test_all_that_is_wrong_with_a_source_is_one_error_and_nothing_is_touched(host: Host) -> None:
    (host.source / "config.json").unlink()
    (host.source / "inference/model.py").unlink()
    (host.source / "inference/model.py").mkdir()
    (host.source / "model-00003-of-00003.safetensors").write_bytes(b"")
    for check in (True, False):
        result = host.sync(check=check)
        assert result["failed"]
        assert "(3 to mend)" in result["msg"]
        for text in (
            "config.json: found No such file",
            "model.py: found no regular file",
            "00003.safetensors: found a f",
        ):
            assert text in result["msg"]
    assert not host.target.parent.exists()


def test_no_source(host: Host) -> None:
    result = host.sync(source="/no/such/place")
    assert result["failed"]
    assert "model_sync_source: found no directory /no/such/place" in result["msg"]
    assert "an absolute path" in host.sync(source="share/checkpoint")["msg"]


def test_a_source_that_is_the_revision_itself(host: Host) -> None:
    host.sync()
    (host.target / "config.json").unlink()
    assert "the revision itself" in host.sync(source=str(host.target))["msg"]


def test_damaged_files_are_all_named_and_never_published(host: Host) -> None:
    flip_a_byte_and_hide_it(host.source / "model-00001-of-00002.safetensors")
    (host.source / "model-00002-of-00002.safetensors").write_bytes(b"short")
    result = host.sync()
    assert result["failed"]
    assert "(2 to mend)" in result["msg"]
    assert str(host.source / "model-00001-of-00002.safetensors") in result["msg"]
    assert not host.target.exists()
    assert not host.record.exists()
    staged = {path.relative_to(host.partial).as_posix() for path in host.partial.rglob("*") if path.is_file()}
    assert staged == {"config.json", "inference/model.py"}  # whole and verified: the next run keeps them
    host.write(FILES)
    assert not host.sync()["failed"]
    assert host.published() == FILES


def test_what_is_whole_in_a_broken_off_copy_is_not_copied_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.partial.mkdir(parents=True)
    (host.partial / "config.json").write_bytes(FILES["config.json"])
    (host.partial / "config.json").chmod(0o600)  # the run ended before it came to that
    (host.partial / "model-00001-of-00002.safetensors").write_bytes(FILES["model-00001-of-00002.safetensors"][:1000])
    (host.partial / "old/deep").mkdir(parents=True)
    (host.partial / "old/deep/of-another-manifest").write_bytes(b"x")
    copied = []
    real = model_store._copy_file

    def copy(source: Path, target: Path) -> model_store.Stamp:
        copied.append(source.name)
        return real(source, target)

    monkeypatch.setattr(model_store, "_copy_file", copy)
    assert not host.sync()["failed"]
    assert sorted(copied) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.py"]
    assert host.published() == FILES
    assert not (host.target / "old").exists()
    assert (host.target / "config.json").stat().st_mode & 0o777 == 0o644


def test_not_enough_space_is_found_before_the_first_byte(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = sum(map(len, FILES.values()))
    usage = [needed + model_store.RESERVE - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Free(usage[0]))
    for check in (True, False):
        result = host.sync(check=check)
        assert result["failed"]
        assert "free where" in result["msg"]
    assert not host.target.parent.exists()
    usage[0] += 1
    assert not host.sync()["failed"]


class Free:
    def __init__(self, free: int) -> None:
        self.free = free


def test_a_disk_that_fills_up_publishes_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> model_store.Stamp:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_store, "_copy_file", full)
    result = host.sync()
    assert result["failed"]
    assert "No space left on device" in result["msg"]
    assert f"({len(FILES)} to mend)" in result["msg"]
    assert not host.target.exists()


def test_another_manifest_for_a_published_revision_is_refused(host: Host) -> None:
    host.sync()
    before = host.tree()
    host.write({"config.json": b"{}"})
    for check in (True, False):
        result = host.sync(manifest=manifest_of({**FILES, "config.json": b"{}"}), check=check)
        assert result["failed"]
        assert "set another tandem_model_revision" in result["msg"]
    assert host.tree() == before


# -- what happens to a published revision


@pytest.mark.parametrize("mode", ["copy", "in_place"])
@pytest.mark.usefixtures("in_place")
def test_a_changed_byte_is_found_though_size_and_time_were_put_back(host: Host, mode: str) -> None:
    assert not host.sync(mode=mode)["failed"]
    flip_a_byte_and_hide_it(host.target / "model-00001-of-00002.safetensors")
    planned = host.sync(mode=mode, check=True)
    result = host.sync(mode=mode)
    if mode == "copy":
        assert (planned["failed"], planned["changed"]) == (result["failed"], result["changed"]) == (False, True)
        assert result["msg"].startswith("copied 1 of 4 files")
        assert host.published() == FILES
        assert not host.partial.exists()
        assert not host.sync()["changed"]
    else:
        assert planned["failed"]
        assert result["failed"]
        assert "model-00001-of-00002.safetensors: found SHA-256" in result["msg"]


def test_a_lost_file_alone_is_fetched_again(host: Host) -> None:
    host.sync()
    kept = (host.target / "config.json").stat().st_ino
    (host.target / "inference/model.py").unlink()
    (host.target / "inference").rmdir()
    result = host.sync()
    assert result["msg"].startswith("copied 1 of 4 files")
    assert host.published() == FILES
    assert (host.target / "config.json").stat().st_ino == kept


def test_a_lost_file_without_its_source_is_an_error(host: Host) -> None:
    host.sync()
    (host.target / "config.json").unlink()
    (host.source / "config.json").unlink()
    result = host.sync()
    assert result["failed"]
    assert str(host.source / "config.json") in result["msg"]


def test_an_extra_shard_in_a_published_revision_is_an_error(host: Host) -> None:
    host.sync()
    (host.target / "model-00003-of-00003.safetensors").write_bytes(b"x")
    result = host.sync()
    assert result["failed"]
    assert "a file that the manifest does not name" in result["msg"]


def test_a_touched_file_is_hashed_again_and_remembered(host: Host) -> None:
    host.sync()
    os.utime(host.target / "config.json")
    planned = host.sync(check=True)
    result = host.sync()
    assert (planned["changed"], result["changed"]) == (True, True)
    assert result["bytes_read"] == planned["bytes_read"] == len(FILES["config.json"])
    assert not host.sync()["changed"]


@pytest.mark.parametrize(
    "text", [None, "", "{}", '{"manifest_digest": 1, "files": {"config.json": {"size": 1}}}', "[]"]
)
def test_a_lost_or_broken_record_costs_a_hash_and_no_copy(host: Host, text: str | None) -> None:
    host.sync()
    host.record.unlink()
    for path in FILES:
        (host.source / path).unlink()
    if text is not None:
        host.record.write_text(text, encoding="utf-8")
    result = host.sync()
    assert (result["failed"], result["changed"]) == (False, True)
    assert result["bytes_read"] == sum(map(len, FILES.values()))
    assert host.sync()["bytes_read"] == 0


def test_the_quick_check_of_35_shards_takes_well_under_a_second(host: Host) -> None:
    files = {f"model-{number:05}-of-00035.safetensors": bytes([number]) * 1000 for number in range(35)}
    host.write(files)
    for path in FILES:
        (host.source / path).unlink()
    host.sync(manifest=manifest_of(files))
    begin = time.monotonic()
    assert host.sync(manifest=manifest_of(files))["bytes_read"] == 0
    assert time.monotonic() - begin < 0.5


# -- in place


@pytest.mark.usefixtures("in_place")
def test_a_source_used_in_place_is_verified_and_linked(host: Host) -> None:
    planned = host.sync(mode="in_place", check=True)
    assert (planned["changed"], host.target.parent.exists()) == (True, False)
    result = host.sync(mode="in_place")
    assert (result["failed"], result["changed"], result["diff"]) == (False, True, planned["diff"])
    assert host.target.readlink() == host.source
    assert host.published() == FILES
    again = host.sync(mode="in_place")
    assert (again["changed"], again["bytes_read"]) == (False, 0)


@pytest.mark.usefixtures("in_place")
def test_nothing_is_linked_unless_all_is_right(host: Host) -> None:
    flip_a_byte_and_hide_it(host.source / "config.json")
    (host.source / "chat_template.jinja").write_text("not in the manifest", encoding="utf-8")
    result = host.sync(mode="in_place")
    assert result["failed"]
    assert "chat_template.jinja: found a file that the manifest does not name" in result["msg"]
    (host.source / "chat_template.jinja").unlink()
    assert "config.json: found SHA-256" in host.sync(mode="in_place")["msg"]
    assert not host.target.is_symlink()


@pytest.mark.usefixtures("in_place")
def test_files_that_are_links_are_followed_as_a_hub_cache_has_them(host: Host, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    (host.source / "config.json").rename(blob)
    (host.source / "config.json").symlink_to("../../blob")
    assert not host.sync(mode="in_place")["failed"]
    flip_a_byte_and_hide_it(blob)
    assert host.sync(mode="in_place")["failed"]


@pytest.mark.usefixtures("in_place")
def test_a_source_that_moved_is_verified_and_linked_anew(host: Host, tmp_path: Path) -> None:
    host.sync(mode="in_place")
    shutil.copytree(host.source, tmp_path / "elsewhere")
    host.source = tmp_path / "elsewhere"
    result = host.sync(mode="in_place")
    assert (result["failed"], result["changed"]) == (False, True)
    assert host.target.readlink() == tmp_path / "elsewhere"


@pytest.mark.usefixtures("in_place")
def test_a_link_becomes_a_copy_and_a_copy_is_left_alone(host: Host) -> None:
    host.sync(mode="in_place")
    result = host.sync(mode="copy")
    assert (result["failed"], result["changed"], host.target.is_symlink()) == (False, True, False)
    assert host.published() == FILES
    assert not host.sync(mode="in_place", source="/gone")["changed"]


def test_a_source_that_the_units_cannot_read_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    result = host.sync(mode="in_place")
    assert "under /tmp" in result["msg"]
    monkeypatch.setattr(model_store, "HIDDEN_FROM_UNITS", ())
    host.source.parent.chmod(0o750)
    (host.source / "config.json").chmod(0o640)
    result = host.sync(mode="in_place")
    assert f"{host.source.parent}: found mode 0750" in result["msg"]
    assert f"{host.source / 'config.json'}: found mode 0640" in result["msg"]
    assert f"{host.source}: found" not in result["msg"]
    assert not host.target.is_symlink()


# -- other runs


def test_two_runs_at_once_do_not_meet(host: Host) -> None:
    host.target.parent.mkdir(parents=True)
    lock = os.open(host.target.parent, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        result = host.sync()
    finally:
        os.close(lock)
    assert result["failed"]
    assert "another run" in result["msg"]
    assert not host.sync()["failed"]


def test_a_run_that_is_killed_at_any_moment_publishes_nothing_bad_and_the_next_converges(host: Host) -> None:
    """A few kills; the long series is a drill."""
    files = {f"model-{number}.safetensors": bytes([number]) * (4 << 20) for number in range(6)}
    host.write(files)
    for path in FILES:
        (host.source / path).unlink()
    params = {"path": str(host.target), "source": str(host.source), "manifest": manifest_of(files), "threads": 2}
    script = textwrap.dedent(f"""
        import sys
        sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT / "tests/unit")!r}]
        import conftest, tandem_model
        from module_run import run_module
        print("begin", flush=True)
        print(run_module(tandem_model.main, {params!r}))
    """)
    for moment in (0.0, 0.02, 0.05, 0.1, 0.2):
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                process.wait(moment)
            except subprocess.TimeoutExpired:
                process.kill()
        assert host.published() == (files if host.target.exists() else {})
    assert not host.sync(manifest=manifest_of(files))["failed"]
    assert host.published() == files
    assert sorted(path.name for path in host.target.parent.iterdir()) == ["r1", "r1.verified.json"]


def test_the_record_says_what_was_verified(host: Host) -> None:
    host.sync()
    kept = json.loads(host.record.read_text(encoding="utf-8"))
    status = (host.target / "config.json").stat()
    assert kept["manifest_digest"] == manifest.manifest_digest(host.manifest)
    assert kept["files"]["config.json"] == {
        "sha256": sha(FILES["config.json"]),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }
