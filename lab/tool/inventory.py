"""The generated part of an inventory: how Ansible reaches a lab host, and where that host gets packages from."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from lab.tool import image
from lab.tool.errors import LabError
from lab.tool.hosts import Host, Lab

PYPI = "https://pypi.org/simple"
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
"""Environment variables that name this machine's package index, the first set one wins (uv's order, then pip's)."""
CA_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")
"""Environment variables that name this machine's CA bundle, the first set one wins."""


def package_index(environ: Mapping[str, str] = os.environ) -> str:
    """Return the URL of the package index that this machine uses; default: PyPI."""
    return next((environ[name] for name in INDEX_VARIABLES if environ.get(name)), PYPI)


def ca_file(environ: Mapping[str, str] = os.environ) -> str:
    """Return the CA bundle that this machine's environment names, or "" (the ordinary public ones will do).

    Raises LabError if the named file does not exist.
    """
    for name in CA_VARIABLES:
        if environ.get(name):
            if not Path(environ[name]).is_file():
                raise LabError(f"{name} names {environ[name]}, which is no file; unset it or name a CA bundle")
            return environ[name]
    return ""


def host_vars(lab: Lab, host: Host, environ: Mapping[str, str] = os.environ) -> dict[str, str | int]:
    """Return the variables of one lab host, in the order in which they are written."""
    return {
        "ansible_host": host.address,
        "ansible_port": 22,
        "ansible_user": image.USER,
        "ansible_ssh_private_key_file": str(lab.paths.ssh / "login"),
        "ansible_ssh_common_args": " ".join(["-F", "none", *lab.ssh_options()]),
        "tandem_package_index_url": package_index(environ),
        "tandem_package_ca_file": ca_file(environ),
    }


def render(values: Mapping[str, str | int]) -> str:
    """Return the variables as YAML (each value a JSON scalar, which is YAML too)."""
    lines = [f"{name}: {json.dumps(value)}" for name, value in values.items()]
    return "\n".join(["---", "# Written by `lab/lab inventory`; not committed.", *lines, ""])


def write(lab: Lab, names: list[str], folder: Path) -> list[Path]:
    """Write `host_vars/NAME.yml` in an inventory folder for each host; return the files."""
    files = []
    for name in names:
        file = folder / "host_vars" / f"{name}.yml"
        text = render(host_vars(lab, lab.host(name)))
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
        files.append(file)
    return files
