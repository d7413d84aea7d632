"""Kernel packages of the operator: trees of Python code or wheels, put under /opt/tandem/kernels, whole or not at all.

The control node packs, the host unpacks, and both count a tree's digest in the same way. A later run compares size,
times and inode of each file with what was verified, and reads file contents only where these differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final, Literal

from . import uv
from .files import write_atomically
from .problems import TandemError

# Beside the directory, not in it: what a directory holds is what it held on the control node.
MARKER_SUFFIX: Final = ".verified.json"
# Python writes these by itself, wherever it may.
IGNORED: Final = "__pycache__"
INSTALL_TIMEOUT: Final = 600.0


@dataclass(frozen=True)
class Kernel:
    """One package to have. `archive` is None while the host has no copy of it."""

    id: str
    name: str
    kind: Literal["directory", "wheel"]
    sha256: str
    """Of a directory, its tree_digest; of a wheel, the file's."""
    path: Path
    archive: Path | None = None

    @property
    def marker(self) -> Path:
        return self.path.with_name(self.path.name + MARKER_SUFFIX)


def tree_digest(path: str | Path) -> str:
    """SHA-256 of a tree: of each file its path, whether it may be run, and its content; nothing of owners and times.

    `__pycache__` is left out. Raises TandemError for an empty tree and for anything that is no plain file, since that
    could not be copied verbatim.
    """
    digest = hashlib.sha256()
    for relative, file in tree_files(path):
        run = "x" if file.stat().st_mode & stat.S_IXUSR else "-"
        digest.update(f"{hashlib.sha256(file.read_bytes()).hexdigest()} {run} {relative}\n".encode())
    return digest.hexdigest()


def tree_files(path: str | Path) -> list[tuple[str, Path]]:
    """The files of a tree with their relative paths, sorted by these. Raises TandemError as tree_digest does."""
    files = sorted(_files(Path(path), ""))
    if not files:
        raise TandemError(f"{path}: found no file; expected an importable Python tree")
    return files


def pack(path: str | Path, out: IO[bytes]) -> None:
    """Writes a tree as a tar archive whose bytes depend on nothing but its digest's ingredients."""
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=6) as archive:
        for relative, file in tree_files(path):
            entry = tarfile.TarInfo(relative)
            entry.size = file.stat().st_size
            entry.mode = 0o755 if file.stat().st_mode & stat.S_IXUSR else 0o644
            with file.open("rb") as content:
                archive.addfile(entry, content)


def unpack(archive: Path, into: Path) -> None:
    """Unpacks what `pack` wrote, plain files below `into` and nothing else. Raises TandemError."""
    into.mkdir()
    try:
        with tarfile.open(archive, "r:gz") as packed:
            for entry in packed:
                parts = entry.name.split("/")
                content = packed.extractfile(entry) if entry.isfile() else None
                if content is None or ".." in parts or "" in parts:
                    raise TandemError(f"{archive}: found the entry {entry.name!r}; expected plain files of the tree")
                target = into.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
                target.chmod(0o755 if entry.mode & stat.S_IXUSR else 0o644)
    except (tarfile.TarError, EOFError) as error:
        raise TandemError(f"{archive}: found no readable archive ({error})") from error


def fingerprint(path: Path) -> str:
    """Changes with any write to a tree, costs a stat a file. Equal means: nothing was written since."""
    digest = hashlib.sha256()
    for relative, file in tree_files(path):
        now = file.stat()
        digest.update(f"{relative} {now.st_size} {now.st_mtime_ns} {now.st_ctime_ns} {now.st_ino}\n".encode())
    return digest.hexdigest()


def missing(kernel: Kernel) -> str:
    """Why a package has to be put in place; empty if what is there is what was verified."""
    if not kernel.path.is_dir():
        return "absent"
    try:
        known = json.loads(kernel.marker.read_text(encoding="utf-8"))
        sha256, tree, seen = known["sha256"], known["tree"], known["fingerprint"]
    except FileNotFoundError:
        return f"unfinished: no {kernel.marker.name} beside it"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {kernel.marker.name} cannot be read ({error})"
    if sha256 != kernel.sha256:
        return f"made from another package, sha256 {sha256[:12]}…"
    try:
        if fingerprint(kernel.path) == seen or tree_digest(kernel.path) == tree:
            return ""
    except TandemError as error:
        return f"altered: {error}"
    return "altered: its files are not those that were verified"


