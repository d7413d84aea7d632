"""Runtimes by a real uv from an index on disk: whole or absent, whatever dies on the way."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from ansible.module_utils.tandem import carry, uv
from ansible.module_utils.tandem.problems import TandemError
from by_path import load
from module_run import run_module
from wheels import Index, make_wheel, sha256

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "/usr/bin/python3"
tandem_runtime = load("plugins/modules", "tandem_runtime")


def real_uv() -> Path:
    """The control node's own uv, of the version that hosts get."""
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found, "no uv beside the tests' Python; `make setup` installs it"
    return Path(found)


class Host:
    """A host's /opt/tandem with uv in place, an index, and the module."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "opt"
        self.index = Index(folder / "index")
        self.wheels = folder / "wheels"
        self.locks = folder / "locks"
        self.locks.mkdir()
        program = self.root / "tools" / f"uv-{uv.UV_VERSION}" / "bin" / "uv"
        program.parent.mkdir(parents=True)
        program.symlink_to(real_uv())

    def package(self, name: str = "engine", version: str = "1.0", files: dict[str, str] | None = None) -> str:
        """Adds a package to the index; returns its line of a lock."""
        content = files or {
            f"{name}/__init__.py": f"VERSION = {version!r}\n",
            f"{name}/cli.py": "def main(): print('hi')\n",
        }
        return self.index.add(make_wheel(self.wheels, name, version, content, scripts={name: f"{name}.cli:main"}))

    def row(self, *lines: str, name: str = "engine-1.0", **changes: Any) -> dict[str, Any]:
        """A row of the plan for a lock of these lines."""
        lock = self.locks / f"{name}.lock"
        lock.write_text("".join(lines), encoding="utf-8")
        return {
            "id": name,
            "engine": "engine-1.0",
            "path": str(self.root / "runtimes" / name),
            "lock": str(lock),
            "kinds": ["prefill", "decode"],
            "import_check": "engine",
            **changes,
        }

    def params(self, *rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
        return {"runtimes": rows, "index_url": self.index.url, "root": str(self.root), "python": PYTHON, **changes}

    def make(self, *rows: dict[str, Any], check: bool = False, **changes: Any) -> dict[str, Any]:
        return run_module(tandem_runtime.main, self.params(*rows, **changes), check=check)

    def command(self, *rows: dict[str, Any]) -> list[str]:
        """The same as a command."""
        program = textwrap.dedent(f"""
            import json, sys
            sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT / "tests/unit")!r}]
            import conftest
            from by_path import load
            from module_run import run_module
            print(json.dumps(run_module(load('plugins/modules', 'tandem_runtime').main, json.loads(sys.argv[1]))))
        """)
        return [sys.executable, "-c", program, json.dumps(self.params(*rows))]

    def start(self, *rows: dict[str, Any]) -> subprocess.Popen[str]:
        """The same in a process of its own, which a test may kill."""
        return subprocess.Popen(self.command(*rows), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def path(self, name: str = "engine-1.0") -> Path:
        return self.root / "runtimes" / name

    def marker(self, name: str = "engine-1.0") -> dict[str, Any]:
        text = (self.path(name) / "runtime.json").read_text(encoding="utf-8")
        return dict(json.loads(text))

    def left(self) -> list[str]:
        """Names under runtimes/."""
        folder = self.root / "runtimes"
        return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def tree(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Awaits a condition, and fails the test if it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.02)


# What it makes


def test_a_runtime_is_what_its_lock_says(host: Host) -> None:
    row = host.row(host.package())
    result = host.make(row)

    assert result["changed"], result
    assert result["runtimes"][0] | {"seconds": 0} == {
        "id": "engine-1.0",
        "path": str(host.path()),
        "action": "install",
        "reason": "absent",
        "after": result["runtimes"][0]["after"],
        "seconds": 0,
    }
    assert host.marker()["packages"] == {"engine": "1.0"}
    assert host.marker()["lock_sha256"] == sha256(Path(row["lock"]))
    assert host.left() == ["engine-1.0"]


def test_its_python_and_scripts_run_from_where_it_was_renamed_to(host: Host) -> None:
    host.make(host.row(host.package()))
    said = subprocess.run([host.path() / "bin/engine"], capture_output=True, text=True, check=True)
    assert said.stdout == "hi\n"
    origin = [str(host.path() / "bin/python"), "-c", "import engine; print(engine.__file__)"]
    assert subprocess.run(origin, capture_output=True, text=True, check=True).stdout.startswith(str(host.path()))


def test_a_second_run_changes_nothing_and_imports_nothing(host: Host) -> None:
    row = host.row(host.package())
    host.make(row)
    before = host.marker()
    (host.path() / "lib").rename(host.path() / "lib-away")
    started = time.monotonic()

    result = host.make(row)

    assert not result["changed"]
    assert not result["failed"], result
    assert result["runtimes"][0]["action"] == "none"
    assert host.marker() == before
    assert time.monotonic() - started < 5.0


@pytest.mark.usefixtures("strict_umask")
def test_every_user_can_read_it_whatever_the_umask(host: Host) -> None:
    host.make(host.row(host.package()))
    there = [host.root / "runtimes", host.path(), *(path for path in host.path().rglob("*") if not path.is_symlink())]
    wanted = {path: 0o5 if path.is_dir() else 0o4 for path in there}
    unreadable = [path for path, mode in wanted.items() if path.stat().st_mode & mode != mode]
    assert unreadable == []
    assert (host.path() / "bin/engine").stat().st_mode & 0o111 == 0o111


def test_a_cache_that_met_a_strict_umask_is_opened_too(host: Host) -> None:
    row = host.row(host.package())
    host.make(row)
    shutil.rmtree(host.path())
    for file in (host.root / "cache").rglob("*.py"):
        file.chmod(0o600)

    host.make(row)
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in host.path().rglob("engine/*.py"))


def test_the_import_check_leaves_the_bytecode(host: Host) -> None:
    host.make(host.row(host.package()))
    assert len(list(host.path().rglob("engine/__pycache__/__init__.*.pyc"))) == 1


def test_gpus_are_hidden_from_the_import_check(host: Host) -> None:
    code = "import os\nassert os.environ['CUDA_VISIBLE_DEVICES'] == ''\nassert os.environ['HOME'] != '/root'\n"
    result = host.make(host.row(host.package(files={"engine/__init__.py": code})))
    assert not result["failed"], result


def test_a_release_shares_files_with_the_one_before(host: Host) -> None:
    shared = host.package("shared")
    host.make(host.row(shared, host.package(version="1.0")))
    host.make(host.row(shared, host.package(version="2.0"), name="engine-2.0"))

    one, two = (next(host.path(name).rglob("shared/cli.py")) for name in ("engine-1.0", "engine-2.0"))
    assert one.stat().st_ino == two.stat().st_ino
    assert host.marker("engine-2.0")["packages"] == {"engine": "2.0", "shared": "1.0"}


def test_several_runtimes_in_one_task_and_only_those_of_the_kinds(host: Host) -> None:
    line = host.package()
    rows = [host.row(line), host.row(line, name="second"), host.row(line, name="router", kinds=["router"])]
    result = host.make(*rows, kinds=["decode"])
    assert [row["id"] for row in result["runtimes"]] == ["engine-1.0", "second"]
    assert host.left() == ["engine-1.0", "second"]


def test_an_empty_lock_makes_a_bare_python(host: Host) -> None:
    result = host.make(host.row("# nothing\n", import_check=""))
    assert result["changed"], result
    assert host.marker()["packages"] == {}


# Check mode


def test_check_mode_on_an_empty_host_says_all_and_touches_nothing(host: Host) -> None:
    row = host.row(host.package())
    shutil.rmtree(host.root)
    del row["lock"]
    result = host.make({**row, "lock_sha256": "0" * 64}, check=True)

    assert result["changed"], result
    assert result["diff"][0]["before"] == "absent\n"
    assert "0" * 64 in result["diff"][0]["after"]
    assert not host.root.exists()


def test_check_mode_on_a_complete_host_reports_nothing(host: Host) -> None:
    row = host.row(host.package())
    host.make(row)
    before = tree(host.root)
    result = host.make(row, check=True)
    assert not result["changed"]
    assert "diff" not in result
    assert tree(host.root) == before


# What goes wrong


def test_a_file_that_is_not_the_locks_is_refused_and_what_was_there_stays(host: Host) -> None:
    good = host.row(host.package())
    host.make(good)
    line = host.package(version="2.0")
    bad = host.row(line.replace(sha256(host.wheels / "engine-2.0-py3-none-any.whl"), "f" * 64), name="engine-2.0")

    result = host.make(good, bad)

    assert result["failed"]
    assert "did not install engine-1.0's lock" in result["msg"]
    assert "hash mismatch" in result["msg"].lower()
    assert "f" * 64 in result["msg"]
    assert not host.path("engine-2.0").exists()
    assert not host.make(good)["changed"]


def test_a_lock_without_hashes_is_refused(host: Host) -> None:
    host.package()
    result = host.make(host.row("engine==1.0\n"))
    assert result["failed"]
    assert "--require-hashes" in result["msg"]
    assert not host.path().exists()


def test_a_package_that_the_index_has_not_is_named(host: Host) -> None:
    host.package()
    result = host.make(host.row(f"nosuch==9.9 --hash=sha256:{'a' * 64}\n"))
    assert result["failed"]
    assert "nosuch" in result["msg"]
    assert not host.path().exists()


def test_nothing_is_built_from_source(host: Host) -> None:
    sdist = host.wheels / "engine-1.0.tar.gz"
    host.wheels.mkdir()
    folder = host.locks / "engine-1.0"
    folder.mkdir()
    (folder / "setup.py").write_text(f"open({str(host.locks / 'ran')!r}, 'w')\n")
    shutil.make_archive(str(sdist).removesuffix(".tar.gz"), "gztar", host.locks, "engine-1.0")
    result = host.make(host.row(host.index.add(sdist).replace("1.0.tar.gz", "1.0")))
    assert result["failed"]
    assert "building from source is disabled" in result["msg"]
    assert not (host.locks / "ran").exists()


def test_an_engine_that_cannot_be_imported_is_no_runtime(host: Host) -> None:
    result = host.make(host.row(host.package(files={"engine/__init__.py": "import nosuchlibrary\n"})))
    assert result["failed"]
    assert "installed, but engine cannot be imported" in result["msg"]
    assert "No module named 'nosuchlibrary'" in result["msg"]
    assert not host.path().exists()


def test_another_python_than_the_engine_wants_is_said_first(host: Host) -> None:
    row = host.row(host.package(), requires_python=">=3.99")
    before = tree(host.root)
    for check in (True, False):
        result = host.make(row, check=check)
        assert result["failed"]
        assert "expects >=3.99" in result["msg"]
        assert "tandem_engine" in result["msg"]
    assert tree(host.root) == before


def test_a_python_that_is_not_there_is_said(host: Host) -> None:
    result = host.make(host.row(host.package()), python="/usr/bin/nosuchpython")
    assert result["failed"]
    assert "/usr/bin/nosuchpython" in result["msg"]


def test_a_runtime_of_another_python_is_made_anew(host: Host) -> None:
    row = host.row(host.package())
    host.make(row)
    marker = host.marker()
    marker["python"] |= {"version": "3.9.2", "tag": "cpython-39"}
    (host.path() / "runtime.json").write_text(json.dumps(marker), encoding="utf-8")
    (host.path() / "of-old").touch()

    said = host.make(row, check=True)
    assert said["changed"]
    assert "made for Python 3.9.2, the host has 3." in said["diff"][0]["before"]

    assert host.make(row)["changed"]
    assert host.marker()["python"]["tag"] == uv.interpreter(PYTHON).tag
    assert not (host.path() / "of-old").exists()
    assert host.left() == ["engine-1.0"]


def test_a_lock_that_changed_on_the_way_is_refused(host: Host) -> None:
    result = host.make(host.row(host.package(), lock_sha256="1" * 64))
    assert result["failed"]
    assert "expected 1111" in result["msg"]
    assert host.left() == []


@pytest.mark.parametrize("spoil", ["gone", "garbage", "another lock", "no program"])
def test_what_is_not_complete_is_made_anew(host: Host, spoil: str) -> None:
    row = host.row(host.package())
    host.make(row)
    marker = host.path() / "runtime.json"
    match spoil:
        case "gone":
            marker.unlink()
        case "garbage":
            marker.write_text("{")
        case "another lock":
            marker.write_text(marker.read_text().replace(sha256(Path(row["lock"])), "2" * 64))
        case "no program":
            (host.path() / "bin/python").unlink()
    assert host.make(row)["changed"]
    assert not host.make(row)["changed"]
    assert host.left() == ["engine-1.0"]


def test_leftovers_of_runs_that_died_are_removed(host: Host) -> None:
    for name in ("engine-1.0.partial", "engine-1.0.old"):
        (host.root / "runtimes" / name / "lib").mkdir(parents=True)
        (host.root / "runtimes" / name / "runtime.json").write_text("{}")
    host.make(host.row(host.package()))
    assert host.left() == ["engine-1.0"]


# Killed


def gate(host: Host) -> tuple[str, Path, Path]:
    """A package whose import says that it began, then waits until a file is there."""
    began, go = host.locks / "began", host.locks / "go"
    code = f"""
        import os, pathlib, time
        pathlib.Path({str(began)!r}).write_text(str(os.getpid()))
        end = time.monotonic() + 60
        while not pathlib.Path({str(go)!r}).exists() and time.monotonic() < end:
            time.sleep(0.02)
    """
    return host.package(files={"engine/__init__.py": textwrap.dedent(code)}), began, go


def holds_open(pid: int, file: Path) -> bool:
    """Whether a process has a file open."""
    try:
        return any(link.readlink() == file for link in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return False


def test_killed_in_the_middle_it_leaves_nothing_that_looks_finished(host: Host) -> None:
    line, began, go = gate(host)
    row = host.row(line)
    first = host.start(row)
    wait_for(began.exists, "the import check")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert host.left() == ["engine-1.0.partial"]
    assert not (host.root / "runtimes/engine-1.0.partial/runtime.json").exists()
    assert host.make(row, check=True)["changed"]

    # What the killed run had started still writes to the partial directory, so the next run waits for it.
    began.unlink()
    second = host.start(row)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(2)
    assert not began.exists()
    go.touch()
    out, err = second.communicate(timeout=60)
    assert json.loads(out)["changed"], err
    assert host.left() == ["engine-1.0"]
    assert not host.make(row)["changed"]


def test_two_runs_at_once_make_it_once(host: Host) -> None:
    line, began, go = gate(host)
    row = host.row(line)
    first = host.start(row)
    wait_for(began.exists, "the import check")
    second = host.start(row)
    wait_for(lambda: holds_open(second.pid, host.root / ".lock"), "the second run at the lock")
    go.touch()
    results = [json.loads(process.communicate(timeout=60)[0]) for process in (first, second)]
    assert [result["failed"] for result in results] == [False, False], results
    assert [result["changed"] for result in results] == [True, False]


@pytest.mark.parametrize("step", ["swap", "write_atomically", "open_to_all"])
def test_an_end_at_any_step_is_made_good_by_the_next_run(
    host: Host, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def die(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    row = host.row(host.package())
    with monkeypatch.context() as patch:
        patch.setattr(uv, step, die)
        with pytest.raises(KeyboardInterrupt):
            host.make(row)
    assert not host.path().exists()
    assert host.make(row)["changed"]
    assert host.left() == ["engine-1.0"]


def test_an_end_between_the_two_renames_is_made_good(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    row = host.row(host.package())
    host.make(row)
    (host.path() / "runtime.json").unlink()
    rename = Path.rename

    def die(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            host.make(row)
    assert host.left() == ["engine-1.0.old", "engine-1.0.partial"]
    assert host.make(row)["changed"]
    assert host.left() == ["engine-1.0"]


def test_a_lock_that_is_never_released_is_reported(host: Host) -> None:
    with (
        uv.exclusive(host.root),
        pytest.raises(TandemError, match="another run has been installing"),
        uv.exclusive(host.root, timeout=1),
    ):
        pytest.fail("two at once")


# Places that cannot be written


def read_only(host: Host, row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the module says in a mount namespace where a folder is read-only."""
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    done = subprocess.run(
        [*unshare, "sh", "-c", script, str(folder), *host.command(row)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return dict(json.loads(done.stdout))


def test_a_complete_runtime_that_is_read_only_is_unchanged(host: Host) -> None:
    row = host.row(host.package())
    host.make(row)
    result = read_only(host, row, host.root)
    assert not result["failed"], result
    assert not result["changed"]


def test_a_read_only_place_is_named(host: Host) -> None:
    row = host.row(host.package())
    result = read_only(host, row, host.root)
    assert result["failed"]
    assert f"{host.root}: cannot be written: Read-only file system" in result["msg"]


def test_a_mount_that_is_not_complete_is_named_before_anything_is_made(host: Host) -> None:
    row = host.row(host.package())
    host.path().mkdir(parents=True)
    result = read_only(host, row, host.path())
    assert result["failed"]
    assert "found a mount at" in result["msg"]
    assert "no runtime.json" in result["msg"]
    assert host.left() == ["engine-1.0"]


def full(_: object) -> Any:
    return shutil._ntuple_diskusage(10 * uv.GIB, 9 * uv.GIB, 1 * uv.GIB)


def test_too_little_space_is_said_before_anything_is_touched(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    row = host.row(host.package(), disk_gib=11.0)
    before = tree(host.root)
    monkeypatch.setattr(shutil, "disk_usage", full)
    for check in (True, False):
        result = host.make(row, check=check)
        assert result["failed"]
        assert "found 1.0 GiB free" in result["msg"]
        assert "expected 11.0 GiB" in result["msg"]
    assert tree(host.root) == before


def test_what_a_release_shares_counts_as_there(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    big = host.package("big", files={"big/data.txt": "x" * 4_000_000})
    host.make(host.row(big, host.package()))
    row = host.row(big, host.package(version="2.0"), name="engine-2.0", disk_gib=1.0)
    monkeypatch.setattr(uv, "GIB", 4_000_000)
    monkeypatch.setattr(uv, "LEAST_GIB", 0.01)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 0, 400_000))
    assert host.make(row)["changed"]

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 0, 4_000))
    result = host.make(host.row(big, host.package(version="3.0"), name="engine-3.0", disk_gib=1.0))
    assert "are shared with runtimes that are there" in result["msg"]


