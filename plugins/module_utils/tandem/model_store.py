"""Puts a revision of a model in place on this host, whole and verified, or says everything that is wrong with it.

Verified once: the size, times and inode of every file are kept beside the revision, and while they stay the same the
bytes do, since no write can leave the change time as it was. A file whose numbers differ is hashed again.

    models/<name>/<revision>                  a directory of its own (copy) or a link to the source (in place)
    models/<name>/<revision>.verified.json    what was verified, and when a file was last known to be right
    models/<name>/.<revision>.partial         a copy under way; what is whole in it is not copied again
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from .files import make_folders, sync_folder, write_atomically
from .manifest import Entry, digest_of
from .problems import Problem, TandemError, report

Mode = Literal["copy", "in_place"]

BLOCK: Final = 4 * 1024 * 1024
"""Bytes read at a time; hashlib lets other threads run while it hashes a block."""
RESERVE: Final = 64 * 1024 * 1024
"""Bytes that stay free beside a copy."""
WEIGHTS: Final = ("*.safetensors",)
"""What an engine loads by pattern: a shard that the manifest does not name would be loaded unverified."""
READ_BY_ENGINE: Final = (
    *WEIGHTS,
    "*.json",
    "*.py",
    "*.jinja",
    "*.model",
    "merges.txt",
    "vocab.txt",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
)
"""What an engine may read in a model's directory. A copy leaves such extra files behind, a link would not."""
EXTRA: Final = "a file that the manifest does not name"
HIDDEN_FROM_UNITS: Final = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - named, not used
"""Where the units' sandbox (ProtectHome, PrivateTmp) shows something else."""


@dataclass(frozen=True)
class Stamp:
    """How a file stood when its bytes were verified. Times in ns since the epoch."""

    sha256: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, sha256: str, status: os.stat_result) -> Stamp:
        return cls(sha256, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True)
class Request:
    """What the inventory asks for. `entries` come from `manifest.read`, without faults."""

    target: Path
    """models/<name>/<revision>"""
    source: Path
    entries: Sequence[Entry]
    mode: Mode
    threads: int
    check: bool = False
    """Look only: nothing is written, and a source that would be copied is not hashed."""

    @property
    def digest(self) -> str:
        return digest_of(self.entries)

    @property
    def partial(self) -> Path:
        return self.target.with_name(f".{self.target.name}.partial")

    @property
    def record(self) -> Path:
        return self.target.with_name(f"{self.target.name}.verified.json")


@dataclass
class Outcome:
    """What was done, or would be. `right` are the paths that were in place and right before."""

    changed: bool = False
    did: list[str] = field(default_factory=list)
    right: set[str] = field(default_factory=set)
    bytes_read: int = 0
    """Bytes of the model that were read to verify or copy them. 0 when all was verified before."""

    def act(self, what: str) -> None:
        self.changed = True
        self.did.append(what)


class ModelError(TandemError):
    """Why the revision is not in place."""

    def __init__(self, request: Request, problems: Sequence[Problem], left: str = "nothing was changed") -> None:
        super().__init__(report(f"The model at {request.target} is not in place, {left}", sorted(problems)))


def put_in_place(request: Request) -> Outcome:
    """Converges on the revision being published, whole and verified. Raises ModelError with all that is wrong."""
    outcome = Outcome()
    record = _read_record(request.record)
    present = request.target.exists()
    if present and record is not None and record[0] != request.digest:
        raise ModelError(
            request,
            [
                Problem(
                    "model_sync_manifest",
                    f"another manifest (digest {request.digest[:12]}) than that of the published revision "
                    f"({record[0][:12]})",
                    "the same bytes for the same revision: set another tandem_model_revision",
                )
            ],
        )
    linked = request.target.is_symlink()
    moved = linked and (request.mode == "copy" or request.target.readlink() != request.source)
    stamps: dict[str, Stamp] = {}
    bad: list[Problem] = []
    if present and not moved:
        stamps, bad = _verify(request, request.target, record[1] if record else {}, outcome)
        outcome.right = set(stamps)
        if not bad:
            if record is None or record[1] != stamps:
                outcome.act("verified what is in place")
                _write_record(request, stamps)
            return outcome
        if request.mode == "in_place":
            raise ModelError(request, bad)
    if request.mode == "in_place":
        _link(request, outcome)
    else:
        _copy(request, bad, stamps, outcome, whole=moved or not present)
    return outcome


