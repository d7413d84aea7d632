"""Is this machine fit for the lab? Which Debian packages does the lab need on it?"""

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.tool import say, shell
from lab.tool.errors import LabError
from lab.tool.paths import Paths

PYTHON_MIN = (3, 11)
"""Ansible-core 2.19's control node wants 3.11."""
SYSTEMD_MIN = 250
"""Debian 12 has 252, Ubuntu 24.04 has 255; older ones were never tried."""
DISK_NEEDED = 25 * 10**9
"""Bytes that a full lab takes, its downloads and build folders counted: the engine's runtime alone is 11 GB."""
MEMORY_ADVISED = 10 * 10**9
"""Bytes: prefill, decode and router of the demo use some 7 GB."""

_COMMON = (
    "aardvark-dns",
    "ca-certificates",
    "debian-archive-keyring",
    "iptables",
    "mmdebstrap",
    "netavark",
    "openssh-client",
    "podman",
    "python3-venv",
    "runc",
)


@dataclass(frozen=True)
class System:
    """One supported operating system of the machine that the lab runs on."""

    name: str
    tested: bool
    packages: tuple[str, ...]


SYSTEMS: dict[tuple[str, str], System] = {
    ("debian", "12"): System("Debian 12", tested=True, packages=_COMMON),
    # netavark there writes its rules with nft
    ("debian", "13"): System("Debian 13", tested=True, packages=(*_COMMON, "nftables")),
    ("ubuntu", "24.04"): System("Ubuntu 24.04", tested=False, packages=_COMMON),
}
"""Key: ID and VERSION_ID of /etc/os-release."""


