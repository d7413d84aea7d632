"""The unit of a server under what engines do: crash, die while starting or again and again, leak, stop with work."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from testinfra.host import Host

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shared"))
from unit_lib import drop_in, record, restarted, run, show, wait

DECODE, PREFILL = "tandem-decode-0.service", "tandem-prefill-0.service"
GENERATE = json.dumps(
    {
        "text": "What is the capital of France? Answer with one word.",
        "sampling_params": {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 8998,
        "stream": True,
    }
)


def test_runs_as_declared(host: Host) -> None:
    unit = show(host, DECODE)
    assert unit["ActiveState"] == "active"
    assert unit["User"] == "tandem-decode-0"
    assert unit["LimitNOFILE"] == "20000"
    assert unit["KillMode"] == "mixed"
    pid = unit["MainPID"]
    assert run(host, f"grep -w Cpus_allowed_list /proc/{pid}/status")
    policy = run(host, f"cat /proc/{pid}/numa_maps").split("\n")[0]
    assert "bind:0" in policy, "numactl --membind did not reach the engine"
    assert run(host, f"readlink /proc/{pid}/ns/pid") == run(host, "readlink /proc/1/ns/pid"), (
        "a PID namespace breaks KV"
    )
    assert "NoNewPrivs:\t1" in run(host, f"cat /proc/{pid}/status")


def test_start_record_is_of_the_main_process(host: Host) -> None:
    found = record(host, "decode-0")
    assert str(found["main_pid"]) == show(host, DECODE)["MainPID"]
    assert run(host, "readlink /var/lib/tandem/releases/decode-0/current").strip() == found["release"]


def test_no_file_that_all_may_write(host: Host) -> None:
    private = "-type d ! -perm /o+x -prune"
    places = "/opt/tandem /var/lib/tandem /etc/systemd/system"
    assert run(host, f"find {places} {private} -o -perm -o+w ! -type l -print") == ""


def test_kill_9_of_the_main_process(host: Host) -> None:
    pid = show(host, DECODE)["MainPID"]
    run(host, f"kill -9 {pid}")
    wait("a new main process", restarted(host, DECODE, pid))
    assert record(host, "decode-0")["main_pid"] != int(pid)


def test_sigsegv_of_a_scheduler(host: Host) -> None:
    pid = show(host, DECODE)["MainPID"]
    child = run(host, f"pgrep -P {pid}").split()[0]
    run(host, f"kill -SEGV {child}")
    wait("a new main process", restarted(host, DECODE, pid))


def test_a_commanded_stop_ends_inactive(host: Host) -> None:
    run(host, f"systemctl stop {DECODE}")
    unit = show(host, DECODE)
    assert (unit["ActiveState"], unit["Result"]) == ("inactive", "success")
    run(host, f"systemctl start {DECODE}")
    assert show(host, DECODE)["ActiveState"] == "active"


def test_shared_memory_is_swept(host: Host) -> None:
    run(host, "install -o tandem-decode-0 -m 0600 /dev/null /dev/shm/psm_leaked")
    run(host, "install -m 0600 /dev/null /dev/shm/of_root")
    run(host, f"systemctl restart {DECODE}")
    left = run(host, "ls /dev/shm").split()
    assert "psm_leaked" not in left
    assert "of_root" in left
    run(host, "rm /dev/shm/of_root")


def test_dying_while_starting_fails_the_start_within_seconds(host: Host) -> None:
    with drop_in(host, DECODE, Environment='"LIGHT_ENGINE_DIE=exit" "LIGHT_ENGINE_START_DELAY=1"'):
        run(host, f"systemctl stop {DECODE}")
        began = time.monotonic()
        assert host.run(f"sudo systemctl start {DECODE}").rc != 0
        # TimeoutStartSec is 60 s here; the poller must not sit it out.
        assert time.monotonic() - began < 30
        assert "ended before it was ready" in run(host, f"journalctl -u {DECODE} -n 30 -o cat")


def test_dying_again_and_again_trips_the_start_limit(host: Host) -> None:
    """Ready, dead two seconds later: the window is derived from the load, so it trips however slow the load is."""
    with drop_in(host, DECODE, Environment='"LIGHT_ENGINE_DIE=kill" "LIGHT_ENGINE_DIE_WHEN=2"'):
        run(host, f"systemctl restart {DECODE}")
        wait("given up", lambda: show(host, DECODE)["ActiveState"] == "failed", 120)
        assert "start-limit-hit" in run(
            host, f"systemctl status {DECODE}; journalctl -u {DECODE} -n 20 -o cat", ok=False
        ) or (show(host, DECODE)["Result"] == "start-limit-hit")
    # The commanded start above (reset-failed, start) worked again.
    assert show(host, DECODE)["ActiveState"] == "active"


def test_a_taken_port_refuses_the_start(host: Host) -> None:
    run(host, f"systemctl stop {DECODE}")
    run(host, "systemd-run --unit=squatter --collect python3 -m http.server 30002 --bind 127.0.0.1")
    wait("the squatter listens", lambda: "30002" in run(host, "ss -ltn"))
    assert host.run(f"sudo systemctl start {DECODE}").rc != 0
    assert "port 127.0.0.1:30002 cannot be bound" in run(host, f"journalctl -u {DECODE} -n 20 -o cat")
    run(host, "systemctl stop squatter")
    run(host, f"systemctl reset-failed {DECODE}; systemctl start {DECODE}")


def test_a_stream_in_flight_finishes_on_stop(host: Host) -> None:
    with drop_in(host, DECODE, Environment='"LIGHT_ENGINE_TOKEN_DELAY=0.05"'):
        run(host, f"systemctl restart {DECODE}")
        outputs: list[str] = []
        room = '"bootstrap_room": 4711'
        body = GENERATE[:-1] + f", {room}}}"
        for port in (30001, 30002):
            command = f"curl -sN -m 60 -H 'Content-Type: application/json' -d '{body}' http://127.0.0.1:{port}/generate"
            thread = threading.Thread(target=lambda command=command: outputs.append(run(host, command, ok=False)))
            thread.start()
        wait("in flight", lambda: '"num_running_reqs": 1' in run(host, "curl -s http://127.0.0.1:30002/v1/loads"), 20)
        run(host, f"systemctl stop {DECODE}")
        wait("both answers", lambda: len(outputs) == 2, 30)
        assert all("[DONE]" in output for output in outputs)
