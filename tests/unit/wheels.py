"""Tiny wheels, and a package index of them on disk: what uv needs to install without a network."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    *,
    tag: str = "py3-none-any",
    requires: Sequence[str] = (),
    scripts: Mapping[str, str] | None = None,
) -> Path:
    """A wheel of text files. `scripts` are console scripts, name to `module:function`."""
    info = f"{name}-{version}.dist-info"
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {it}" for it in requires),
    ]
    content = {
        **files,
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    if scripts:
        content[f"{info}/entry_points.txt"] = "[console_scripts]\n" + "".join(
            f"{k} = {v}\n" for k, v in scripts.items()
        )
    record = [f"{path},sha256={_digest(text)},{len(text.encode())}" for path, text in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return wheel


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


class Index:
    """A package index in a folder, as PEP 503 has it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def url(self) -> str:
        return (self.root / "simple").as_uri()

    def add(self, wheel: Path) -> str:
        """Puts a wheel in, and returns the line of a lock for it."""
        name, version = wheel.name.split("-")[:2]
        page = self.root / "simple" / name.replace("_", "-") / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        before = page.read_text(encoding="utf-8") if page.exists() else "<!DOCTYPE html>\n"
        link = f'<a href="{wheel.as_uri()}#sha256={sha256(wheel)}">{wheel.name}</a>\n'
        page.write_text(before + link, encoding="utf-8")
        return f"{name.replace('_', '-')}=={version} --hash=sha256:{sha256(wheel)}\n"