# -- looking


def _verify(
    request: Request, tree: Path, known: dict[str, Stamp], outcome: Outcome
) -> tuple[dict[str, Stamp], list[Problem]]:
    """The files of a tree that are right, and what is wrong. Only files that are not as `known` are hashed."""
    stamps: dict[str, Stamp] = {}
    doubtful: list[Entry] = []
    problems = _extra_files(request, tree)
    for entry in request.entries:
        status, fault = _regular(tree / entry.path)
        if status is None:
            problems.append(Problem(str(tree / entry.path), fault, f"the file with SHA-256 {entry.sha256[:12]}…"))
        elif known.get(entry.path) == Stamp.of(entry.sha256, status):
            stamps[entry.path] = known[entry.path]
        else:
            doubtful.append(entry)
    for entry, stamp, fault in _parallel(request, doubtful, lambda entry: _hash(tree / entry.path)):
        outcome.bytes_read += stamp.size if stamp else 0
        if stamp is not None and stamp.sha256 == entry.sha256:
            stamps[entry.path] = stamp
        else:
            found = fault or f"SHA-256 {stamp.sha256[:12] if stamp else ''}…"
            problems.append(Problem(str(tree / entry.path), found, f"SHA-256 {entry.sha256[:12]}…"))
    return stamps, problems


def _extra_files(request: Request, tree: Path) -> list[Problem]:
    """Files that an engine would read and that the manifest does not name. Hidden folders are left alone."""
    patterns = READ_BY_ENGINE if request.mode == "in_place" else WEIGHTS
    named = {entry.path for entry in request.entries}
    problems = []
    for folder, folders, files in os.walk(tree):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = (Path(folder) / name).relative_to(tree).as_posix()
            if path not in named and any(PurePosixPath(name).match(pattern) for pattern in patterns):
                problems.append(
                    Problem(str(tree / path), EXTRA, "no other file that an engine reads: name or remove it")
                )
    return problems


def _regular(path: Path) -> tuple[os.stat_result | None, str]:
    """The status of a regular file, or why there is none."""
    try:
        status = path.stat()
    except OSError as error:
        return None, _why(error)
    return (status, "") if stat.S_ISREG(status.st_mode) else (None, "no regular file")


def _hash(path: Path) -> Stamp:
    """Reads a file once. Raises OSError, also for a file that was written to meanwhile."""
    with path.open("rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        digest = hashlib.sha256()
        for block in _blocks(file):
            digest.update(block)
        after = os.fstat(file.fileno())
    if Stamp.of("", before) != Stamp.of("", after):
        raise OSError(errno.EBUSY, "it is being written to")
    return Stamp.of(digest.hexdigest(), after)


def _blocks(file: Any) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(BLOCK))
    while size := file.readinto(buffer):
        yield buffer[:size]


def _parallel(
    request: Request, entries: Sequence[Entry], work: Callable[[Entry], Stamp]
) -> Iterator[tuple[Entry, Stamp | None, str]]:
    """Works on files in threads, and gives for each what came of it or why nothing did."""

    def one(entry: Entry) -> tuple[Entry, Stamp | None, str]:
        try:
            return entry, work(entry), ""
        except OSError as error:
            return entry, None, _why(error)

    with ThreadPoolExecutor(max(1, min(request.threads, len(entries)))) as pool:
        yield from pool.map(one, entries)


def _source_problems(request: Request, entries: Sequence[Entry]) -> list[Problem]:
    """What is wrong with the source, short of its bytes."""
    if not request.source.is_dir():
        return [Problem("model_sync_source", f"no directory {request.source}", "a directory of this host")]
    if request.source.resolve() == request.target.parent.resolve() / request.target.name:
        return [Problem("model_sync_source", f"{request.source}, the revision itself", "where the revision comes from")]
    problems = _extra_files(request, request.source)
    for entry in entries:
        status, fault = _regular(request.source / entry.path)
        if status is None:
            problems.append(Problem(str(request.source / entry.path), fault, "a file, as the manifest names it"))
    return problems