@dataclass(frozen=True)
class Facts:
    """What `doctor` judges; gathered once, so that the judgement is a plain function."""

    os_release: Mapping[str, str]
    python: tuple[int, int]
    systemd: int | None
    """Major version; None: no systemctl."""
    has_apt: bool
    uid: int
    has_sudo: bool
    architecture: str
    disk_free: int
    """Bytes on the file system of the cache, for this user."""
    disk_cached: int
    """Bytes of the cache already there; 0 where it was not worth measuring."""
    memory: int
    """Bytes of memory in the machine."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    level: str
    """ok, note or bad; one `bad` refuses the machine."""
    text: str


def os_release(text: str) -> dict[str, str]:
    """Read the content of /etc/os-release: lines NAME=value or NAME="value"."""
    found: dict[str, str] = {}
    for row in text.splitlines():
        name, mark, value = row.partition("=")
        if mark and not name.lstrip().startswith("#"):
            found[name.strip()] = value.strip().strip("\"'")
    return found


def system_of(release: Mapping[str, str]) -> System | None:
    """Return the supported system that this os-release names, or None."""
    return SYSTEMS.get((release.get("ID", ""), release.get("VERSION_ID", "")))


def disk_missing(free: int, cached: int, needed: int = DISK_NEEDED) -> int:
    """Return how many bytes are missing: what is cached already need not be free as well. 0 = enough."""
    return max(0, needed - max(0, cached) - free)


def judge(facts: Facts, cache: Path) -> list[Finding]:
    """Return everything there is to say about the machine, all at once."""
    findings: list[Finding] = []
    release = facts.os_release
    name = release.get("PRETTY_NAME") or release.get("ID") or "an unknown system"
    system = system_of(release)
    lacks = []
    if facts.python < PYTHON_MIN:
        lacks.append(f"Python >= {_dotted(PYTHON_MIN)} (found {_dotted(facts.python)})")
    if facts.systemd is None or facts.systemd < SYSTEMD_MIN:
        lacks.append(f"systemd >= {SYSTEMD_MIN} (found {facts.systemd or 'none'})")
    if not facts.has_apt:
        lacks.append("apt-get (found none)")
    supported = ", ".join(f"{s.name}{'' if s.tested else ' (untested)'}" for s in SYSTEMS.values())
    if system is None:
        missing = f" Missing here: {'; '.join(lacks)}." if lacks else ""
        findings.append(Finding("bad", f"{name} is not supported. Supported: {supported}.{missing}"))
    elif lacks:
        findings.append(Finding("bad", f"{name}: missing {'; '.join(lacks)}"))
    elif system.tested:
        findings.append(Finding("ok", f"{system.name}, Python {_dotted(facts.python)}, systemd {facts.systemd}"))
    else:
        findings.append(Finding("note", f"{name}: written for, but untested. Tested: Debian 12 and 13."))
    if facts.architecture != "x86_64":
        findings.append(Finding("bad", f"a {facts.architecture} machine; expected x86_64 (the locks are for it)"))
    if facts.uid == 0:
        findings.append(Finding("ok", "root"))
    elif facts.has_sudo:
        findings.append(Finding("ok", "an ordinary user with sudo; it may ask for your password"))
    else:
        findings.append(Finding("bad", "neither root nor sudo; the lab installs packages and starts containers"))
    short = disk_missing(facts.disk_free, facts.disk_cached)
    cached = f", {say.size(facts.disk_cached)} cached already" if facts.disk_cached else ""
    if short:
        findings.append(
            Finding(
                "bad",
                f"{say.size(facts.disk_free)} free for {cache}{cached}; expected {say.size(DISK_NEEDED)} in all."
                f" Free {say.size(short)} more, or name a folder on a larger disk in TANDEM_LAB_CACHE.",
            )
        )
    else:
        findings.append(Finding("ok", f"{say.size(facts.disk_free)} free{cached}"))
    if facts.memory < MEMORY_ADVISED:
        findings.append(
            Finding("note", f"{say.size(facts.memory)} of memory; the demo's pair wants {say.size(MEMORY_ADVISED)}")
        )
    return findings


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)


def gather(paths: Paths, python: tuple[int, int]) -> Facts:
    """Look at this machine. `python` is the version of the interpreter that runs the lab."""
    release = Path("/etc/os-release")
    free = shutil.disk_usage(_existing(paths.cache)).free
    return Facts(
        os_release=os_release(release.read_text(encoding="utf-8")) if release.exists() else {},
        python=python,
        systemd=_systemd_version(),
        has_apt=shutil.which("apt-get") is not None,
        uid=os.geteuid(),
        has_sudo=shutil.which("sudo") is not None,
        architecture=os.uname().machine,
        disk_free=free,
        disk_cached=0 if free >= DISK_NEEDED else disk_used(paths.cache),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _systemd_version() -> int | None:
    if shutil.which("systemctl") is None:
        return None
    found = re.match(r"systemd (\d+)", shell.output(["systemctl", "--version"]))
    return int(found[1]) if found else None


def disk_used(folder: Path) -> int:
    """Return the bytes that a folder takes on its own file system, hard links counted once. 0 if it is missing."""
    if not folder.exists():
        return 0
    return int(shell.output(shell.as_root(["du", "-sx", "--block-size=1", str(folder)])).split()[0])


def missing_packages(wanted: Iterable[str], installed: Iterable[str]) -> list[str]:
    """Return the wanted packages that are not installed, sorted."""
    return sorted(set(wanted) - set(installed))


def installed_packages(names: Sequence[str]) -> list[str]:
    """Return those of the named Debian packages that are installed here."""
    # dpkg-query ends with 1 as soon as one name is unknown to it, so ask for all and select
    listing = shell.output(["dpkg-query", "-W", "-f=${db:Status-Status} ${Package}\n"])
    have = {row.split()[1] for row in listing.splitlines() if row.startswith("installed ")}
    return [name for name in names if name in have]


def install_packages(paths: Paths) -> str:
    """Install what is missing, after saying so; return a one-line account.

    Raises LabError on an unsupported system, or if apt-get fails.
    """
    system = system_of(os_release(Path("/etc/os-release").read_text(encoding="utf-8")))
    if system is None:
        raise LabError("this system is not supported; `lab/lab doctor` says more")
    missing = missing_packages(system.packages, installed_packages(system.packages))
    if not missing:
        return f"{len(system.packages)} Debian packages, all there"
    say.line(f"    will install these Debian packages: {' '.join(missing)}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    shell.long_step(shell.as_root(["apt-get", "update"], quiet), "apt-get update", paths.logs / "apt-update.log")
    shell.long_step(
        shell.as_root(["apt-get", "install", "--yes", "--no-install-recommends", *missing], quiet),
        "apt-get install",
        paths.logs / "apt-install.log",
    )
    with paths.installed.open("a", encoding="utf-8") as record:
        record.writelines(f"{name}\n" for name in missing)
    return f"installed {' '.join(missing)}"
