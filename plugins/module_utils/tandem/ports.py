"""Who listens on the ports that the inventory gives to our instances, and how to ask a stranger to leave.

Read from /proc in one pass: the listening sockets of this network namespace, and the processes that hold them. Ours is
what runs in the unit of the instance that the port belongs to; everything else is a stranger.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import shlex
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PROC: Final = Path("/proc")
LISTEN: Final = "0A"
"""State TCP_LISTEN in /proc/net/tcp (include/net/tcp_states.h)."""
POLL_S: Final = 0.2
LONGEST_COMMAND: Final = 240
"""Characters of a command line that a message shows."""
CONSENT: Final = "tandem_stop_foreign"
"""The setting that lets a run stop strangers."""


@dataclass(frozen=True)
class Claim:
    """One port that the inventory gives to an instance. `use` says what for."""

    port: int
    address: str
    instance: str
    use: str = "port"

    @property
    def unit(self) -> str:
        return f"tandem-{self.instance}.service"


@dataclass(frozen=True)
class Listener:
    """One listening socket. Several processes may hold it."""

    address: Address
    port: int
    inode: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if self.address.version == 6 else f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Process:
    """A process at one moment. `started` (clock ticks since boot) tells it from a later one of the same number."""

    pid: int
    parent: int
    started: int
    user: str
    command: str
    unit: str
    """The systemd service that it runs in; empty for one that a person started."""


@dataclass(frozen=True)
class Stranger:
    """A socket on one of our ports that our unit does not hold, and the top processes that do."""

    claim: Claim
    listener: Listener
    holders: tuple[Process, ...]

    def __str__(self) -> str:
        held = "; ".join(
            f"pid {row.pid} of user {row.user}{f' in {row.unit}' if row.unit else ''}: {row.command}"
            for row in self.holders
        )
        return (
            f"{self.listener} ({self.claim.use} of {self.claim.instance}) is held by "
            f"{held or 'a process that cannot be seen from here (another PID namespace, or the kernel)'}"
        )


# -- sockets


def read_listeners(table: str) -> Iterator[Listener]:
    """The listening sockets in the text of /proc/net/tcp or /proc/net/tcp6."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == LISTEN:
            address, _, port = fields[1].partition(":")
            yield Listener(_address(address), int(port, 16), int(fields[9]))


def _address(text: str) -> Address:
    """An address as /proc/net/tcp prints it: 32-bit words, each in the host's byte order (little-endian here)."""
    raw = b"".join(bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8))
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def resolve(name: str) -> tuple[Address, ...]:
    """The addresses that a server told to bind `name` would bind. Raises OSError for a name that nobody knows."""
    try:
        return (ipaddress.ip_address(name),)
    except ValueError:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(ipaddress.ip_address(row[4][0]) for row in found))


def conflict(ours: Address, theirs: Address) -> bool:
    """Whether a server can no longer bind `ours` while somebody listens on `theirs`, on the same port.

    `::` is taken to cover IPv4 as well, which it does unless the socket says IPV6_V6ONLY; /proc does not show that.
    """
    if ours.version == theirs.version:
        return ours == theirs or ours.is_unspecified or theirs.is_unspecified
    return any(address.is_unspecified and address.version == 6 for address in (ours, theirs))


# -- processes


