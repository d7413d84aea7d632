"""Lab hosts: containers with real systemd and sshd, each with an address of its own on the lab's bridge."""

import fcntl
import json
import re
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from lab.tool import image, shell
from lab.tool.errors import LabError
from lab.tool.paths import Paths
from lab.tool.podman import LABEL, NETWORK, Podman

NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
"""A host's name: it becomes container name, host name and inventory name."""
OPT = "/opt/tandem"
MODELS = "/srv/models"
BOOT_TIMEOUT = 60.0
"""Seconds until systemd must be up and sshd must answer; 2-3 are usual."""


@dataclass(frozen=True)
class Spec:
    """What decides how a host is made. A running host with another one is not silently replaced."""

    image: str
    suite: str
    runtimes: str
    """rw: /opt/tandem is the shared folder itself. ro: it is seen through an overlay, own writes go with the host."""
    models: str


@dataclass(frozen=True)
class Host:
    """One lab host as it is now."""

    name: str
    address: str
    state: str
    """podman's word: running, exited, …"""
    started: str
    spec: Spec


def check_name(name: str) -> str:
    """Return the name if it may be a host's; raises LabError otherwise."""
    if not NAME.fullmatch(name):
        raise LabError(
            f"host name {name!r}; expected lower-case letters, digits and dashes, a letter first, at most 31"
        )
    return name


def run_arguments(name: str, spec: Spec, address: str, opt: Path, own: Path) -> list[str]:
    """Return the options of `podman run` for a host.

    All capabilities and no system call filter: units inside set up their own sandboxes (PrivateTmp, ProtectSystem,
    numactl --membind …), which podman's defaults forbid. Still no --privileged: the machine's devices stay out.
    """
    mount = f"{opt}:{OPT}"
    if spec.runtimes == "ro":
        mount += f":O,upperdir={own / 'upper'},workdir={own / 'work'}"
    return [
        "--name",
        name,
        "--hostname",
        name,
        "--label",
        f"{LABEL}={json.dumps(vars(spec), sort_keys=True)}",
        "--network",
        NETWORK,
        "--ip",
        address,
        "--systemd=always",
        "--shm-size=2g",
        "--cap-add=all",
        "--security-opt=seccomp=unconfined",
        "--security-opt=apparmor=unconfined",
        "--volume",
        mount,
        "--volume",
        f"{spec.models}:{MODELS}:ro",
        spec.image,
    ]


def next_address(subnet: str, last: str, taken: Sequence[str]) -> str:
    """Return the address after `last` that nobody has.

    Addresses are used in turn, so that a new host does not answer where an ssh client still holds a connection to
    an old one.
    """
    hosts = [str(one) for one in IPv4Network(subnet).hosts()][1:]  # the first is the bridge's own
    first = hosts.index(last) + 1 if last in hosts else 0
    for address in hosts[first:] + hosts[:first]:
        if address not in taken:
            return address
    raise LabError(f"no free address in {subnet}; `lab/lab down --all` frees them")


