"""Command line of the router, for either of the two router releases that Tandem knows (docs/router.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .flags import FlagSet
from .problems import Problem
from .split import is_loopback

_KEY: Final = re.compile(r"[A-Za-z0-9_-]{32,}")
OWNED: Final = {
    "--control-plane-api-keys": "router_control_plane_key",
    "--host": "router_host",
    "--port": "router_port",
    "--policy": "router_policy",
    "--prometheus-host": "router_metrics_host",
    "--prometheus-port": "router_metrics_port",
    "--pd-disaggregation": "nothing: that is what Tandem deploys",
    "--prefill": "tandem_instances of the hosts in tandem_gpu",
    "--decode": "tandem_instances of the hosts in tandem_gpu",
    "--request-timeout-secs": "tandem_request_timeout",
    "--retry-max-retries": "router_hold_timeout",
}


@dataclass(frozen=True, order=True)
class Worker:
    """A server that the router sends to. `host` is the inventory's name of its machine."""

    role: str
    host: str
    name: str
    address: str
    port: int
    bootstrap_port: int | None
    telemetry_port: int | None

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"


def argv(
    settings: Mapping[str, Any], router: Mapping[str, Any], server: Mapping[str, Any], workers: Sequence[Worker]
) -> list[str]:
    """The router's flags, in a fixed order. `router` and `server` are the data of both engine releases.

    docs/router.md measured and explains each of them.
    """
    hold, request = settings["router_hold_timeout"], settings["tandem_request_timeout"]
    words = [
        "--pd-disaggregation",
        *(word for worker in workers for word in _worker(worker)),
        *("--host", settings["router_host"]),
        *("--port", str(settings["router_port"])),
        *("--prometheus-host", settings["router_metrics_host"]),
        *("--prometheus-port", str(settings["router_metrics_port"])),
        *("--policy", settings["router_policy"]),
        *("--request-timeout-secs", str(request)),
        *("--shutdown-grace-period-secs", str(request + hold)),
        # The hold: HOLD waits of one second between HOLD + 1 tries.
        *("--retry-max-retries", str(hold + 1)),
        *("--retry-initial-backoff-ms", "1000"),
        *("--retry-max-backoff-ms", "1000"),
        *("--retry-backoff-multiplier", "1.0"),
        *("--retry-jitter-factor", "0.0"),
        "--disable-circuit-breaker",
        *_health(router, server),
        # Ten years: a worker that comes late is registered however late it comes.
        *("--worker-startup-timeout-secs", "315360000"),
        *("--worker-startup-check-interval", "1"),
    ]
    return [*words, *settings["router_extra_args"]]


def stop_timeout(settings: Mapping[str, Any]) -> int:
    """Seconds that a stop may take: held requests and streams are finished first."""
    return int(settings["tandem_request_timeout"] + settings["router_hold_timeout"])


def warnings(settings: Mapping[str, Any], router: Mapping[str, Any], workers: Sequence[Worker]) -> list[str]:
    """What is legal and fails requests."""
    decodes = [worker for worker in workers if worker.role == "decode"]
    if router.get("holds", True) or len(decodes) > 1:
        return []
    return [
        f"{settings['router_release']} answers 503 while the only decode is redeployed; sglang-router-0.3.2 holds"
        " requests meanwhile (docs/router.md)."
    ]


def check(settings: Mapping[str, Any], flags: FlagSet, origin: Mapping[str, str]) -> list[Problem]:
    """Faults in the router's settings."""
    where = origin["router_extra_args"]
    problems = flags.check(settings["router_extra_args"], where)
    for flag, _values in flags.split(settings["router_extra_args"]):
        if flag in OWNED:
            problems.append(
                Problem(where, f"{flag}, which Tandem renders itself", f"it left out; it follows {OWNED[flag]}")
            )
    problems += _check_key(settings, origin)
    problems += [
        Problem(origin["router_policy"], problem.found, problem.expected)
        for problem in flags.check(["--policy", settings["router_policy"]], "router_policy")
    ]
    return problems


def _check_key(settings: Mapping[str, Any], origin: Mapping[str, str]) -> list[Problem]:
    host, key = settings["router_host"], settings["router_control_plane_key"]
    try:
        loopback = is_loopback(host)
    except ValueError:
        return [Problem(origin["router_host"], repr(host), "an IP address of this host")]
    if not key and not loopback:
        expected = f"one, since router_host is {host} and clients share the port of the worker API"
        return [Problem(origin["router_control_plane_key"], "no key", expected)]
    if key and not _KEY.fullmatch(key):
        return [Problem(origin["router_control_plane_key"], f"a key of {len(key)} characters", f"{_KEY.pattern}")]
    return []


def reachable(host: str) -> str:
    """An address at which a client on the router's own host reaches it."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - 2026-12-01: compared, not bound


def _health(router: Mapping[str, Any], server: Mapping[str, Any]) -> list[str]:
    # /health generates a token: it takes a second and fails beneath a long prefill, so it is asked rarely.
    interval, timeout = ("2", "10") if server["ready_path"] == "/ready" else ("10", "25")
    return [
        *("--health-check-endpoint", server["ready_path"]),
        *("--health-check-interval-secs", interval),
        *("--health-check-timeout-secs", timeout),
        *("--health-failure-threshold", str(router["health_failure_threshold"])),
        *("--health-success-threshold", "1"),
    ]


def _worker(worker: Worker) -> list[str]:
    if worker.role == "prefill":
        return ["--prefill", worker.url, str(worker.bootstrap_port)]
    return ["--decode", worker.url]
