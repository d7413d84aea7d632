"""Python environments of a host, made by uv from locks: whole or absent, never edited, readable by every user.

A runtime is built beside its place, as `<id>.partial`, and renamed there when it is complete; `runtime.json` inside
says of what it was made. Whatever dies on the way leaves a `.partial`, which the next run removes. Wheels stay unpacked
in uv's cache on the same file system, so that releases that share a package share its files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from .files import make_folders, sync_folder, write_atomically
from .preflight import satisfies
from .problems import TandemError

UV_VERSION: Final = "0.13.9"
# SHA-256 of its Linux wheels on PyPI, x86_64 and aarch64. A test holds them against requirements/control.txt.
UV_HASHES: Final = (
    "d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19",
    "ecb6028d79dc96fbeafffe5c8af62a7099487ebc05a701e76714eebcffd06375",
)
MARKER: Final = "runtime.json"
PARTIAL: Final = ".partial"
OLD: Final = ".old"

# Seconds. A first installation fetched 4 GB in half a minute here; the limit is for a line of 10 Mbit/s.
SYNC_TIMEOUT: Final = 3600.0
BOOTSTRAP_TIMEOUT: Final = 300.0
# The first import also writes the bytecode of some 8000 modules: 50 s of one CPU when it is free (measured).
IMPORT_TIMEOUT: Final = 900.0
# How long to wait for another run that installs on the same host.
LOCK_TIMEOUT: Final = 3600
# Lines of a failed program's own words that a message carries.
LAST_LINES: Final = 12
# Space, in GiB, that even a release of nothing but shared packages takes for its links and its bytecode.
LEAST_GIB: Final = 0.5
GIB: Final = 1024**3

SYSTEM_CAS: Final = Path("/etc/ssl/certs/ca-certificates.crt")
# What of the caller's environment reaches uv and pip. Their own settings do not: the inventory has them.
PASSED_ON: Final = (
    *("http_proxy", "https_proxy", "no_proxy", "all_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
)


@dataclass(frozen=True)
class Runtime:
    """One environment to have. `lock` is None while the host has no copy of it, `lock_sha256` is known always."""

    id: str
    path: Path
    engine: str
    lock_sha256: str
    lock: Path | None = None
    import_check: str = ""
    """Modules that have to import, separated by commas."""
    requires_python: str = ""
    disk_gib: float = 0.0
    """Space that it takes where nothing of it is there yet."""


@dataclass(frozen=True)
class Interpreter:
    """The host's Python that runtimes link to. `tag` (cpython-311) changes when a runtime made for it stops working."""

    path: str
    version: str
    tag: str


@dataclass(frozen=True)
class Settings:
    """Where packages come from and where they go.

    `index_auth` is user:password or empty, `ca_file` a bundle that counts instead of the system's.
    """

    root: Path
    index_url: str
    index_auth: str = ""
    ca_file: Path | None = None

    @property
    def uv(self) -> Path:
        return self.root / "tools" / f"uv-{UV_VERSION}" / "bin" / "uv"

    @property
    def cache(self) -> Path:
        return self.root / "cache" / "uv"

    def index(self) -> str:
        scheme, separator, rest = self.index_url.partition("://")
        return f"{scheme}{separator}{self.index_auth}@{rest}" if self.index_auth else self.index_url