class Lab:
    """All hosts of one cache."""

    def __init__(self, paths: Paths) -> None:
        """Write podman's settings; the cache must have been claimed."""
        self.paths = paths
        self.podman = Podman(paths)
        self.podman.configure()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lab's lock: image, network and addresses are made by one process at a time."""
        with (self.paths.cache / "lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def hosts(self) -> list[Host]:
        """Return all hosts, by name."""
        return [_host(one) for one in self.podman.containers()]

    def host(self, name: str) -> Host:
        """Return one running host; raises LabError if it is missing or stopped."""
        found = self.podman.container(check_name(name))
        if found is None:
            raise LabError(f"no lab host {name}; `lab/lab up {name}` makes it")
        host = _host(found)
        if host.state != "running":
            raise LabError(f"lab host {name} is {host.state}; `lab/lab up {name}` starts it")
        return host

    def image(self, suite: str) -> str:
        """Have the image of a Debian release; return a one-line account."""
        with self.lock():
            return image.ensure(self.paths, self.podman, suite)[1]

    def up(self, name: str, suite: str, runtimes: str) -> Host:
        """Have a host of this name running and answering ssh.

        Raises LabError if a host of this name was made otherwise, or does not come up in BOOT_TIMEOUT.
        """
        check_name(name)
        with self.lock():
            recipe, _ = image.ensure(self.paths, self.podman, suite)
            wanted = Spec(recipe.tag, suite, runtimes, str(self.paths.models))
            found = self.podman.container(name)
            if found is None:
                self._create(name, wanted)
            else:
                host = _host(found)
                if host.spec != wanted:
                    raise LabError(
                        f"lab host {name} exists with {_differences(host.spec, wanted)}."
                        f" `lab/lab down {name}` removes it."
                    )
                if host.state != "running":
                    self.podman.call("start", name)
        return self.wait(name)

    def _create(self, name: str, wanted: Spec) -> None:
        subnet = self.podman.ensure_network()
        opt, own = self.paths.opt(wanted.suite), self.paths.hosts / name
        folders = [str(opt), str(own / "upper"), str(own / "work")]
        shell.output(shell.as_root(["rm", "-rf", "--one-file-system", str(own)]))
        shell.output(shell.as_root(["mkdir", "-p", *folders]))
        last = self.paths.cache / "last-address"
        address = next_address(
            subnet,
            last.read_text(encoding="utf-8") if last.exists() else "",
            [host.address for host in self.hosts()],
        )
        last.write_text(address, encoding="utf-8")
        try:
            self.podman.run_detached(run_arguments(name, wanted, address, opt, own))
        except LabError:
            self.podman.call("rm", "--force", "--ignore", name)  # podman keeps a container that it could not start
            raise

    def wait(self, name: str) -> Host:
        """Wait until systemd has started everything and sshd lets us in; return the host."""
        deadline = time.monotonic() + BOOT_TIMEOUT
        host = self.host(name)
        # The bus appears a moment after the container; from then on systemd itself does the waiting.
        inside = (
            "until [ -S /run/dbus/system_bus_socket ]; do sleep 0.05; done; systemctl is-system-running --wait || "
            "{ systemctl --failed --no-legend --plain; exit 1; }"
        )
        try:
            self.podman.call("exec", name, "sh", "-c", inside, timeout=BOOT_TIMEOUT)
        except LabError as error:
            raise LabError(f"systemd on {name} did not start everything: {error}") from error
        while True:
            try:
                with socket.create_connection((host.address, 22), timeout=2) as link:
                    if link.recv(4) == b"SSH-":
                        return host
            except OSError as error:
                if time.monotonic() > deadline:
                    raise LabError(f"sshd on {name} ({host.address}:22) does not answer: {error}") from error
            time.sleep(0.05)

    def reboot(self, name: str) -> Host:
        """Stop a host as `poweroff` does and start it again; /run, /tmp and /dev/shm are empty after it."""
        self.host(name)
        self.podman.call("stop", "--time", "90", name)
        self.podman.call("start", name)
        return self.wait(name)

    def down(self, names: Sequence[str]) -> list[str]:
        """Destroy hosts at once; caches stay. Unknown names are no error. Returns the names that existed."""
        existing = [host.name for host in self.hosts() if host.name in names]
        if existing:
            self.podman.call("rm", "--force", "--time", "0", *existing)
        for name in names:
            shell.output(shell.as_root(["rm", "-rf", "--one-file-system", str(self.paths.hosts / check_name(name))]))
            (self.paths.inventory / "host_vars" / f"{name}.yml").unlink(missing_ok=True)
        return existing

    def ssh_options(self) -> list[str]:
        """Return ssh's options for any lab host: the lab's key, the lab's one known host key, no questions."""
        return [
            "-o",
            f"UserKnownHostsFile={self.paths.ssh / 'known_hosts'}",
            "-o",
            f"HostKeyAlias={image.HOST_ALIAS}",
            "-o",
            "StrictHostKeyChecking=yes",
            "-o",
            "IdentitiesOnly=yes",
        ]

    def ssh_command(self, host: Host, *extra: str) -> list[str]:
        """Return an ssh call to a host, up to and with the destination; `extra` are further options."""
        key = str(self.paths.ssh / "login")
        return ["ssh", "-F", "none", "-i", key, *self.ssh_options(), *extra, f"{image.USER}@{host.address}"]

    def on_host(self, host: Host, command: Sequence[str], timeout: float = 60.0) -> str:
        """Run a command on a host over ssh and return its stdout; raises LabError if it fails."""
        return shell.output([*self.ssh_command(host, "-o", "BatchMode=yes"), shlex.join(command)], timeout=timeout)


def _host(inspected: dict[str, Any]) -> Host:
    # podman tells the address of a running host only; the command that made it tells it always
    made_by = inspected["Config"]["CreateCommand"]
    return Host(
        name=inspected["Name"],
        address=made_by[made_by.index("--ip") + 1],
        state=inspected["State"]["Status"],
        started=inspected["State"]["StartedAt"],
        spec=Spec(**json.loads(inspected["Config"]["Labels"][LABEL])),
    )


def _differences(found: Spec, wanted: Spec) -> str:
    return ", ".join(
        f"{name} {vars(found)[name]} (now wanted: {vars(wanted)[name]})"
        for name in vars(wanted)
        if vars(found)[name] != vars(wanted)[name]
    )


def mounts_below(mounts: str, folder: Path) -> list[str]:
    """Return the mount points in or at a folder, the deepest first; `mounts` is the text of /proc/mounts."""
    points = [
        re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), row.split()[1]) for row in mounts.splitlines()
    ]
    return sorted((p for p in points if Path(p) == folder or folder in Path(p).parents), reverse=True)


def wipe(paths: Paths) -> None:
    """Unmount and remove the cache and the run folder. All hosts must be gone."""
    for folder in (paths.cache, paths.run):
        for point in mounts_below(Path("/proc/mounts").read_text(encoding="utf-8"), folder):
            shell.output(shell.as_root(["umount", point]))
        shell.output(shell.as_root(["rm", "-rf", "--one-file-system", str(folder)]))
