"""The gate shuts for everything that a broken pair shows while it looks healthy."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from ansible.module_utils.tandem import gate


class Router(ThreadingHTTPServer):
    """Router and both workers in one: what each of them answers is set by the test."""

    ready = 200
    workers: list[dict[str, Any]] = []
    content = "Paris"
    finish = "stop"
    status = 200
    kv_mb = 0.0
    kv_step = 0.5
    nixl_bytes = 0.0
    nixl_step = 0.5 * 2**20 + 1600
    requests = 0


class Handler(BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        if self.path == "/readiness":
            self.reply(self.server.ready, {})
        elif self.path == "/workers":
            self.reply(200, {"workers": self.server.workers})
        else:
            self.send_response(200)
            self.end_headers()
            text = f"{gate.NIXL_BYTES} {self.server.nixl_bytes}\n"
            text += f'{gate.KV_MB}{{tp_rank="0"}} {self.server.kv_mb}\n{gate.REQUESTS} {self.server.requests}\n'
            self.wfile.write(f"# HELP x\n{text}".encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.kv_mb += self.server.kv_step
        self.server.nixl_bytes += self.server.nixl_step
        self.server.requests += 1
        message = {"message": {"content": self.server.content}, "finish_reason": self.server.finish}
        self.reply(self.server.status, {"choices": [message]})

    def reply(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_words: Any) -> None:
        pass


@pytest.fixture
def router() -> Iterator[Router]:
    with Router(("127.0.0.1", 0), Handler) as made:
        made.workers = [{"url": f"http://127.0.0.1:{made.server_port}", "is_healthy": True}]
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is waited for: not for long here."""
    monkeypatch.setattr(gate, "COUNTERS_LATE", 0.2)
    monkeypatch.setattr(gate, "POLL", 0.02)


def faults(router: Router, register_timeout: float = 0.1) -> list[str]:
    from tandem_gate import run

    url = f"http://127.0.0.1:{router.server_port}"
    found: list[str]
    _result, found = run(
        {
            "router": url,
            "workers": [
                {"role": role, "name": f"{role}-0", "host": "gpu1", "url": url, "telemetry": url}
                for role in ("prefill", "decode")
            ],
            "model": "m",
            "key": "",
            "questions": [{"prompt": "capital?", "expect": "Paris", "max_tokens": 5}],
            "count": 2,
            "parallel": 2,
            "request_timeout": 5,
            "register_timeout": register_timeout,
        }
    )
    return found


def test_open(router: Router) -> None:
    assert faults(router) == []
    assert router.requests == 4, "twice the number of workers"


def test_wrong_answer(router: Router) -> None:
    router.content = "Rome"
    assert "'Rome', which does not match 'Paris'" in faults(router)[0]


def test_right_status_wrong_reason(router: Router) -> None:
    router.finish = "error"
    assert "finish_reason 'error'" in faults(router)[0]


def test_refused(router: Router) -> None:
    router.status = 503
    assert "HTTP 503" in faults(router)[0]


def test_no_kv_moved(router: Router) -> None:
    router.kv_step = 0.0
    assert faults(router) == [f"prefill-0 of gpu1 moved no KV bytes: {gate.KV_MB} stood still"]


def test_nixl_sent_less_than_the_engine_accounts_for(router: Router) -> None:
    """A transfer that is reported and did not happen: only the bytes beside the KV cache are sent."""
    router.nixl_step = 1600
    assert "accounts for 2097152 KV bytes, NIXL sent 6400" in faults(router)[0]


def test_a_count_that_comes_late_is_waited_for(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "COUNTERS_LATE", 20.0)
    router.nixl_step = 0.0

    def count_late() -> None:
        while router.requests < 4:
            time.sleep(0.01)
        time.sleep(0.1)
        router.nixl_bytes = 4.0 * 2**20

    late = threading.Thread(target=count_late)
    late.start()
    assert faults(router) == []
    late.join()


def test_router_not_ready(router: Router) -> None:
    router.ready = 503
    assert "/readiness answers 503" in faults(router)[0]
    assert router.requests == 0


def test_worker_not_registered(router: Router) -> None:
    router.workers = []
    assert "does not know as healthy: prefill-0 of gpu1" in faults(router)[0]


def test_unhealthy_worker(router: Router) -> None:
    router.workers[0]["is_healthy"] = False
    assert "does not know as healthy" in faults(router)[0]


def test_counters_of_a_restarted_worker() -> None:
    before = {"u": {"kv_bytes": 10.0, "requests": 7.0}}
    assert gate.moved(before, {"u": {"kv_bytes": 5.0, "requests": 9.0}}) == {"u": {"kv_bytes": 5.0, "requests": 2.0}}
