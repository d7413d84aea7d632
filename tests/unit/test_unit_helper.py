"""The helper beside each main process: what it refuses, when it calls an instance ready, what it sweeps."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import unit_helper

ME = pwd.getpwuid(os.getuid()).pw_name


class Server(HTTPServer):
    """Answers 503 until `body` is set, then 200 with it."""

    body: dict[str, Any] | None = None


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body = self.server.body
        self.send_response(503 if body is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_words: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(unit_helper, "SHM", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return {
        "instance": "decode-0",
        "release": "abc",
        "user": ME,
        "needs": [],
        "ports": [],
        "gpu_addresses": {},
        "ready": [],
        "argv_sha256": "a",
        "env_sha256": "e",
    }


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/"


def test_refuses_a_taken_port_and_names_it(manifest: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        manifest["ports"] = [{"address": "127.0.0.1", "port": port, "use": "bootstrap_port"}]
        with pytest.raises(unit_helper.Refused, match=f"bootstrap_port 127.0.0.1:{port} cannot be bound"):
            unit_helper.before_start(manifest)
    unit_helper.before_start(manifest)


def test_refuses_what_is_not_there(manifest: dict[str, Any], tmp_path: Path) -> None:
    manifest["needs"] = [str(tmp_path / "model")]
    with pytest.raises(unit_helper.Refused, match="model is not there"):
        unit_helper.before_start(manifest)


@pytest.mark.parametrize("found", [{0: "00000000:12:00.0"}, {}])
def test_refuses_another_gpu(found: dict[int, str]) -> None:
    with pytest.raises(unit_helper.Refused, match=r"was deployed for 00000000:11:00\.0"):
        unit_helper.check_gpus({"0": "00000000:11:00.0"}, found)
    unit_helper.check_gpus({"0": "00000000:11:00.0"}, {0: "00000000:11:00.0"})


def test_sweeps_what_the_user_left(manifest: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "shm" / "psm_leaked").write_text("x")
    unit_helper.after_stop(manifest)
    assert list((tmp_path / "shm").iterdir()) == []


def test_sweeps_nothing_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_helper, "SHM", tmp_path)
    (tmp_path / "psm_of_another").write_text("x")
    unit_helper.sweep_shared_memory("nobody")
    assert (tmp_path / "psm_of_another").exists()


def test_ready_is_a_200_with_the_fields(
    manifest: dict[str, Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest["ready"] = [{"url": url(server), "fields": {"prefill_http_port": 30001}}]
    monkeypatch.setenv("MAINPID", str(os.getpid()))
    done = threading.Thread(target=unit_helper.until_ready, args=(manifest,))
    done.start()
    server.body = {"prefill_http_port": 39999}
    done.join(1.0)
    assert done.is_alive(), "another instance's bootstrap server was taken for ours"
    server.body = {"prefill_http_port": 30001}
    done.join(10)
    assert not done.is_alive()


def test_the_poller_ends_with_the_main_process(
    manifest: dict[str, Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest["ready"] = [{"url": url(server), "fields": {}}]
    main = subprocess.Popen(["sleep", "600"])
    monkeypatch.setenv("MAINPID", str(main.pid))
    refusals: list[str] = []

    def poll() -> None:
        try:
            unit_helper.until_ready(manifest)
        except unit_helper.Refused as refusal:
            refusals.append(str(refusal))

    poller = threading.Thread(target=poll)
    poller.start()
    main.kill()
    poller.join(10)  # The zombie is not reaped yet, as systemd may not have.
    main.wait()
    assert len(refusals) == 1
    assert "ended before it was ready" in refusals[0]


def test_the_record_is_of_this_process(
    manifest: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ansible.module_utils.tandem import releases

    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "decode-0"))
    (tmp_path / "decode-0").mkdir()
    monkeypatch.setattr(releases, "RUN", str(tmp_path))
    main = subprocess.Popen(["sleep", "600"])
    unit_helper.write_record(manifest, main.pid)
    found = releases.record("decode-0")
    assert found is not None
    assert (found["release"], found["main_pid"]) == ("abc", main.pid)
    main.kill()
    main.wait()
    assert releases.record("decode-0") is None


def test_a_reused_pid_is_no_record(manifest: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ansible.module_utils.tandem import releases

    monkeypatch.setattr(releases, "RUN", str(tmp_path.parent))
    unit_helper.write_record(manifest, os.getpid())
    record = json.loads((tmp_path / "record.json").read_text())
    (tmp_path / "record.json").write_text(json.dumps({**record, "start_ticks": record["start_ticks"] - 1}))
    assert releases.record(tmp_path.name) is None


def test_a_launcher_gets_its_key_in_process(tmp_path: Path) -> None:
    (tmp_path / "router-key").write_text("secret\n")
    (tmp_path / "launcher.py").write_text("import sys; print(sys.argv)")
    environment = {"CREDENTIALS_DIRECTORY": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    command = ["/usr/bin/python3", unit_helper.__file__, "with-key", "launcher", "--port", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("'--port', '1', '--control-plane-api-keys', 'tandem:tandem:admin:secret']")


def test_usage() -> None:
    began = time.monotonic()
    helper = Path(unit_helper.__file__)
    done = subprocess.run(["/usr/bin/python3", "-I", helper, "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert time.monotonic() - began < 60
