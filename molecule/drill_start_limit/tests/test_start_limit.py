"""An engine that dies a minute after each start trips the start limit, and a commanded start works again."""

from __future__ import annotations

import sys
from pathlib import Path

from testinfra.host import Host

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shared"))
from unit_lib import drop_in, run, show, wait

DECODE = "tandem-decode-0.service"


def test_dying_after_a_minute_trips_the_limit(host: Host) -> None:
    with drop_in(host, DECODE, Environment='"LIGHT_ENGINE_DIE=kill" "LIGHT_ENGINE_DIE_WHEN=60"'):
        run(host, f"systemctl restart {DECODE}")
        wait("given up", lambda: show(host, DECODE)["ActiveState"] == "failed", 600)
        assert show(host, DECODE)["Result"] == "start-limit-hit" or "start-limit-hit" in run(
            host, f"journalctl -u {DECODE} -n 20 -o cat"
        )
        assert int(show(host, DECODE)["NRestarts"]) <= 5
    assert show(host, DECODE)["ActiveState"] == "active"
