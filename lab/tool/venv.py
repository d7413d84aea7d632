"""The control node's tools: `.venv`, made from requirements/control.txt, every file checked against its hash."""

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from lab.tool import shell
from lab.tool.errors import LabError
from lab.tool.inventory import package_index
from lab.tool.paths import Paths

STAMP = ".made-from"


def requirement(lock: str, name: str) -> str:
    """Return one package's lines of a lock file: its pin and its hashes.

    Raises LabError if the lock does not pin it.
    """
    block: list[str] = []
    for line in lock.splitlines():
        if block:
            if not line.startswith(" ") or line.lstrip().startswith("#"):
                break
            block.append(line)
        elif line.startswith(f"{name}=="):
            block.append(line)
    if not block:
        raise LabError(f"the control node's lock pins no {name}; `make locks` writes it anew")
    return "\n".join(block) + "\n"


def stamp(lock: str, *of: str) -> str:
    """Return what `.venv` is good for: this lock, this interpreter, this place. Else it is made anew."""
    return hashlib.sha256("\n".join((lock, *of)).encode()).hexdigest()


def ensure(paths: Paths, environ: Mapping[str, str] = os.environ) -> str:
    """Have `.venv` as the lock says; return a one-line account. Nothing is done if it is already so."""
    lock = paths.lock.read_text(encoding="utf-8")
    # resolved: from within the activated `.venv` its own interpreter runs us, and that must not remake itself
    base = str(Path(sys.executable).resolve())
    wanted = stamp(lock, base, sys.version, str(paths.venv))
    mark = paths.venv / STAMP
    if mark.exists() and mark.read_text(encoding="utf-8") == wanted:
        return f"{paths.venv.name}, as {paths.lock.relative_to(paths.repo)} says"
    python = str(paths.venv / "bin" / "python")
    mark.unlink(missing_ok=True)
    log = paths.logs / "control-tools.log"
    shell.long_step([base, "-m", "venv", "--clear", str(paths.venv)], "python -m venv", log)
    first = paths.cache / "uv.txt"
    first.write_text(requirement(lock, "uv"), encoding="utf-8")
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--no-cache-dir",
        "--no-deps",
        "--require-hashes",
        "--requirement",
        str(first),
    ]
    shell.long_step(pip, "pip install uv", log)
    uv = [str(paths.venv / "bin" / "uv"), "pip", "sync", "--require-hashes", str(paths.lock)]
    shell.long_step(uv, "uv pip sync", log, uv_settings(paths, environ))
    mark.write_text(wanted, encoding="utf-8")
    return f"{paths.venv.name}, made from {paths.lock.relative_to(paths.repo)}"


def environment(paths: Paths, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of Ansible, molecule and the linters: `.venv` first, their state in the lab's cache."""
    return {
        **environ,
        "PATH": f"{paths.venv / 'bin'}:{environ['PATH']}",
        "VIRTUAL_ENV": str(paths.venv),
        "ANSIBLE_HOME": str(paths.cache / "ansible"),
        "PYTHONUNBUFFERED": "1",
        "TANDEM_LAB_CACHE": str(paths.cache),
    }


def uv_settings(paths: Paths, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of uv: this machine's package index, the lab's cache, `.venv`."""
    return {
        **environ,
        "UV_CACHE_DIR": str(paths.cache / "uv"),
        "UV_DEFAULT_INDEX": package_index(environ),
        "VIRTUAL_ENV": str(paths.venv),
    }


def lock(paths: Paths, environ: Mapping[str, str] = os.environ) -> str:
    """Pin requirements/control.in anew with the newest versions that it allows; return a one-line account.

    One lock for every Python from 3.11 on, so that Debian 12 and 13 run the same tools.
    """
    ensure(paths, environ)
    source = paths.lock.with_suffix(".in")
    command = [
        str(paths.venv / "bin" / "uv"),
        *("pip", "compile", "--quiet", "--upgrade", "--no-config", "--universal", "--generate-hashes"),
        *("--python-version", "3.11", "--fork-strategy", "fewest", "--custom-compile-command", "make locks"),
        str(source.relative_to(paths.repo)),
        *("--output-file", str(paths.lock.relative_to(paths.repo))),
    ]
    shell.long_step(
        ["env", "-C", str(paths.repo), *command],
        "uv pip compile",
        paths.logs / "locks.log",
        uv_settings(paths, environ),
    )
    return f"{paths.lock.relative_to(paths.repo)} is pinned anew; `make setup` installs it"
