"""The stand-in engine as a process: what Tandem and the routers rely on it for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "lab/models/tiny-chat"
FLAGS = ROOT / "engines/sglang-0.5.23/flags.json"
PARIS = "What is the capital of France? Answer with one word."
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - 2026-12-01: where engines leave segments behind
PATIENCE = 60.0  # seconds to wait for any condition; a loaded machine starts Python slowly


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, different ones."""
    sockets = [socket.socket() for _ in range(count)]
    for opened in sockets:
        opened.bind(("127.0.0.1", 0))
    ports = [int(opened.getsockname()[1]) for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def call(url: str, body: Any = None, timeout: float = PATIENCE) -> tuple[int, str]:
    """Status and body of a GET, or of a POST if there is something to send; status 0 if nothing listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""


@dataclass
class Server:
    """One stand-in engine."""

    process: subprocess.Popen[str]
    port: int
    bootstrap_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready(self) -> int:
        return call(f"{self.url}/ready")[0]

    def wait_ready(self) -> Server:
        def ready_or_dead() -> bool:
            assert self.process.poll() is None, self.log()
            return self.ready() == 200

        until(ready_or_dead, f"port {self.port} never became ready")
        return self

    def scheduler(self) -> int:
        """The child's process id."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        until(lambda: bool(path.read_text().split()), "no scheduler")
        return int(path.read_text().split()[0])

    def end(self) -> int:
        """The exit status, once there is one."""
        return self.process.wait(PATIENCE)

    def log(self) -> str:
        """All that an ended process has written."""
        assert self.process.stderr is not None
        return self.process.stderr.read()


Launch = Callable[..., Server]


@contextmanager
def launching() -> Iterator[Launch]:
    """A function that starts servers, which all are gone at the end."""
    started: list[Server] = []

    def start(role: str = "null", *flags: str, environment: dict[str, str] | None = None, **ports: int) -> Server:
        free = free_ports(2)
        port, bootstrap = ports.get("port", free[0]), ports.get("bootstrap", free[1])
        words = ["--model-path", str(MODEL), "--port", str(port), "--disaggregation-mode", role, "--enable-metrics"]
        words += ["--disaggregation-bootstrap-port", str(bootstrap), "--served-model-name", "light", *flags]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("LIGHT_ENGINE", "SGLANG"))}
        env |= {"PYTHONPATH": str(ROOT / "lab/packages/light_engine"), "LIGHT_ENGINE_FLAGS": str(FLAGS)}
        process = subprocess.Popen(
            [sys.executable, "-m", "light_engine", *words],
            env=env | (environment or {}),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(Server(process, port, bootstrap))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            if server.process.poll() is None:
                os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
            if server.process.stderr is not None:
                server.process.stderr.close()
        for left in SHARED_MEMORY.glob("light_engine_*"):
            if not Path(f"/proc/{left.name.rpartition('_')[2]}").exists():
                left.unlink(missing_ok=True)


@pytest.fixture
def launch() -> Iterator[Launch]:
    with launching() as start:
        yield start


@dataclass
class Pair:
    """A prefill and a decode."""

    prefill: Server
    decode: Server

    def ask(self, path: str, body: dict[str, Any], room: int) -> tuple[int, str]:
        """Send one request to both, as a router does, and return what decode answers."""
        body = body | {"bootstrap_host": "127.0.0.1", "bootstrap_room": room}
        body["bootstrap_port"] = self.prefill.bootstrap_port
        with ThreadPoolExecutor() as pool:
            first = pool.submit(call, self.prefill.url + path, body)
            answer = call(self.decode.url + path, body)
            assert first.result()[0] == 200, first.result()
        return answer


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with launching() as start:
        prefill, decode = start("prefill", "--tp-size", "4"), start("decode", "--tp-size", "4")
        yield Pair(prefill.wait_ready(), decode.wait_ready())


def chat(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "light", "messages": [{"role": "user", "content": prompt}], **more}


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_chat_answer_comes_from_the_models_prompts(pair: Pair) -> None:
    status, text = pair.ask("/v1/chat/completions", chat(PARIS), 1)
    choice = json.loads(text)["choices"][0]
    assert (status, choice["message"]["content"], choice["finish_reason"]) == (200, "Paris", "stop")


def test_a_streamed_answer_says_the_same_in_pieces(pair: Pair) -> None:
    prompt = "What does the decode server do?"
    _, text = pair.ask("/v1/chat/completions", chat(prompt, stream=True, stream_options={"include_usage": True}), 2)
    *pieces, last, usage = events(text)
    said = "".join(piece["choices"][0]["delta"]["content"] for piece in pieces)
    assert said == "It writes the answer, one token at a time."
    assert len(pieces) > 5
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] == len(pieces)


def test_what_is_not_known_is_echoed_and_never_the_same(pair: Pair) -> None:
    said = [json.loads(pair.ask("/generate", {"text": text}, 3)[1])["text"] for text in ("one", "two")]
    assert said == ["You said 1 words: one", "You said 1 words: two"]