def interpreter(python: str) -> Interpreter:
    """Asks a Python for its version. Raises TandemError if it cannot be run."""
    ask = "import sys; print(sys.version.split()[0], sys.implementation.cache_tag)"
    try:
        done = subprocess.run([python, "-ISc", ask], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise TandemError(f"found no working Python at {python} ({error}); expected the system's, python3") from error
    version, tag = done.stdout.split()
    return Interpreter(python, version, tag)


def missing(runtime: Runtime, python: Interpreter) -> str:
    """Why a runtime has to be made; empty if it is complete. Reads one small file and imports nothing."""
    if not runtime.path.is_dir():
        return "absent"
    try:
        made = json.loads((runtime.path / MARKER).read_text(encoding="utf-8"))
        lock, tag, version = made["lock_sha256"], made["python"]["tag"], made["python"]["version"]
    except FileNotFoundError:
        return f"unfinished: it has no {MARKER}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MARKER} cannot be read ({error})"
    if lock != runtime.lock_sha256:
        return f"made from another lock, sha256 {lock[:12]}…"
    if tag != python.tag:
        return f"made for Python {version}, the host has {python.version} now"
    if not os.access(runtime.path / "bin" / "python", os.X_OK):
        return f"its bin/python does not lead to a program ({python.path} expected)"
    return ""


def check(runtime: Runtime, python: Interpreter) -> None:
    """What can be known to fail before anything is touched. Raises TandemError."""
    if runtime.requires_python and not satisfies(python.version, runtime.requires_python):
        raise TandemError(
            f"runtime {runtime.id}: found Python {python.version} at {python.path}; {runtime.engine} expects"
            f" {runtime.requires_python}. Set tandem_engine to a release that supports it, or name another Python"
            " in runtime_python"
        )
    if is_mount(runtime.path):
        raise TandemError(
            f"runtime {runtime.id}: found a mount at {runtime.path} that is not complete"
            f" ({missing(runtime, python)}); expected a complete runtime there, or no mount"
        )


def is_mount(path: Path) -> bool:
    """Whether something is mounted at a path, a directory of the same file system (a bind mount) included."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    return any(line.split()[4] == str(path) for line in mounts.splitlines())


def check_space(runtime: Runtime, settings: Settings) -> None:
    """Raises TandemError if the file system has not the room, counting what the runtime shares with those there.

    Without the lock nothing is known of what it shares, and where there is a cache nothing is said.
    """
    if runtime.lock is None and settings.cache.is_dir():
        return
    there = next(folder for folder in (settings.root, *settings.root.parents) if folder.exists())
    free = shutil.disk_usage(there).free / GIB
    shared = shared_bytes(runtime, settings) / GIB
    needed = max(runtime.disk_gib - shared, LEAST_GIB if runtime.disk_gib > LEAST_GIB else runtime.disk_gib)
    if free < needed:
        raise TandemError(
            f"runtime {runtime.id}: found {free:.1f} GiB free at {there}, expected {needed:.1f} GiB"
            + (f" ({shared:.1f} GiB are shared with runtimes that are there)" if shared else "")
            + f". Free some, or mount a larger disk at {settings.root}"
        )


def shared_bytes(runtime: Runtime, settings: Settings) -> int:
    """Bytes of packages that complete runtimes beside it have in the lock's very version."""
    if runtime.lock is None or not settings.cache.is_dir():
        return 0
    wanted = set(pins(runtime.lock.read_text(encoding="utf-8")))
    sizes: dict[tuple[str, str], int] = {}
    for marker in runtime.path.parent.glob(f"*/{MARKER}"):
        for folder in marker.parent.glob("lib/python3*/site-packages/*.dist-info"):
            name, _, version = folder.name.removesuffix(".dist-info").partition("-")
            pin = (canonical(name), version)
            if pin in wanted and pin not in sizes:
                sizes[pin] = _recorded_bytes(folder / "RECORD")
    return sum(sizes.values())


def pins(lock: str) -> Iterator[tuple[str, str]]:
    """Name and version of each package of a lock, whatever its marker says."""
    for match in re.finditer(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", lock, re.MULTILINE):
        yield canonical(match.group(1)), match.group(2)


def canonical(name: str) -> str:
    """A package's name as indexes spell it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def install(runtime: Runtime, python: Interpreter, settings: Settings) -> dict[str, Any]:
    """Makes one runtime, returns its marker. Call it under `exclusive`. Raises TandemError, leaving what was there."""
    if runtime.lock is None:
        raise TandemError(f"runtime {runtime.id}: its lock is not on the host")
    started = time.monotonic()
    with writing(runtime.path):
        partial = beside(runtime.path)
        check_space(runtime, settings)
        uv = ensure_uv(python, settings)
        environment = uv_environment(settings)
        what = f"runtime {runtime.id}"
        run(
            [str(uv), "venv", "--quiet", "--relocatable", "--no-project", "--python", python.path, str(partial)],
            environment,
            BOOTSTRAP_TIMEOUT,
            f"{what}: uv made no environment of {python.path}",
            settings,
        )
        interior = partial / "bin" / "python"
        run(
            [
                *(str(uv), "pip", "sync", "--quiet", "--require-hashes", "--no-build"),
                *("--python", str(interior), str(runtime.lock)),
            ],
            environment,
            SYNC_TIMEOUT,
            f"{what}: uv did not install {runtime.engine}'s lock from {settings.index_url}",
            settings,
        )
        import_all(runtime, interior, settings)
        (partial / ".lock").unlink(missing_ok=True)  # uv's, and all may write it
        open_to_all(partial)
        marker = {
            "format": 1,
            "id": runtime.id,
            "engine": runtime.engine,
            "lock_sha256": runtime.lock_sha256,
            "python": {"path": python.path, "version": python.version, "tag": python.tag},
            "uv": UV_VERSION,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - started, 1),
            "packages": installed(partial),
        }
        write_atomically(partial / MARKER, json.dumps(marker, indent=1) + "\n")
        swap(partial, runtime.path)
    return marker


def import_all(runtime: Runtime, python: Path, settings: Settings) -> None:
    """Imports what the engine will, once: a proof, and the one chance to write the bytecode, which services cannot.

    GPUs are hidden: a second release is made beside a live one, which owns their memory.
    """
    modules = [name.strip() for name in runtime.import_check.split(",") if name.strip()]
    if not modules:
        return
    program = f"import importlib\nfor name in {modules!r}: importlib.import_module(name)"
    with tempfile.TemporaryDirectory(prefix="tandem-") as home:
        environment = {
            "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": home,
            "XDG_CACHE_HOME": home,
            "TRITON_CACHE_DIR": home,
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        run(
            [str(python), "-Ic", program],
            environment,
            IMPORT_TIMEOUT,
            f"runtime {runtime.id}: installed, but {', '.join(modules)} cannot be imported",
            settings,
        )


def installed(prefix: Path) -> dict[str, str]:
    """Version of each package of an environment, sorted by name."""
    folders = prefix.glob("lib/python3*/site-packages/*.dist-info")
    names = (folder.name.removesuffix(".dist-info").partition("-") for folder in folders)
    return dict(sorted((canonical(name), version) for name, _, version in names))


def ensure_uv(python: Interpreter, settings: Settings) -> Path:
    """The pinned uv of the host, fetched by pip with its hash if it is not there. Call it under `exclusive`."""
    target = settings.uv.parents[1]
    if settings.uv.exists():
        return settings.uv
    with writing(target):
        partial = beside(target)
        with tempfile.TemporaryDirectory(prefix="tandem-") as scratch:
            environment = pip_environment(settings, Path(scratch))
            venv, wanted = Path(scratch, "venv"), Path(scratch, "uv.txt")
            wanted.write_text(
                f"uv=={UV_VERSION} " + " ".join(f"--hash=sha256:{digest}" for digest in UV_HASHES) + "\n",
                encoding="utf-8",
            )
            run(
                [python.path, "-Im", "venv", str(venv)],
                environment,
                BOOTSTRAP_TIMEOUT,
                f"{python.path} made no virtual environment (Debian package python3-venv expected)",
                settings,
            )
            run(
                [
                    *(str(venv / "bin" / "python"), "-Im", "pip", "install", "--quiet", "--no-input", "--no-deps"),
                    *("--no-compile", "--only-binary=:all:", "--require-hashes", "--target", str(partial)),
                    *("--requirement", str(wanted)),
                ],
                environment,
                BOOTSTRAP_TIMEOUT,
                f"pip did not install uv {UV_VERSION} for {platform.machine()} from {settings.index_url}",
                settings,
            )
        open_to_all(partial)
        swap(partial, target)
    return settings.uv


def ca_bundle(given: str | None, scratch: Path) -> Path | None:
    """The CA bundle for the index: the operator's beside the system's. None where the operator names none."""
    if not given:
        return None
    bundle = scratch / "ca.pem"
    sources = [source for source in (SYSTEM_CAS, Path(given)) if source != SYSTEM_CAS or source.exists()]
    try:
        bundle.write_text("\n".join(source.read_text(encoding="utf-8") for source in sources), encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TandemError(f"tandem_package_ca_file: {given} cannot be read ({error}); expected a PEM file") from error
    return bundle


def uv_environment(settings: Settings) -> dict[str, str]:
    """What uv sees. The index is in the environment, not on the command line, where `ps` would show its password."""
    environment = {
        **_base_environment(),
        "UV_NO_CONFIG": "1",
        "UV_CACHE_DIR": str(settings.cache),
        "UV_DEFAULT_INDEX": settings.index(),
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_LINK_MODE": "hardlink",
        "UV_NO_PROGRESS": "1",
        "UV_HTTP_TIMEOUT": "120",
    }
    if settings.ca_file is not None:
        environment["SSL_CERT_FILE"] = str(settings.ca_file)
    elif SYSTEM_CAS.exists():
        environment["SSL_CERT_FILE"] = str(SYSTEM_CAS)
    return environment


def pip_environment(settings: Settings, scratch: Path) -> dict[str, str]:
    """What pip sees while it fetches uv."""
    environment = {
        **_base_environment(),
        "HOME": str(scratch),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": settings.index(),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_DEFAULT_TIMEOUT": "120",
    }
    if settings.ca_file is not None:
        environment["PIP_CERT"] = str(settings.ca_file)
    elif SYSTEM_CAS.exists():
        environment["PIP_CERT"] = str(SYSTEM_CAS)
    return environment


def run(argv: Sequence[str], environment: Mapping[str, str], timeout: float, fault: str, settings: Settings) -> str:
    """Runs a program and returns its output. Raises TandemError with `fault` and the program's last lines.

    The program inherits the lock of `exclusive`: if this process is killed, the next run waits until it has ended.
    """
    try:
        done = subprocess.run(
            argv,
            env=dict(environment),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            close_fds=True,
            pass_fds=_held,
        )
    except subprocess.TimeoutExpired as error:
        raise TandemError(f"{fault}: it ran longer than {timeout:.0f} s") from error
    except OSError as error:
        raise TandemError(f"{fault}: {error}") from error
    if done.returncode != 0:
        said = done.stdout.replace(settings.index_auth, "***") if settings.index_auth else done.stdout
        lines = [line.rstrip() for line in said.splitlines() if line.strip()][-LAST_LINES:]
        ended = f"exit status {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        raise TandemError("\n  ".join([f"{fault} ({ended}):", *lines]))
    return done.stdout


# File descriptors that programs inherit, so that the lock is held for as long as any of them lives.
_held: tuple[int, ...] = ()


@contextlib.contextmanager
def exclusive(root: Path, timeout: int = LOCK_TIMEOUT) -> Iterator[None]:
    """One installation at a time under a root. Waits at most `timeout` seconds, then raises TandemError."""
    global _held  # noqa: PLW0603 - a process installs one thing at a time, and its children must know the lock
    with writing(root):
        make_folders(root)
        handle = os.open(root / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    before = signal.signal(signal.SIGALRM, _waited_long_enough)
    try:
        signal.alarm(timeout)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except TimeoutError as error:
            raise TandemError(
                f"another run has been installing at {root} for {timeout} s; wait for it, or end it: fuser {root}/.lock"
            ) from error
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        _held = (handle,)
        yield
    finally:
        _held = ()
        os.close(handle)


def _waited_long_enough(_signal: int, _frame: object) -> NoReturn:
    raise TimeoutError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the file system refuses into a message that names the place."""
    try:
        yield
    except OSError as error:
        raise TandemError(f"{path}: cannot be written: {error.strerror or error} ({error.filename})") from error


def beside(path: Path) -> Path:
    """The name under which a directory is made, cleared of what an earlier run left there."""
    make_folders(path.parent)
    for left in (path.with_name(path.name + PARTIAL), path.with_name(path.name + OLD)):
        if left.exists():
            shutil.rmtree(left)
    return path.with_name(path.name + PARTIAL)


def swap(partial: Path, path: Path) -> None:
    """Puts a complete directory in its place. Its content reaches the disk first, then its name."""
    os.sync()
    old = path.with_name(path.name + OLD)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    sync_folder(path.parent)
    if old.exists():
        shutil.rmtree(old)


def open_to_all(folder: Path) -> None:
    """Lets every user read a tree, and run what its owner may run, whatever umask its files met here or in a cache."""
    for entry in _walk(folder):
        if entry.is_symlink():
            continue
        mode = entry.stat(follow_symlinks=False).st_mode
        wanted = mode | 0o444 | (0o111 if mode & 0o100 else 0)
        if wanted != mode:
            Path(entry.path).chmod(wanted & 0o7777)
    folder.chmod(0o755)


def _walk(folder: str | Path) -> Iterable[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)


def _base_environment() -> dict[str, str]:
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "HOME": os.environ.get("HOME", "/root"),
        **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
    }


def _recorded_bytes(record: Path) -> int:
    try:
        lines = record.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(size) for line in lines if (size := line.rpartition(",")[2]).isdigit())