def _unreadable(request: Request) -> Iterator[Problem]:
    """What would keep an unprivileged unit from reading a source that is used in place."""
    real = request.source.resolve()
    for hidden in HIDDEN_FROM_UNITS:
        if real.is_relative_to(hidden):
            expected = "a place that the units' sandbox shows, such as /srv, or model_sync_mode: copy"
            yield Problem("model_sync_source", f"{real}, which is under {hidden}", expected)
    files = [path for path in ((real / entry.path) for entry in request.entries) if path.is_file()]
    folders = {parent for path in (real, *(path.resolve() for path in files)) for parent in path.parents} | {real}
    expected = "readable by every user (chmod o+rX), since each instance has a user of its own"
    for folder in sorted(folders):
        if not folder.stat().st_mode & stat.S_IXOTH:
            yield Problem(str(folder), f"mode {folder.stat().st_mode & 0o7777:04o}", expected)
    for path in files:
        if not path.stat().st_mode & stat.S_IROTH:
            yield Problem(str(path), f"mode {path.stat().st_mode & 0o7777:04o}", expected)


# -- publishing


def _link(request: Request, outcome: Outcome) -> None:
    """Verifies the source and makes the revision a link to it."""
    problems = _source_problems(request, request.entries)
    if request.source.is_dir():
        problems += _unreadable(request)
    stamps: dict[str, Stamp] = {}
    if request.check:
        outcome.did.append("the source is hashed in a real run only")
    elif not problems:
        known = _read_record(request.record)
        stamps, problems = _verify(request, request.source, known[1] if known else {}, outcome)
    if problems:
        raise ModelError(request, problems)
    outcome.act(f"linked to {request.source}")
    if request.check:
        return
    with _alone(request):
        beside = request.target.with_name(f".{request.target.name}.link")
        beside.unlink(missing_ok=True)
        beside.symlink_to(request.source)
        beside.replace(request.target)
        sync_folder(request.target.parent)
        _write_record(request, stamps)


def _copy(request: Request, bad: Sequence[Problem], stamps: dict[str, Stamp], outcome: Outcome, *, whole: bool) -> None:
    """Copies what is not among `stamps`, verifying on the way. Publishes a `whole` tree, or the files that one lost."""
    wanted = [entry for entry in request.entries if entry.path not in stamps]
    problems = [problem for problem in bad if problem.found == EXTRA]
    problems += _source_problems(request, wanted)
    if not problems:
        problems += _space_problems(request, wanted)
    if problems:
        raise ModelError(request, problems)
    outcome.act(f"copied {len(wanted)} of {len(request.entries)} files from {request.source}")
    if request.check:
        outcome.did.append("the source is hashed in a real run only")
        return
    with _alone(request):
        if whole and request.target.is_dir() and not request.target.is_symlink():
            found = "a revision that another run published meanwhile"
            raise ModelError(request, [Problem(str(request.target), found, "run again")])
        staged = _stage(request, wanted, outcome)
        _publish(request, wanted, whole=whole)
        for path, stamp in staged.items():
            after = Stamp.of(stamp.sha256, (request.target / path).stat())
            # A rename may set the change time; size, modification time and inode have to be the verified ones.
            if (after.size, after.mtime_ns, after.inode) != (stamp.size, stamp.mtime_ns, stamp.inode):
                problems.append(Problem(str(request.target / path), "it was written to", "nobody else to write here"))
            stamps[path] = after
        if problems:
            raise ModelError(request, problems, "though it was copied")
        _write_record(request, stamps)


def _space_problems(request: Request, wanted: Sequence[Entry]) -> list[Problem]:
    needed = sum((request.source / entry.path).stat().st_size for entry in wanted)
    staged = sum(path.stat().st_size for path in ((request.partial / entry.path) for entry in wanted) if path.is_file())
    disk = request.target.parent
    while not disk.exists():
        disk = disk.parent
    free = shutil.disk_usage(disk).free
    if needed - staged + RESERVE <= free:
        return []
    found = f"{_gib(free)} free where {_gib(needed - staged + RESERVE)} are needed"
    return [
        Problem(str(disk), found, "space for the revision: remove old ones, mount a disk, or model_sync_mode: in_place")
    ]


