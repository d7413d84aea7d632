"""Command line of the router, for either of the two router releases that Tandem knows (docs/router.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .flags import FlagSet
from .problems import Problem

# A held request is tried again this often.
RETRY_INTERVAL_MS: Final = 1000
OWNED: Final = {
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

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"


def argv(settings: Mapping[str, Any], engine: Mapping[str, Any], workers: Sequence[Worker]) -> list[str]:
    """The router's flags, in a fixed order."""
    words = [
        "--pd-disaggregation",
        *(word for worker in workers for word in _worker(worker)),
        *("--host", settings["router_host"]),
        *("--port", str(settings["router_port"])),
        *("--prometheus-host", settings["router_metrics_host"]),
        *("--prometheus-port", str(settings["router_metrics_port"])),
        *("--policy", settings["router_policy"]),
        *("--request-timeout-secs", str(settings["tandem_request_timeout"])),
        # Held while the only decode is away: constant back-off, so that the product is the budget.
        *("--retry-max-retries", str(settings["router_hold_timeout"] * 1000 // RETRY_INTERVAL_MS)),
        *("--retry-initial-backoff-ms", str(RETRY_INTERVAL_MS)),
        *("--retry-max-backoff-ms", str(RETRY_INTERVAL_MS)),
        *("--retry-backoff-multiplier", "1.0"),
        *("--retry-jitter-factor", "0.0"),
        # One failing request with retries opens a breaker and shuts everybody out.
        "--disable-circuit-breaker",
        *("--health-check-interval-secs", "2"),
        *("--health-failure-threshold", "1"),
        *("--health-success-threshold", "1"),
        *("--health-check-endpoint", engine.get("health_check_endpoint", "/health")),
        # A worker that comes late is registered however late it comes: ten years.
        *("--worker-startup-timeout-secs", "315360000"),
        *("--worker-startup-check-interval", "2"),
    ]
    return [*words, *settings["router_extra_args"]]


def check(settings: Mapping[str, Any], flags: FlagSet, origin: Mapping[str, str]) -> list[Problem]:
    """Faults in the router's settings."""
    where = origin["router_extra_args"]
    problems = flags.check(settings["router_extra_args"], where)
    for flag, _values in flags.split(settings["router_extra_args"]):
        if flag in OWNED:
            problems.append(
                Problem(where, f"{flag}, which Tandem renders itself", f"it left out; it follows {OWNED[flag]}")
            )
    problems += [
        Problem(origin["router_policy"], problem.found, problem.expected)
        for problem in flags.check(["--policy", settings["router_policy"]], "router_policy")
    ]
    return problems


def reachable(host: str) -> str:
    """An address at which a client on the router's own host reaches it."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - 2026-12-01: compared, not bound


def _worker(worker: Worker) -> list[str]:
    if worker.role == "prefill":
        return ["--prefill", worker.url, str(worker.bootstrap_port)]
    return ["--decode", worker.url]
