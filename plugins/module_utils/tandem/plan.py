"""The plan of a host: everything that roles need to know, derived once from the inventory.

Roles read the plan (the fact `tandem_plan`) and their own tunables, nothing else. It holds no secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from . import routers, servers
from .paths import HOMES, KERNELS, MODELS, RELEASES, RUNTIMES
from .releases import HELPER, PLACEHOLDER
from .split import Row

# Seconds that an engine whose scheduler crashed lingers before it dies (on an H200: 5 s + 60 s for core dumps).
CRASH_LINGER: Final = 65
# Seconds between the last request of a PD role and its end (SIGTERM poll of 5 s, then 15 s for the schedulers).
STOP_LINGER: Final = 25


@dataclass(frozen=True)
class Engine:
    """An engine release as the directories under engines/ describe it. `directory` is on the control node."""

    name: str
    directory: str
    data: Mapping[str, Any]
    lock: str

    @property
    def runtime_id(self) -> str:
        """Changes with the lock, so that a runtime is never edited in place."""
        return f"{self.name}-{hashlib.sha256(self.lock.encode()).hexdigest()[:8]}"

    @property
    def runtime_path(self) -> str:
        return f"{RUNTIMES}/{self.runtime_id}"

    def runtime(self, kinds: Sequence[str], device: str) -> dict[str, Any]:
        """The runtime as the plan carries it, with the Debian packages that it needs on that device."""
        packages = list(self.data["packages"])
        if device == "cuda":
            packages += self.data.get("packages_cuda", [])
        return {
            "id": self.runtime_id,
            "engine": self.name,
            "lock": f"{self.directory}/requirements.lock",
            "path": self.runtime_path,
            "kinds": list(kinds),
            "import_check": self.data["import_check"],
            "packages": packages,
            "disk_gib": self.data.get("disk_gib", 0),
        }


def model(settings: Mapping[str, Any]) -> dict[str, str]:
    """Where the model's revision lies on a host."""
    name, revision = settings["tandem_model_name"], settings["tandem_model_revision"]
    return {"name": name, "revision": revision, "path": f"{MODELS}/{name}/{revision}"}


def server(
    row: Row, rows: Sequence[Row], settings: Mapping[str, Any], engine: Engine, kernels: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The plan of one prefill or decode instance."""
    path = model(settings)["path"]
    address = settings["tandem_address"]
    mine = [kernel for kernel in kernels if row.role in kernel["roles"]]
    url = f"http://{address}:{row.port}"
    ready = [{"url": url + engine.data["ready_path"], "fields": {}}]
    if row.bootstrap_port is not None:
        # 200 only once every rank registered; its port tells ours from another instance's bootstrap server.
        route = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
        ready.append(
            {"url": f"http://{address}:{row.bootstrap_port}{route}", "fields": {"prefill_http_port": row.port}}
        )
    return {
        **_common(row.name, row.role, settings),
        "url": url,
        "address": address,
        "port": row.port,
        "ports": [
            {
                "port": port,
                "address": "127.0.0.1" if port == row.telemetry_port else address,
                "instance": row.name,
                "use": use,
            }
            for use, port in row.ports().items()
        ],
        "gpus": list(row.gpus),
        "numa_node": row.numa_node,
        "argv": [f"{engine.runtime_path}/bin/python", *engine.data["entry"], *servers.argv(row, rows, settings, path)],
        "env": servers.environment(row, rows, settings, kernels, engine.runtime_path),
        "ready": ready,
        "start_timeout": settings["tandem_start_timeout"],
        "stop_timeout": settings["tandem_request_timeout"] + STOP_LINGER,
        "needs": [engine.runtime_path, path, *(f"{KERNELS}/{kernel['id']}" for kernel in mine)],
    }


def router(
    settings: Mapping[str, Any], engine: Engine, server: Engine, workers: Sequence[routers.Worker]
) -> dict[str, Any]:
    """The plan of a host's router, in front of servers of the release `server`."""
    host, port = settings["router_host"], settings["router_port"]
    name, key = "router", settings["router_control_plane_key"]
    return {
        **_common(name, "router", settings),
        # The key itself is never part of a plan; its digest makes another key another release.
        "key_sha256": hashlib.sha256(key.encode()).hexdigest() if key else "",
        "url": f"http://{routers.reachable(host)}:{port}",
        "address": host,
        "port": port,
        "ports": [
            {"port": port, "address": host, "instance": name, "use": "port"},
            {
                "port": settings["router_metrics_port"],
                "address": settings["router_metrics_host"],
                "instance": name,
                "use": "metrics port",
            },
        ],
        "gpus": [],
        "numa_node": None,
        "argv": [
            f"{engine.runtime_path}/bin/python",
            *_router_entry(engine, key),
            *routers.argv(settings, engine.data, server.data, workers),
        ],
        "env": {
            "HOME": f"{HOMES}/{name}",
            "PATH": f"{engine.runtime_path}/bin:/usr/local/bin:/usr/bin:/bin",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
        },
        # The router is ready when it listens: it registers workers whenever they come.
        "ready": [{"url": f"http://{routers.reachable(host)}:{port}/liveness", "fields": {}}],
        "start_timeout": settings["router_start_timeout"],
        "stop_timeout": routers.stop_timeout(settings) + STOP_LINGER,
        "needs": [engine.runtime_path],
    }


def _router_entry(engine: Engine, key: str) -> list[str]:
    """With a key, the release's helper starts the same module in-process, so that no command line ever held the key."""
    if not key:
        return list(engine.data["entry"])
    return [f"{RELEASES}/router/{PLACEHOLDER}/{HELPER}", "with-key", engine.data["entry"][-1]]


def _common(name: str, kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    # Each failed start takes at most a load, the minute that the engine lived, its lingering and the delay.
    cycle = settings["tandem_start_timeout"] + 60 + CRASH_LINGER + settings["tandem_restart_delay"]
    return {
        "name": name,
        "kind": kind,
        "unit": f"tandem-{name}.service",
        "user": f"tandem-{name}",
        "home": f"{HOMES}/{name}",
        "device": settings["tandem_device"] if kind != "router" else "",
        "restart_delay": settings["tandem_restart_delay"],
        "start_limit_burst": settings["tandem_start_limit_burst"],
        "start_limit_interval": settings["tandem_start_limit_burst"] * cycle,
        "limit_nofile": settings["tandem_limit_nofile"],
        "limit_memlock": settings["tandem_limit_memlock"],
        "limit_core": settings["tandem_limit_core"],
    }