def test_the_limit_of_tokens_holds(pair: Pair) -> None:
    body = {"prompt": "a b c", "max_tokens": 3}
    choice = json.loads(pair.ask("/v1/completions", body, 4)[1])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("You said 3", "length")
    body = {"text": "a", "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}, "stream": True}
    assert len(events(pair.ask("/generate", body, 5)[1])) == 40


def test_a_request_without_a_room_is_refused(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        status, text = call(f"{server.url}/v1/chat/completions", chat(PARIS))
        assert status == 400
        assert "without bootstrap room id" in text
        status, text = call(f"{server.url}/v1/chat/completions", chat(PARIS, stream=True))
        assert (status, events(text)[0]["error"]["code"]) == (200, 400)


def test_the_route_names_the_prefills_port_once_every_rank_is_there(pair: Pair) -> None:
    base = f"http://127.0.0.1:{pair.prefill.bootstrap_port}"
    query = "prefill_dp_rank={0}&prefill_cp_rank={0}&target_tp_rank={0}&target_pp_rank={0}"
    status, text = call(f"{base}/route?{query.format(-1)}")
    assert status == 200
    assert (
        json.loads(text).items() >= {"prefill_http_port": pair.prefill.port, "attn_tp_size": 4, "page_size": 1}.items()
    )
    assert json.loads(call(f"{base}/route?{query.format(0)}")[1]) == {
        "rank_ip": "127.0.0.1",
        "rank_port": pair.prefill.port,
    }
    assert call(f"{base}/route")[0] == 400
    assert call(f"{base}/health") == (200, "OK")


def value(server: Server, name: str) -> float:
    page = call(f"{server.url}/metrics")[1]
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name + "{"))


def test_the_prefill_counts_what_it_handed_over(pair: Pair) -> None:
    before = value(pair.prefill, "sglang:kv_transfer_total_mb_sum")
    pair.ask("/generate", {"text": "a b c d"}, 6)
    assert value(pair.prefill, "sglang:kv_transfer_total_mb_sum") == before + 4 / 1024
    assert value(pair.decode, "sglang:kv_transfer_total_mb_sum") == 0
    assert value(pair.decode, "sglang:num_requests_total") > 0
    assert value(pair.prefill, "sglang:num_running_reqs") == 0


def test_routers_find_what_they_register_workers_by(pair: Pair) -> None:
    info = json.loads(call(f"{pair.prefill.url}/server_info")[1])
    assert (info["disaggregation_mode"], info["tp_size"], info["stand_in"]) == ("prefill", 4, "light_engine")
    assert json.loads(call(f"{pair.decode.url}/v1/models")[1])["data"][0]["id"] == "light"
    assert json.loads(call(f"{pair.decode.url}/v1/loads")[1])["loads"][0]["num_running_reqs"] == 0
    for path in ("/health", "/health_generate", "/model_info", "/get_model_info", "/get_server_info"):
        assert call(pair.decode.url + path)[0] == 200, path
    assert call(f"{pair.decode.url}/flush_cache", {})[0] == 200


def test_a_half_pair_ends_in_an_error(launch: Launch) -> None:
    limits = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "0.3", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "0.3"}
    prefill = launch("prefill", environment=limits)
    decode = launch("decode", environment=limits | {"LIGHT_ENGINE_HANDSHAKE_TIMEOUT": "0.3"})
    prefill.wait_ready()
    decode.wait_ready()
    to = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": 1}
    status, text = call(f"{prefill.url}/generate", {"text": "a", **to})
    assert (status, "timed out in the bootstrap queue" in text) == (500, True)
    status, text = call(f"{decode.url}/generate", {"text": "a", **to})
    assert (status, "KV transfer of room 1" in text) == (500, True)
    prefill.process.kill()
    prefill.end()
    status, text = call(f"{decode.url}/generate", {"text": "a", **to})
    assert (status, "Could not fetch prefill parallel info" in text) == (500, True)


def test_a_decode_of_another_page_size_dies_at_the_first_request(launch: Launch) -> None:
    prefill, decode = (
        launch("prefill", "--page-size", "64").wait_ready(),
        launch("decode", "--page-size", "1").wait_ready(),
    )
    to = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": 1}
    with pytest.raises(ConnectionError):
        call(f"{decode.url}/generate", {"text": "a", **to})
    assert decode.end() == -signal.SIGKILL
    assert "Page size mismatch" in decode.log()


def test_a_taken_bootstrap_port_shows_only_in_the_route(launch: Launch) -> None:
    first = launch("prefill").wait_ready()
    second = launch("prefill", bootstrap=first.bootstrap_port).wait_ready()
    query = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    route = json.loads(call(f"http://127.0.0.1:{second.bootstrap_port}/route?{query}")[1])
    assert (second.ready(), route["prefill_http_port"]) == (200, first.port)


