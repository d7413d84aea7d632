"""Writing so that nobody ever sees half a file, and a power cut leaves either the old or the new one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Writes a text file beside its place and renames it there. Makes missing folders, readable by all."""
    make_folders(path.parent)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            os.fchmod(out.fileno(), mode)
            out.flush()
            os.fsync(out.fileno())
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folders(path: Path) -> None:
    """Makes a folder and those above it that are missing, readable by all whatever the umask is."""
    for folder in reversed((path, *path.parents)):
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