# uv itself


def test_a_uv_that_is_not_the_pinned_one_is_refused(host: Host) -> None:
    shutil.rmtree(host.root / "tools")
    tag = "py3-none-any"
    host.index.add(make_wheel(host.wheels, "uv", uv.UV_VERSION, {"uv/__init__.py": ""}, tag=tag))
    result = host.make(host.row(host.package()))
    assert result["failed"]
    assert f"pip did not install uv {uv.UV_VERSION}" in result["msg"]
    assert "DO NOT MATCH THE HASHES" in result["msg"]
    assert not list((host.root / "tools").iterdir())


def test_hosts_get_the_uv_that_the_control_node_has() -> None:
    lock = (ROOT / "requirements/control.txt").read_text(encoding="utf-8")
    _, _, block = lock.partition(f"\nuv=={uv.UV_VERSION} ")
    assert block, f"control.txt pins another uv than {uv.UV_VERSION}: change UV_VERSION and UV_HASHES with it"
    hashes = block.partition("# via")[0]
    assert all(digest in hashes for digest in uv.UV_HASHES)


# Secrets and certificates


def test_a_password_of_the_index_is_in_no_command_line_and_in_no_message(host: Host) -> None:
    arguments: dict[str, Any] = {"index_url": "https://me:s3cret@index.example/simple"}
    carry.hide_auth(arguments)
    assert arguments == {"index_url": "https://index.example/simple", "index_auth": "me:s3cret"}
    settings = uv.Settings(host.root, arguments["index_url"], arguments["index_auth"])
    assert uv.uv_environment(settings)["UV_DEFAULT_INDEX"] == "https://me:s3cret@index.example/simple"
    with pytest.raises(TandemError) as caught:
        uv.run(["sh", "-c", "echo $UV_DEFAULT_INDEX; exit 3"], uv.uv_environment(settings), 10, "no", settings)
    assert "s3cret" not in str(caught.value)
    assert "exit status 3" in str(caught.value)