def test_it_is_not_ready_before_it_is_warm(launch: Launch) -> None:
    server = launch(environment={"LIGHT_ENGINE_START_DELAY": "0.3", "LIGHT_ENGINE_WARMUP_DELAY": "0.5"})
    seen = []

    def ready() -> bool:
        seen.append(server.ready())
        return seen[-1] == 200

    until(ready, "never ready")
    assert sorted(set(seen), key=seen.index) == [0, 503, 200]


def test_a_flag_that_the_engine_does_not_have_is_refused(launch: Launch) -> None:
    unknown, choice = launch("null", "--cuda-graf-max-bs", "4"), launch("null", "--tokenizer-mode", "quick")
    assert (unknown.end(), choice.end()) == (2, 2)
    assert "unrecognized arguments: --cuda-graf-max-bs" in unknown.log()
    assert "invalid choice: 'quick'" in choice.log()


def test_it_dies_as_told(launch: Launch) -> None:
    told = {"exit": 1, "kill": -signal.SIGKILL, "scheduler": -signal.SIGKILL}
    starting = [launch(environment={"LIGHT_ENGINE_DIE": how}) for how in told]
    later = launch(environment={"LIGHT_ENGINE_DIE": "exit", "LIGHT_ENGINE_DIE_WHEN": "0.1"})
    assert [server.end() for server in starting] == list(told.values())
    assert all("dying as told" in log and "ready to roll" not in log for log in map(Server.log, starting))
    assert later.end() == 1
    assert "ready to roll" in later.log()


def test_a_setting_that_means_nothing_is_refused(launch: Launch) -> None:
    server = launch(environment={"LIGHT_ENGINE_DIE": "sometimes"})
    assert server.end() == 1
    assert "LIGHT_ENGINE_DIE is 'sometimes', expected one of exit, kill, scheduler, hang" in server.log()


def test_a_crash_of_the_scheduler_takes_all_down_and_leaves_its_memory(launch: Launch) -> None:
    server = launch().wait_ready()
    scheduler = server.scheduler()
    os.kill(scheduler, signal.SIGSEGV)
    assert server.end() == -signal.SIGKILL
    assert "crashed with exit code -11" in server.log()
    assert (SHARED_MEMORY / f"light_engine_{scheduler}").exists()


def test_sigterm_lets_a_stream_finish_and_cleans_up(launch: Launch) -> None:
    server = launch(environment={"LIGHT_ENGINE_TOKEN_DELAY": "0.02"}).wait_ready()
    segment = SHARED_MEMORY / f"light_engine_{server.scheduler()}"
    body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(call, f"{server.url}/generate", body)
        until(lambda: value(server, "sglang:num_running_reqs") == 1, "the stream never began")
        server.process.terminate()
        until(lambda: server.ready() == 503, "still ready after SIGTERM")
        assert call(f"{server.url}/health")[0] == 503
        assert len(events(stream.result()[1])) == 40
    assert server.end() == -signal.SIGKILL
    assert not segment.exists()


def test_a_signal_to_the_whole_group_cuts_the_stream(launch: Launch) -> None:
    server = launch(environment={"LIGHT_ENGINE_TOKEN_DELAY": "0.1"}).wait_ready()
    body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(call, f"{server.url}/generate", body)
        until(lambda: value(server, "sglang:num_running_reqs") == 1, "the stream never began")
        os.killpg(server.process.pid, signal.SIGTERM)
        assert server.end() == -signal.SIGKILL
        with pytest.raises(Exception, match=r"IncompleteRead|reset"):
            stream.result()


def test_a_stopped_scheduler_hangs_requests_until_health_notices(launch: Launch) -> None:
    server = launch(environment={"SGLANG_HEALTH_CHECK_TIMEOUT": "0.2"}).wait_ready()
    os.kill(server.scheduler(), signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        call(f"{server.url}/generate", {"text": "a"}, timeout=0.3)
    assert call(f"{server.url}/model_info")[0] == 200
    assert call(f"{server.url}/health")[0] == 503
    os.kill(server.scheduler(), signal.SIGCONT)
    assert call(f"{server.url}/health")[0] == 200


def test_orphans_outlive_a_killed_main_process(launch: Launch) -> None:
    servers = [launch(environment={"LIGHT_ENGINE_ORPHANS": "1"}), launch()]
    orphan, child = [server.wait_ready().scheduler() for server in servers]
    for server in servers:
        server.process.kill()
        server.end()
    until(lambda: not Path(f"/proc/{child}").exists(), "an ordinary scheduler outlived its main process")
    try:
        assert "light_engine" in Path(f"/proc/{orphan}/cmdline").read_text()
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_it_says_what_it_is(launch: Launch) -> None:
    server = launch().wait_ready()
    assert Path(f"/proc/{server.scheduler()}/comm").read_text().startswith("light_engine")
    server.process.kill()
    server.end()
    assert "THIS IS A STAND-IN" in server.log()