def _stage(request: Request, wanted: Sequence[Entry], outcome: Outcome) -> dict[str, Stamp]:
    """Copies into the partial directory. What is there already, whole, is kept. Returns the stamps of the copies."""
    names = {entry.path for entry in wanted}
    for path in _files(request.partial):
        if path.relative_to(request.partial).as_posix() not in names:
            path.unlink()
    for folder in _folders(request.partial):
        with suppress(OSError):  # one that is not empty stays
            folder.rmdir()
    for entry in wanted:
        make_folders((request.partial / entry.path).parent)

    def copy(entry: Entry) -> Stamp:
        staged = request.partial / entry.path
        if staged.is_file():
            stamp = _hash(staged)
            if stamp.sha256 == entry.sha256:
                with staged.open("rb") as file:
                    _settle(file.fileno())  # the run that copied it may have ended before it got here
                return stamp
        return _copy_file(request.source / entry.path, staged)

    stamps: dict[str, Stamp] = {}
    problems: list[Problem] = []
    for entry, stamp, fault in _parallel(request, wanted, copy):
        outcome.bytes_read += stamp.size if stamp else 0
        if stamp is not None and stamp.sha256 == entry.sha256:
            stamps[entry.path] = stamp
            continue
        (request.partial / entry.path).unlink(missing_ok=True)
        found = fault or f"SHA-256 {stamp.sha256[:12] if stamp else ''}…"
        problems.append(Problem(str(request.source / entry.path), found, f"SHA-256 {entry.sha256[:12]}…"))
    if problems:
        raise ModelError(request, problems, f"nothing was published, what is right waits in {request.partial}")
    return stamps


def _copy_file(source: Path, target: Path) -> Stamp:
    """Copies and hashes in one pass; the copy is durable when this returns. The stamp is the copy's."""
    digest = hashlib.sha256()
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        for block in _blocks(reader):
            digest.update(block)
            rest = block
            while rest:
                rest = rest[writer.write(rest) or 0 :]
        _settle(writer.fileno())
        return Stamp.of(digest.hexdigest(), os.fstat(writer.fileno()))


def _settle(file: int) -> None:
    """Makes a copy readable by all and durable."""
    os.fchmod(file, 0o644)
    os.fsync(file)


def _publish(request: Request, wanted: Sequence[Entry], *, whole: bool) -> None:
    """Moves the staged files to where engines look for them."""
    for folder in _folders(request.partial):
        sync_folder(folder)
    if whole:
        if request.target.is_symlink():
            request.target.unlink()
        request.partial.rename(request.target)
    else:
        for entry in wanted:
            place = request.target / entry.path
            make_folders(place.parent)
            (request.partial / entry.path).replace(place)
            sync_folder(place.parent)
        shutil.rmtree(request.partial)
    sync_folder(request.target.parent)


@contextmanager
def _alone(request: Request) -> Iterator[None]:
    """Keeps a second run on the same model out. The lock goes with the process."""
    folder = request.target.parent
    make_folders(folder)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = Problem(str(folder), "another run that stages this model now", "one at a time: wait for it")
            raise ModelError(request, [problem]) from None
        yield
    finally:
        os.close(lock)


# -- the record


def _read_record(path: Path) -> tuple[str, dict[str, Stamp]] | None:
    """The manifest's digest and the stamps of what was verified; None where no record can be read."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return str(kept["manifest_digest"]), {name: Stamp(**row) for name, row in kept["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_record(request: Request, stamps: dict[str, Stamp]) -> None:
    if request.check:
        return
    files = {path: asdict(stamps[path]) for path in sorted(stamps)}
    kept = {"format": 1, "manifest_digest": request.digest, "files": files}
    write_atomically(request.record, json.dumps(kept, indent=1) + "\n")


def _files(tree: Path) -> list[Path]:
    return [Path(folder) / name for folder, _, names in os.walk(tree) for name in names]


def _folders(tree: Path) -> Iterable[Path]:
    """The folders of a tree, the deepest first."""
    return [Path(folder) for folder, _, _ in os.walk(tree, topdown=False)]


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
