"""A prefill is ready when its bootstrap server says that all ranks registered, with our own port."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from testinfra.host import Host

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shared"))
from unit_lib import drop_in, run, show, wait

PREFILL = "tandem-prefill-0.service"
ROUTE = "http://127.0.0.1:8998/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"


def test_the_route_is_ours(host: Host) -> None:
    assert show(host, PREFILL)["ActiveState"] == "active"
    assert json.loads(run(host, f"curl -sf '{ROUTE}'"))["prefill_http_port"] == 30001


def test_start_returns_only_when_ready(host: Host) -> None:
    with drop_in(host, PREFILL, Environment='"LIGHT_ENGINE_START_DELAY=3"'):
        run(host, f"systemctl stop {PREFILL}")
        run(host, f"systemctl start {PREFILL} && curl -sf http://127.0.0.1:30001/ready && curl -sf '{ROUTE}'")


def test_a_foreign_bootstrap_server_refuses_the_start(host: Host) -> None:
    """The engine would log an error and say that it is ready (engine facts: a collision is invisible)."""
    run(host, f"systemctl stop {PREFILL}")
    run(host, "systemd-run --unit=squatter --collect python3 -m http.server 8998 --bind 127.0.0.1")
    wait("the squatter listens", lambda: "8998" in run(host, "ss -ltn"))
    assert host.run(f"sudo systemctl start {PREFILL}").rc != 0
    assert "bootstrap_port 127.0.0.1:8998 cannot be bound" in run(host, f"journalctl -u {PREFILL} -n 20 -o cat")
    run(host, "systemctl stop squatter")
    run(host, f"systemctl reset-failed {PREFILL}; systemctl start {PREFILL}")


def test_a_missing_model_refuses_the_start(host: Host) -> None:
    run(host, "mv /var/lib/tandem/models/tiny-chat /var/lib/tandem/models/away")
    assert host.run(f"sudo systemctl restart {PREFILL}").rc != 0
    assert "tiny-chat/r1 is not there" in run(host, f"journalctl -u {PREFILL} -n 20 -o cat")
    run(host, "mv /var/lib/tandem/models/away /var/lib/tandem/models/tiny-chat")
    run(host, f"systemctl reset-failed {PREFILL}; systemctl start {PREFILL}")
