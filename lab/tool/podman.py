"""Podman with the lab's own settings, storage and network. The user's podman is neither read nor changed."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lab.tool import shell
from lab.tool.errors import LabError
from lab.tool.paths import Paths

NETWORK = "tandem-lab"
LABEL = "tandem.lab"
"""The label of a lab host's container; it holds how the host was made, as JSON."""
LIMIT_MAX = 1048576
"""What podman asks for by itself for open files; a machine with a lower hard limit refuses that."""

# runc: crun refuses machines with hybrid cgroups. Locks in files and a tmp_dir of our own: podman's default is one
# lock table for all storages of a user. cgroupfs: works with and without systemd as the machine's init.
_CONTAINERS_CONF = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "{run}/tmp"

[network]
network_backend = "netavark"
network_config_dir = "{podman}/networks"
"""
_STORAGE_CONF = """\
[storage]
driver = "overlay"
graphroot = "{storage}"
runroot = "{run}/run"
"""


def limit(hard: str, ceiling: int) -> int:
    """Return the limit to ask for, from what `ulimit -H` prints: a number or `unlimited`."""
    return ceiling if hard.strip() == "unlimited" else min(ceiling, int(hard))


def subnets(key: str) -> list[str]:
    """Return the address ranges to try, in an order of this lab's own: 10.89.1.0/24 to 10.89.250.0/24."""
    first = int(key, 16) % 250
    return [f"10.89.{1 + (first + step) % 250}.0/24" for step in range(250)]


def default_route_mtu(routes: str, net: Path = Path("/sys/class/net")) -> int | None:
    """Return the MTU of the device of the default route, if it is below Ethernet's 1500; `routes`: /proc/net/route."""
    for row in routes.splitlines()[1:]:
        device, destination = row.split()[:2]
        if destination == "00000000":
            mtu = int((net / device / "mtu").read_text(encoding="utf-8"))
            return mtu if mtu < 1500 else None
    return None


@dataclass(frozen=True)
class Podman:
    """Calls of podman for one lab."""

    paths: Paths

    def configure(self) -> None:
        """Write the settings files; cheap, so done before every use."""
        places = {"run": self.paths.run, "podman": self.paths.podman, "storage": self.paths.storage}
        for name, text in (("containers.conf", _CONTAINERS_CONF), ("storage.conf", _STORAGE_CONF)):
            wanted = text.format(**places)
            file = self.paths.podman / name
            if not file.exists() or file.read_text(encoding="utf-8") != wanted:
                file.write_text(wanted, encoding="utf-8")

    def command(self, *arguments: str) -> list[str]:
        """Return a podman call, as root, with the lab's settings."""
        return shell.as_root(
            ["podman", *arguments],
            {
                "CONTAINERS_CONF": str(self.paths.podman / "containers.conf"),
                "CONTAINERS_STORAGE_CONF": str(self.paths.podman / "storage.conf"),
                "PODMAN_IGNORE_CGROUPSV1_WARNING": "1",
            },
        )

    def call(self, *arguments: str, timeout: float = 120.0) -> str:
        """Run podman and return its stdout; raises LabError with its stderr."""
        return shell.output(self.command(*arguments), timeout=timeout)

    def has_image(self, tag: str) -> bool:
        """Tell whether an image of this name is in the lab's storage."""
        return shell.succeeds(self.command("image", "exists", tag))

    def import_image(self, tar: Path, tag: str) -> None:
        """Import a root file system; drop the lab's images that no host uses any more."""
        shell.long_step(
            self.command("import", "--quiet", "--change", 'CMD ["/sbin/init"]', str(tar), tag),
            f"podman import {tar.name}",
            self.paths.logs / "podman-import.log",
        )
        for image in json.loads(self.call("image", "ls", "--format", "json")):
            names = image.get("Names") or []
            suite = tag.rsplit(":", 1)[-1].split("-", maxsplit=1)[0]
            if tag not in names and image.get("Containers", 0) == 0 and any(f":{suite}-" in name for name in names):
                self.call("rmi", image["Id"])

    @cached_property
    def limits(self) -> list[str]:
        """The --ulimit options: podman's own wishes, cut to the hard limits that root has on this machine.

        Podman lowers its own limit of processes to kernel.pid_max, so no container can have more.
        """
        hard_files, hard_processes = shell.output(shell.as_root(["bash", "-c", "ulimit -Hn; ulimit -Hu"])).split()
        files = limit(hard_files, LIMIT_MAX)
        processes = limit(hard_processes, int(Path("/proc/sys/kernel/pid_max").read_text(encoding="utf-8")))
        return [f"--ulimit=nofile={files}:{files}", f"--ulimit=nproc={processes}:{processes}"]

    def ensure_network(self) -> str:
        """Have the lab's bridge network; return its subnet. Call it under the lab's lock."""
        if not shell.succeeds(self.command("network", "exists", NETWORK)):
            mtu = default_route_mtu(Path("/proc/net/route").read_text(encoding="utf-8"))
            options = ["--opt", f"mtu={mtu}"] if mtu else []
            for subnet in subnets(self.paths.key):
                try:
                    self.call("network", "create", *options, "--subnet", subnet, NETWORK)
                    break
                except LabError as error:
                    # podman's words for a range that the machine or another network has
                    if not re.search(r"already (being )?used", str(error)):
                        raise
            else:
                raise LabError("no free range in 10.89.0.0/16 for the lab's bridge; `ip route` shows who has them")
            self._name_bridge()
        network = json.loads(self.call("network", "inspect", NETWORK))[0]
        return str(network["subnets"][0]["subnet"])

    def _name_bridge(self) -> None:
        # Podman names bridges podman1, podman2 … and knows only those of this lab and those up at the moment, so two
        # labs would share one. `network create --interface-name` exists from podman 4.5 (Debian 12 has 4.3).
        file = self.paths.podman / "networks" / f"{NETWORK}.json"
        settings = json.loads(shell.output(shell.as_root(["cat", str(file)])))
        settings["network_interface"] = f"lab-{self.paths.key}"
        shell.output(shell.as_root(["tee", str(file)]), text_in=json.dumps(settings, indent=1) + "\n")

    def containers(self) -> list[dict[str, Any]]:
        """Return every host of the lab as podman's inspect shows it, by name."""
        names = self.call("ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}").split()
        return json.loads(self.call("container", "inspect", *sorted(names))) if names else []

    def container(self, name: str) -> dict[str, Any] | None:
        """Return one host as podman's inspect shows it, or None."""
        return next((one for one in self.containers() if one["Name"] == name), None)

    def run_detached(self, arguments: Sequence[str]) -> None:
        """Start a container in the background."""
        self.call("run", "--detach", *self.limits, *arguments)
