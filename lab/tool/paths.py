"""Where the lab keeps what: one cache folder, one folder under /run, nothing else on the machine."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.tool.errors import LabError

MARKER = ".tandem-lab"
"""A file that says: this folder is the lab's. Without it nothing is written there and `clean` removes nothing."""


@dataclass(frozen=True)
class Paths:
    """All places of one lab. Two caches are two labs, with their own hosts, network and address range."""

    repo: Path
    cache: Path

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> "Paths":
        """Return the places of this checkout.

        TANDEM_LAB_CACHE names the cache; default: `tandem-lab` in XDG_CACHE_HOME, or in ~/.cache.
        """
        chosen = environ.get("TANDEM_LAB_CACHE", "")
        base = environ.get("XDG_CACHE_HOME", "") or str(Path.home() / ".cache")
        cache = Path(chosen) if chosen else Path(base) / "tandem-lab"
        return cls(repo=Path(__file__).resolve().parents[2], cache=cache.expanduser().resolve())

    @property
    def key(self) -> str:
        """Eight hex digits that tell this lab's network and run folder from another lab's on the same machine."""
        return hashlib.sha256(str(self.cache).encode()).hexdigest()[:8]

    @property
    def run(self) -> Path:
        """State that must not outlive a reboot of the machine (podman decides by it what still runs)."""
        return Path("/run") / f"tandem-lab-{self.key}"

    @property
    def ssh(self) -> Path:
        """The lab's own keys: who logs in (`login`), who answers (`host`), and the known_hosts that joins them."""
        return self.cache / "ssh"

    @property
    def images(self) -> Path:
        """Root file systems of lab hosts as tar files, named after the content of their recipe."""
        return self.cache / "images"

    @property
    def podman(self) -> Path:
        """Podman's settings and networks for the lab. The user's own are neither read nor changed."""
        return self.cache / "podman"

    @property
    def storage(self) -> Path:
        """Podman's image and container storage (owned by root)."""
        return self.cache / "storage"

    @property
    def hosts(self) -> Path:
        """What single hosts wrote over the shared /opt/tandem (owned by root); goes with the host."""
        return self.cache / "hosts"

    @property
    def logs(self) -> Path:
        """Output of long steps, one file a step."""
        return self.cache / "logs"

    @property
    def installed(self) -> Path:
        """Names of the Debian packages that the lab has installed, one a line."""
        return self.cache / "debian-packages"

    @property
    def venv(self) -> Path:
        """The control node's tools."""
        return self.repo / ".venv"

    @property
    def lock(self) -> Path:
        """The control node's lock file."""
        return self.repo / "requirements" / "control.txt"

    @property
    def models(self) -> Path:
        """The models that every lab host sees read-only at /srv/models."""
        return self.repo / "lab" / "models"

    @property
    def inventory(self) -> Path:
        """The inventory whose generated part `lab inventory` writes by default."""
        return self.repo / "inventory" / "lab"

    def opt(self, suite: str) -> Path:
        """Return the shared /opt/tandem of one Debian release: its Python decides what the runtimes link to."""
        return self.cache / "opt" / suite

    def claim(self) -> None:
        """Make the cache folder and mark it as the lab's.

        Raises LabError if the folder holds somebody else's files.
        """
        if not (self.cache / MARKER).exists():
            if self.cache.exists() and any(self.cache.iterdir()):
                raise LabError(
                    f"{self.cache} holds files that are not the lab's (no {MARKER} in it); expected an empty or new"
                    " folder. Name another one in TANDEM_LAB_CACHE."
                )
            self.cache.mkdir(parents=True, exist_ok=True)
            (self.cache / MARKER).write_text(
                "This folder is Tandem's lab cache. `make clean` removes it.\n", encoding="utf-8"
            )
        for folder in (self.ssh, self.images, self.podman / "networks", self.logs):
            folder.mkdir(parents=True, exist_ok=True)