def read_process(pid: int, proc: Path = PROC) -> Process | None:
    """A process, or None if it has gone (a zombie has)."""
    try:
        # The name, in parentheses, may hold anything; the fields that follow it do not.
        fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        owner = (proc / str(pid)).stat().st_uid
        arguments = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        cgroup = (proc / str(pid) / "cgroup").read_text()
        name = (proc / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    command = shown_command([text for text in arguments if text]) or f"[{name}]"
    return Process(pid, int(fields[1]), int(fields[19]), _user(owner), command, service_of(cgroup))


def service_of(cgroup: str) -> str:
    """The service in the text of /proc/PID/cgroup, or nothing. The innermost counts (a service of a container)."""
    services = re.findall(r"/([^/\n]+\.service)(?=/|$)", cgroup, re.MULTILINE)
    return services[-1] if services else ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def holders(inodes: Iterable[int], proc: Path = PROC) -> dict[int, set[int]]:
    """The processes that hold each of these sockets, by the socket's inode. Needs root to see those of others."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    held: dict[int, set[int]] = {inode: set() for inode in wanted.values()}
    if not wanted:
        return held
    for folder in proc.iterdir():
        if folder.name.isdigit():
            for link in _links(folder / "fd"):
                if link in wanted:
                    held[wanted[link]].add(int(folder.name))
    return held


def _links(folder: Path) -> Iterator[str]:
    """Where the links of a folder point. The folder and its links may go while we look."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - a path object for each of many thousand links is slow
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(f"{folder}/{name}")  # noqa: PTH115 - as above
        except OSError:
            continue


# -- secrets

_SECRET: Final = re.compile(r"keys?|token|secrets?|passw(?:or)?d|passphrase|credentials?|auth|authorization|bearer")
_MASK: Final = "***"
_KNOWN_SECRETS: Final = re.compile(r"\b(?:hf_|sk-|ghp_|glpat-)[A-Za-z0-9_-]{8,}|(?<=://)[^/@\s]+(?=@)|(?<=Bearer )\S+")
# Inside one argument, as in a whole command line after `bash -c`, or in JSON.
_OPTION: Final = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]*)(=|\s+)((?!-)[^\s'\"]+)")
_ASSIGNMENT: Final = re.compile(r"(?<![\w-])([A-Za-z_][\w-]*)([\"']?\s*[=:]\s*[\"']?)([^\s\"',}]+)")


def shown_command(arguments: Sequence[str]) -> str:
    """A command line for a message: quoted, cut, and without what may be a secret.

    Masked are the values of options and variables whose name has a word like key, token or password (`--api-key X`,
    `HF_TOKEN=X`), everything up to the next option, and values that look like a token wherever they stand.
    """
    shown: list[str] = []
    hiding = False
    for argument in arguments:
        name, assigned, _ = argument.partition("=")
        if argument.startswith("-"):
            hiding = _is_secret(name) and not assigned
        elif hiding:
            shown.append(_MASK)
            continue
        if assigned and _is_secret(name) and re.fullmatch(r"-{0,2}[\w-]+", name):
            shown.append(f"{name}={_MASK}")
        else:
            shown.append(shlex.quote(_mask(argument)))
    text = " ".join(shown).replace(f"'{_MASK}'", _MASK)
    return text if len(text) <= LONGEST_COMMAND else text[: LONGEST_COMMAND - 1] + "…"


def _mask(text: str) -> str:
    def hide(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}{_MASK}" if _is_secret(found[1]) else found[0]

    return _ASSIGNMENT.sub(hide, _OPTION.sub(hide, _KNOWN_SECRETS.sub(_MASK, text)))


def _is_secret(name: str) -> bool:
    return any(_SECRET.fullmatch(word) for word in re.split(r"[-_]", name.lower()))


# -- judging


def find_strangers(claims: Sequence[Claim], proc: Path = PROC) -> list[Stranger]:
    """Every socket that stands where one of our instances has to listen and is not held by its unit.

    Raises OSError for an address that cannot be resolved.
    """
    addresses = {claim.address: resolve(claim.address) for claim in claims}
    taken = [
        (claim, listener)
        for listener in _listeners(proc)
        for claim in claims
        if listener.port == claim.port
        and any(conflict(address, listener.address) for address in addresses[claim.address])
    ]
    held = holders({listener.inode for _, listener in taken}, proc)
    strangers = []
    for claim, listener in taken:
        processes = [process for pid in sorted(held[listener.inode]) if (process := read_process(pid, proc))]
        others = [process for process in processes if process.unit != claim.unit]
        # Nobody to be seen: out of sight, or gone since the table was read.
        if others or (not processes and listener in _listeners(proc)):
            strangers.append(Stranger(claim, listener, tuple(tops(others, proc))))
    return strangers


def _listeners(proc: Path) -> list[Listener]:
    tables = [proc / "self/net/tcp", proc / "self/net/tcp6"]
    return [listener for table in tables if table.exists() for listener in read_listeners(table.read_text())]


def tops(processes: Iterable[Process], proc: Path = PROC) -> list[Process]:
    """Those that descend from no other of them: a server's main process, not the workers that share its socket."""
    known = {process.pid: process for process in processes}
    return [process for process in known.values() if known.keys().isdisjoint(_ancestors(process.pid, proc))]


def _ancestors(pid: int, proc: Path = PROC) -> Iterator[int]:
    while pid > 1 and (process := read_process(pid, proc)):
        pid = process.parent
        yield pid


def stop_problem(stranger: Stranger) -> str:
    """Why a stranger must not be signalled even with consent, or nothing."""
    protected = {1, os.getpid(), *_ancestors(os.getpid())}
    if not stranger.holders:
        return "its process cannot be seen from here"
    for process in stranger.holders:
        if process.pid in protected:
            return f"pid {process.pid} is part of the system or of this run"
        if process.unit.startswith("tandem-"):
            return (
                f"it is Tandem's own {process.unit}, which this inventory does not put there: deploy or stop that "
                f"instance (systemctl stop {process.unit})"
            )
    return ""


# -- stopping


def family(processes: Iterable[Process], proc: Path = PROC) -> list[Process]:
    """These processes with all that descend from them."""
    roots = {process.pid for process in processes}
    everyone = [
        process for path in proc.iterdir() if path.name.isdigit() and (process := read_process(int(path.name), proc))
    ]
    parents = {process.pid: process.parent for process in everyone}

    def belongs(pid: int) -> bool:
        while pid > 1:
            if pid in roots:
                return True
            pid = parents.get(pid, 0)
        return False

    return [process for process in everyone if belongs(process.pid)]


def alive(process: Process) -> bool:
    """Whether this very process still runs."""
    now = read_process(process.pid)
    return now is not None and now.started == process.started


def stop(
    strangers: Sequence[Stranger], claims: Sequence[Claim], timeout_s: float
) -> tuple[list[Process], list[Stranger]]:
    """Asks the strangers to end (SIGTERM, nothing stronger) and waits until they and their children have and the ports
    are free, for at most `timeout_s` seconds. Returns the processes that live on and the strangers that are there then.
    """
    mains = tops({process.pid: process for row in strangers for process in row.holders}.values())
    doomed = family(mains)
    for process in mains:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
    end = time.monotonic() + timeout_s
    while True:
        left = [process for process in doomed if alive(process)]
        there = find_strangers(claims) if not left else []
        if (not left and not there) or time.monotonic() >= end:
            return left, there or find_strangers(claims)
        time.sleep(POLL_S)