def install(kernel: Kernel, python: uv.Interpreter, settings: uv.Settings) -> None:
    """Puts one package in place and records what was verified. Call it under `uv.exclusive`. Raises TandemError."""
    archive = kernel.archive
    if archive is None:
        raise TandemError(f"kernel package {kernel.name}: it is not on the host")
    with uv.writing(kernel.path):
        partial = uv.beside(kernel.path)
        if kernel.kind == "directory":
            unpack(archive, partial)
            tree = tree_digest(partial)
            if tree != kernel.sha256:
                raise TandemError(
                    f"kernel package {kernel.name}: found a tree of digest {tree} on the host,"
                    f" expected {kernel.sha256}. It changed while the run went on: run again"
                )
        else:
            _install_wheel(kernel, archive, partial, python, settings)
            tree = tree_digest(partial)
        uv.open_to_all(partial)
        uv.swap(partial, kernel.path)
        record = {
            "format": 1,
            "name": kernel.name,
            "kind": kernel.kind,
            "sha256": kernel.sha256,
            "tree": tree,
            "fingerprint": fingerprint(kernel.path),
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_atomically(kernel.marker, json.dumps(record, indent=1) + "\n")


def wheel_name(file: str) -> str:
    """The package that a wheel holds, by its file's name. Raises TandemError."""
    match = re.fullmatch(r"([A-Za-z0-9_.]+)-[^-]+(-[^-]+)?-[^-]+-[^-]+-[^-]+\.whl", file)
    if match is None:
        raise TandemError(f"{file}: found a name that is no wheel's; expected name-version-python-abi-platform.whl")
    return match.group(1)


def _install_wheel(kernel: Kernel, archive: Path, partial: Path, python: uv.Interpreter, settings: uv.Settings) -> None:
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != kernel.sha256:
        raise TandemError(f"kernel package {kernel.name}: found sha256 {found} on the host, expected {kernel.sha256}")
    program = uv.ensure_uv(python, settings)
    wanted = archive.with_suffix(".txt")
    line = f"{wheel_name(archive.name)} @ {archive.as_uri()} --hash=sha256:{kernel.sha256}\n"
    wanted.write_text(line, encoding="utf-8")
    uv.run(
        [
            *(str(program), "pip", "install", "--quiet", "--no-deps", "--no-index", "--require-hashes", "--no-build"),
            # Not from the cache: its files are hard-linked, so that a repair would bring back what was edited in place.
            "--no-cache",
            *("--python", python.path, "--target", str(partial), "--requirements", str(wanted)),
        ],
        uv.uv_environment(settings),
        INSTALL_TIMEOUT,
        f"kernel package {kernel.name}: uv did not install {archive.name}",
        settings,
    )


def _files(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise TandemError(f"{folder}: cannot be read ({error.strerror})") from error
    for entry in entries:
        relative = prefix + entry.name
        if "\n" in entry.name:
            raise TandemError(f"{folder}: found the name {entry.name!r}; expected names of one line")
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            raise TandemError(f"{entry.path}: found a link or a special file; expected plain files and directories")
        if entry.is_file():
            yield relative, Path(entry.path)
        elif entry.name != IGNORED:
            yield from _files(Path(entry.path), relative + "/")


def stage(
    kernels: list[Kernel], python: uv.Interpreter, settings: uv.Settings, check_mode: bool
) -> list[dict[str, Any]]:
    """One row a package, with what was, or in check mode would be, done."""
    reasons = {kernel.id: missing(kernel) for kernel in kernels}
    if check_mode or not any(reasons.values()):
        return [_row(kernel, reasons[kernel.id]) for kernel in kernels]
    rows = []
    with uv.exclusive(settings.root):
        for kernel in kernels:
            reason = missing(kernel)
            if reason:
                install(kernel, python, settings)
            rows.append(_row(kernel, reason))
    return rows


def _row(kernel: Kernel, reason: str) -> dict[str, Any]:
    return {
        "id": kernel.id,
        "name": kernel.name,
        "path": str(kernel.path),
        "action": "install" if reason else "none",
        "reason": reason,
    }
