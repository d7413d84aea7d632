"""Releases of an instance on its host: what one holds, how it is staged, which one is current, which one runs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .paths import RELEASES, RUN, UNITS
from .problems import TandemError
from .unitfile import environment_file

PLACEHOLDER: Final = "@RELEASE@"
HELPER: Final = "unit_helper.py"


@dataclass(frozen=True)
class Release:
    """One release, whole: file names to contents. `id` is of the contents, so equal releases are one."""

    instance: str
    id: str
    files: Mapping[str, str]

    @property
    def path(self) -> Path:
        return Path(RELEASES, self.instance, self.id)

    def staged(self) -> bool:
        """A directory of that name is complete, since it was renamed into place."""
        return self.path.is_dir()

    def text(self) -> str:
        """What an operator wants to see of it in a diff."""
        return _text(self.files, self.instance)


def build(instance: Mapping[str, Any], unit: str, helper: str, gpu_addresses: Mapping[str, str]) -> Release:
    """The release of a planned instance. `unit` is its rendered unit with PLACEHOLDER for the id."""
    name = instance["name"]
    env = environment_file(instance["env"])
    manifest = {
        "instance": name,
        "kind": instance["kind"],
        "user": instance["user"],
        "unit": instance["unit"],
        "argv_sha256": _sha256("\0".join(instance["argv"])),
        "env_sha256": _sha256(env),
        "needs": instance["needs"],
        "ports": instance["ports"],
        "gpu_addresses": dict(gpu_addresses),
        "ready": instance["ready"],
        "key_sha256": instance.get("key_sha256", ""),
    }
    identity = _sha256(json.dumps([manifest, unit, env, instance["argv"], helper], sort_keys=True))[:12]
    files = {
        instance["unit"]: unit.replace(PLACEHOLDER, identity),
        "env": env,
        "argv": "\n".join(instance["argv"]).replace(PLACEHOLDER, identity) + "\n",
        "manifest.json": json.dumps({"release": identity, **manifest}, indent=1, sort_keys=True) + "\n",
        HELPER: helper,
    }
    return Release(name, identity, files)


def stage(release: Release) -> None:
    """Writes the release beside, then renames it into place. All may read it: it holds no secret."""
    partial = release.path.with_name(f".{release.id}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    for folder in (partial.parent, partial):
        folder.chmod(0o755)  # whatever root's umask is
    for name, content in release.files.items():
        file = partial / name
        file.write_text(content)
        file.chmod(0o644)
    partial.rename(release.path)


def load(instance: str, release: str) -> Release:
    """A staged release. Raises TandemError where it is not there."""
    path = Path(RELEASES, instance, release)
    if not path.is_dir():
        raise TandemError(
            f"release {release} of {instance}: found no directory {path}; expected one. Deploy to stage it."
        )
    return Release(
        instance, release, {file.name: file.read_text() for file in sorted(path.iterdir()) if file.is_file()}
    )


def current(instance: str) -> str | None:
    """The release that `current` points to."""
    link = Path(RELEASES, instance, "current")
    return str(link.readlink()) if link.is_symlink() else None


def current_text(instance: str) -> str:
    """The current release as text for a diff, empty where there is none."""
    name = current(instance)
    if name is None or not Path(RELEASES, instance, name).is_dir():
        return ""
    return load(instance, name).text()


def point(instance: str, release: str) -> None:
    """Switches `current` atomically."""
    link = Path(RELEASES, instance, "current")
    partial = link.with_name(".current.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(release)
    partial.rename(link)


def unit_installed(instance: str, release: str) -> bool:
    """Whether the unit file that systemd reads is the release's own."""
    installed = Path(UNITS, f"tandem-{instance}.service")
    staged = Path(RELEASES, instance, release, installed.name)
    return installed.is_file() and staged.is_file() and installed.read_text() == staged.read_text()


def collect(instance: str, keep: int) -> list[str]:
    """Removes the oldest releases above `keep`; never the current or the running one. Returns what was removed."""
    root = Path(RELEASES, instance)
    held = {current(instance), (record(instance) or {}).get("release")}
    found = sorted(
        (path for path in root.iterdir() if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    removed = [path for path in found[keep:] if path.name not in held]
    for path in removed:
        shutil.rmtree(path)
    return [path.name for path in removed]


def record(instance: str) -> dict[str, Any] | None:
    """The start record of what runs now, or None: no record, or its process is gone (PID, start time, boot)."""
    try:
        found: dict[str, Any] = json.loads(Path(RUN, instance, "record.json").read_text())
        stat = Path(f"/proc/{found['main_pid']}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, ValueError, KeyError):
        return None
    ticks = int(stat.rpartition(")")[2].split()[19])
    return found if (ticks, boot) == (found["start_ticks"], found["boot_id"]) else None


def _text(files: Mapping[str, str], instance: str) -> str:
    shown = (f"tandem-{instance}.service", "env")
    return "".join(f"### {name}\n{files.get(name, '')}" for name in shown)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
