"""Inventories for tests, read by Ansible itself, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager
from tandem_inventory import Inventory

ROOT = Path(__file__).resolve().parents[2]

PAIR: list[dict[str, Any]] = [
    {"name": "prefill-0", "role": "prefill", "gpus": [0, 1], "numa_node": 0, "port": 30001, "bootstrap_port": 8998},
    {"name": "decode-0", "role": "decode", "gpus": [2, 3], "numa_node": 1, "port": 30002},
]
SOUND: dict[str, Any] = {
    "tandem_instances": PAIR,
    "tandem_model_name": "a-model",
    "tandem_model_revision": "r1",
    "model_sync_source": "/srv/models/a-model",
    "model_sync_manifest": "README.md",
}


def write(folder: Path, hosts: dict[str, dict[str, Any]], gpu: list[str], router: list[str], **fleet: Any) -> Path:
    """An inventory of `hosts` (their variables), with the fleet's variables in group_vars/all.yml."""
    children = {"tandem_gpu": gpu, "tandem_router": router}
    groups = {name: {"hosts": {host: hosts[host] for host in members}} for name, members in children.items()}
    (folder / "group_vars").mkdir(parents=True, exist_ok=True)
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}))
    (folder / "group_vars" / "all.yml").write_text(yaml.safe_dump(fleet))
    return folder


def one(folder: Path, **changes: Any) -> Path:
    """One host that is everything, sound but for `changes`."""
    return write(folder, {"gpu1": {}}, ["gpu1"], ["gpu1"], **{**SOUND, **changes})


def plan(
    inventory: Path, host: str = "gpu1", extra: dict[str, Any] | None = None, check_files: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """The plan and the warnings of a host, as the first play makes them."""
    loader = DataLoader()
    loader.set_basedir(str(ROOT))
    hosts = InventoryManager(loader, sources=[str(inventory)])
    manager = VariableManager(loader, hosts)
    manager._extra_vars = extra or {}
    manager.set_inventory(hosts)
    HostVars(hosts, manager, loader)
    variables = manager.get_vars(host=hosts.get_host(host), include_hostvars=True)
    made: tuple[dict[str, Any], list[str]] = Inventory(loader, variables, check_files).plan(host)
    return made
