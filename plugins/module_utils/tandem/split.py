"""The split of a host: its rows, the ports that derive from them, and how a set of GPUs is named to the engine."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .problems import Problem

# 29 characters after `tandem-` still make a legal user name (useradd(8): 32).
NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,24}")
# Below these the derived ports would leave the unprivileged range.
LOWEST_PORT: Final = 1024 + 3000
TELEMETRY_OFFSET: Final = -3000
NCCL_OFFSET: Final = -2000
DIST_INIT_OFFSET: Final = -1000


@dataclass(frozen=True)
class Row:
    """One instance of a host as the operator declares it. `gpus` are nvidia-smi indices in the order of TP ranks."""

    name: str
    role: str
    gpus: tuple[int, ...]
    numa_node: int
    port: int
    bootstrap_port: int | None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Row:
        return cls(
            name=row["name"],
            role=row["role"],
            gpus=tuple(row.get("gpus") or ()),
            numa_node=row["numa_node"],
            port=row["port"],
            bootstrap_port=row.get("bootstrap_port"),
        )

    @property
    def nccl_port(self) -> int:
        """Pinned, since the engine's own choice is random in 22000-29999 and may hit another service."""
        return self.port + NCCL_OFFSET

    @property
    def dist_init_port(self) -> int:
        return self.port + DIST_INIT_OFFSET

    @property
    def telemetry_port(self) -> int:
        """Where NIXL itself says how many bytes a prefill sent. On loopback only: NIXL binds that or every address."""
        return self.port + TELEMETRY_OFFSET

    def ports(self) -> dict[str, int]:
        """Every port that the instance listens on, by what it is for."""
        named = {"port": self.port, "NCCL port": self.nccl_port, "dist-init port": self.dist_init_port}
        if self.bootstrap_port is not None:
            named["bootstrap_port"] = self.bootstrap_port
        if self.role == "prefill":
            named["NIXL telemetry port"] = self.telemetry_port
        return named


def check_rows(rows: Sequence[Row], device: str, where: Callable[[str], str]) -> list[Problem]:
    """Faults of a host's split that the inventory alone shows. `where` names the place of `[1].gpus` and the like."""
    problems: list[Problem] = []
    for index, row in enumerate(rows):
        problems += _check_row(row, device, lambda key, index=index: where(f"[{index}].{key}"))  # type: ignore[misc]
    problems += [
        Problem(where(""), f"the name {name} {len(owners)} times", "unique names")
        for name, owners in _shared((row.name, row.name) for row in rows)
    ]
    return problems + [
        Problem(where(""), f"GPU {gpu} in {' and '.join(owners)}", "each GPU in one instance")
        for gpu, owners in _shared((gpu, row.name) for row in rows for gpu in row.gpus)
    ]


def check_ports(listeners: Iterable[tuple[int, str, str]], where: str) -> list[Problem]:
    """Two listeners of one host on one port. `listeners` are (port, instance, what for)."""
    by_port: dict[int, list[tuple[str, str]]] = {}
    for port, instance, use in listeners:
        by_port.setdefault(port, []).append((instance, use))
    problems: dict[tuple[str, ...], Problem] = {}
    for port, owners in by_port.items():
        # Two instances with one HTTP port share the derived ports too: say it once.
        if len(owners) > 1:
            problems.setdefault(
                tuple(sorted(instance for instance, _use in owners)),
                Problem(
                    where,
                    f"port {port} for {' and '.join(f'{instance} ({use})' for instance, use in owners)}",
                    "unique ports on a host (dist-init, NCCL, NIXL telemetry: the HTTP port less 1000, 2000, 3000)",
                ),
            )
    return list(problems.values())


def _check_row(row: Row, device: str, where: Callable[[str], str]) -> Iterable[Problem]:
    if not NAME.fullmatch(row.name) or row.name == "router":
        expected = "lower-case letters, digits and dashes, 25 at most, not 'router'"
        yield Problem(where("name"), repr(row.name), expected)
    if row.role == "prefill" and row.bootstrap_port is None:
        yield Problem(where("bootstrap_port"), "none", "a port: a prefill serves the KV bootstrap")
    if row.role == "decode" and row.bootstrap_port is not None:
        yield Problem(where("bootstrap_port"), str(row.bootstrap_port), "none: it belongs to a prefill")
    if device == "cuda" and not row.gpus:
        yield Problem(where("gpus"), "no GPU", "at least one, or tandem_device: cpu")
    if device == "cpu" and row.gpus:
        yield Problem(where("gpus"), str(list(row.gpus)), "none, since tandem_device is cpu")
    if any(gpu < 0 for gpu in row.gpus):
        yield Problem(where("gpus"), str(list(row.gpus)), "indices from 0")
    if row.numa_node < 0:
        yield Problem(where("numa_node"), str(row.numa_node), "a NUMA node from 0")
    if not LOWEST_PORT <= row.port <= 65535:
        yield Problem(where("port"), str(row.port), f"{LOWEST_PORT} to 65535")
    if row.bootstrap_port is not None and not 1024 <= row.bootstrap_port <= 65535:
        yield Problem(where("bootstrap_port"), str(row.bootstrap_port), "1024 to 65535")


def _shared(pairs: Iterable[tuple[Any, str]]) -> list[tuple[Any, list[str]]]:
    """The keys that more than one owner has, with their owners."""
    owners: dict[Any, list[str]] = {}
    for key, owner in pairs:
        owners.setdefault(key, []).append(owner)
    return [(key, names) for key, names in sorted(owners.items()) if len(names) > 1]


def is_loopback(address: str) -> bool:
    """Whether an address is of this host only. Raises ValueError for what is no IP address."""
    return ipaddress.ip_address(address).is_loopback


@dataclass(frozen=True)
class GpuNaming:
    """How an instance's GPUs are told to the engine.

    A regular set (i, i+s, i+2s …) is a base id and a step with every GPU visible, which CUDA IPC to the peer's GPUs
    wants. An irregular one needs CUDA_VISIBLE_DEVICES: its own GPUs first, then all others, so that they are
    visible still; `order` is that list and `numa_nodes` follows it.
    """

    base_gpu_id: int
    gpu_id_step: int
    order: tuple[int, ...] | None
    numa_nodes: tuple[int, ...]


def name_gpus(row: Row, rows: Sequence[Row]) -> GpuNaming:
    """Names the GPUs of `row` on a host with `rows`.

    The engine indexes `--numa-node` by absolute GPU id (sglang utils/numa_utils.py:141), so the list covers every
    GPU id up to the host's last; a GPU of no instance gets the row's own node, which is never looked up.
    """
    node_of = {gpu: other.numa_node for other in rows for gpu in other.gpus}
    everyone = range(max(node_of) + 1)
    steps = {right - left for left, right in zip(row.gpus, row.gpus[1:], strict=False)} or {1}
    if len(steps) == 1 and min(steps) > 0:
        nodes = tuple(node_of.get(gpu, row.numa_node) for gpu in everyone)
        return GpuNaming(row.gpus[0], steps.pop(), None, nodes)
    order = (*row.gpus, *(gpu for gpu in everyone if gpu not in row.gpus))
    return GpuNaming(0, 1, order, tuple(node_of.get(gpu, row.numa_node) for gpu in order))