def test_an_index_without_a_password_stays_as_it_is() -> None:
    assert carry.split_auth("https://pypi.org/simple") == ("https://pypi.org/simple", "")


def test_the_operators_ca_counts_beside_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, own = tmp_path / "system.pem", tmp_path / "own.pem"
    system.write_text("SYSTEM\n")
    own.write_text("OWN\n")
    monkeypatch.setattr(uv, "SYSTEM_CAS", system)
    bundle = uv.ca_bundle(str(own), tmp_path)
    assert bundle is not None
    assert bundle.read_text().split() == ["SYSTEM", "OWN"]
    system.unlink()
    assert Path(str(uv.ca_bundle(str(own), tmp_path))).read_text().split() == ["OWN"]
    assert uv.ca_bundle("", tmp_path) is None
    with pytest.raises(TandemError, match="tandem_package_ca_file"):
        uv.ca_bundle(str(tmp_path / "nosuch.pem"), tmp_path)


def test_settings_of_the_callers_uv_and_pip_do_not_reach_ours(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_INDEX_URL", "https://elsewhere.example")
    monkeypatch.setenv("PIP_FIND_LINKS", "/elsewhere")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    settings = uv.Settings(host.root, host.index.url)
    for environment in (uv.uv_environment(settings), uv.pip_environment(settings, host.root)):
        assert "elsewhere" not in json.dumps(environment)
        assert environment["https_proxy"] == "http://proxy.example:3128"


def test_the_lock_of_a_hash_is_the_files(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("a==1\n")
    row = {"id": "x", "path": "/x", "engine": "e", "lock": str(lock), "lock_sha256": None}
    rest = {"import_check": "", "requires_python": "", "disk_gib": 0.0}
    assert tandem_runtime.wanted(row | rest).lock_sha256 == hashlib.sha256(b"a==1\n").hexdigest()
