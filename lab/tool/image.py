"""The root file system of a lab host: made from Debian's packages, kept as a tar file, imported into podman."""

import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.tool import shell
from lab.tool.errors import LabError
from lab.tool.paths import Paths
from lab.tool.podman import Podman

SUITES = {"bookworm": "Debian 12", "trixie": "Debian 13"}
"""Debian releases that a lab host can be."""
MIRROR = "http://deb.debian.org"
"""Where Debian's packages come from; TANDEM_LAB_DEBIAN_MIRROR names another one."""
USER = "operator"
"""Who Ansible logs in as: no password, one key, sudo without a question."""
HOST_ALIAS = "tandem-lab"
"""The name under which ssh knows every lab host: they share one host key, addresses come and go."""

PACKAGES = (
    "ca-certificates",
    "curl",
    "dbus",
    "iproute2",
    "kmod",
    "numactl",
    "openssh-server",
    "procps",
    "python3",
    "python3-apt",
    "python3-venv",
    "sudo",
    "systemd-sysv",
    "util-linux",
)
"""What a small Debian server has, and what the lab needs to act as one. The engine's packages come by the roles."""

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

# Runs in mmdebstrap after the packages are in; $1 is the root file system.
_FINISH = """\
chroot "$1" useradd --create-home --uid 1000 --gid operator --shell /bin/bash {user}
echo '{user} ALL=(ALL) NOPASSWD: ALL' > "$1/etc/sudoers.d/{user}"
chmod 0440 "$1/etc/sudoers.d/{user}"
install -d -m 0700 -o 1000 "$1/home/{user}/.ssh"
echo {login} > "$1/home/{user}/.ssh/authorized_keys"
chown 1000 "$1/home/{user}/.ssh/authorized_keys"
rm -f "$1"/etc/ssh/ssh_host_*
cp {ssh}/host "$1/etc/ssh/ssh_host_ed25519_key"
cp {ssh}/host.pub "$1/etc/ssh/ssh_host_ed25519_key.pub"
chown 0:0 "$1"/etc/ssh/ssh_host_*
printf 'PasswordAuthentication no\\nPermitRootLogin no\\nUseDNS no\\n' > "$1/etc/ssh/sshd_config.d/lab.conf"
chroot "$1" systemctl mask --quiet apt-daily.timer apt-daily-upgrade.timer systemd-networkd-wait-online.service
rm -f "$1/etc/machine-id" "$1/etc/hostname"
: > "$1/etc/machine-id"
"""


@dataclass(frozen=True)
class Recipe:
    """All that decides what the image holds; its digest is the image's name."""

    suite: str
    sources: tuple[str, ...]
    packages: tuple[str, ...]
    finish: str
    host_key: str

    @property
    def digest(self) -> str:
        """Twelve hex digits of the recipe's content."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def tag(self) -> str:
        """The image's name in podman."""
        return f"localhost/tandem-lab:{self.suite}-{self.digest}"

    @property
    def file_name(self) -> str:
        """The tar file's name."""
        return f"{self.suite}-{self.digest}.tar"


def recipe(paths: Paths, suite: str, environ: Mapping[str, str] = os.environ) -> Recipe:
    """Return the recipe of one Debian release, with the keys of this lab (made if they are missing)."""
    if suite not in SUITES:
        raise LabError(f"unknown image {suite!r}; expected one of {', '.join(SUITES)}")
    make_keys(paths)
    mirror = environ.get("TANDEM_LAB_DEBIAN_MIRROR", "") or MIRROR
    by = f"deb [signed-by={KEYRING}] {mirror}"
    return Recipe(
        suite=suite,
        sources=(
            f"{by}/debian {suite} main",
            f"{by}/debian {suite}-updates main",
            f"{by}/debian-security {suite}-security main",
        ),
        packages=PACKAGES,
        finish=_FINISH.format(
            user=USER,
            login=shlex.quote((paths.ssh / "login.pub").read_text(encoding="utf-8").strip()),
            ssh=shlex.quote(str(paths.ssh)),
        ),
        host_key=(paths.ssh / "host.pub").read_text(encoding="utf-8").strip(),
    )


def make_keys(paths: Paths) -> None:
    """Make the lab's two ssh keys and its known_hosts, unless they are there."""
    for name in ("login", "host"):
        if not (paths.ssh / f"{name}.pub").exists():
            (paths.ssh / name).unlink(missing_ok=True)
            shell.output(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"tandem-lab-{name}", "-f", str(paths.ssh / name)]
            )
    kind, key = (paths.ssh / "host.pub").read_text(encoding="utf-8").split()[:2]
    (paths.ssh / "known_hosts").write_text(f"{HOST_ALIAS} {kind} {key}\n", encoding="utf-8")


def build_command(wanted: Recipe, finish: Path, target: Path) -> list[str]:
    """Return the mmdebstrap call that writes the root file system to `target`."""
    return shell.as_root(
        [
            "mmdebstrap",
            "--mode=root",
            "--variant=minbase",
            f"--include={','.join(wanted.packages)}",
            f'--customize-hook=sh -eu {shlex.quote(str(finish))} "$1"',
            "--dpkgopt=force-unsafe-io",
            "--skip=output/dev",
            "--format=tar",
            wanted.suite,
            str(target),
            *wanted.sources,
        ],
    )


def ensure(paths: Paths, podman: Podman, suite: str) -> tuple[Recipe, str]:
    """Have the image in podman; return its recipe and a one-line account. Call it under the lab's lock."""
    wanted = recipe(paths, suite)
    if podman.has_image(wanted.tag):
        return wanted, f"{wanted.tag}, cached"
    tar = paths.images / wanted.file_name
    account = f"{wanted.tag}, from {tar.name}"
    if not tar.exists():
        part = tar.with_suffix(".part")
        finish = paths.images / "finish.sh"
        finish.write_text(wanted.finish, encoding="utf-8")
        shell.long_step(
            build_command(wanted, finish, part),
            f"{SUITES[suite]} from {wanted.sources[0].split()[2]}",
            paths.logs / f"image-{suite}.log",
        )
        shell.output(shell.as_root(["mv", str(part), str(tar)]))
        account = f"{wanted.tag}, built"
    podman.import_image(tar, wanted.tag)
    for old in paths.images.glob(f"{suite}-*"):
        if old != tar:
            shell.output(shell.as_root(["rm", str(old)]))
    return wanted, account
