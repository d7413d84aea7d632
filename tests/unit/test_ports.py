"""Strangers on our ports: found, named without their secrets, and stopped only with consent and never by force."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tandem_ports
from ansible.module_utils.tandem import ports
from ansible.module_utils.tandem.ports import Claim, conflict, find_strangers, read_listeners, service_of, shown_command
from module_run import run_module

# A server whose socket is shared by a worker that it forks; it prints its port and its worker's PID.
SERVER = textwrap.dedent("""
    import os, signal, socket, sys
    stubborn, address = sys.argv[1] == "stubborn", sys.argv[2]
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = socket.create_server((address, 0))
    worker = os.fork()
    if worker == 0:
        if sys.argv[1] == "orphaning":
            server.close()  # it holds no port, only memory of a GPU, say
        else:
            os.read(int(sys.argv[3]), 1)
            os._exit(0)
    else:
        print(server.getsockname()[1], worker, flush=True)
    while True:
        signal.pause()
""")


class Server:
    def __init__(self, kind: str, address: str = "127.0.0.1") -> None:
        reader, self.writer = os.pipe()
        arguments = [sys.executable, "-c", SERVER, kind, address, str(reader), "--api-key", "hunter2"]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, pass_fds=[reader])
        os.close(reader)
        assert self.process.stdout is not None
        self.port, self.worker = map(int, self.process.stdout.readline().split())

    def ends_with_its_parent(self) -> None:
        """The worker sees the end of a pipe that this process holds."""
        os.close(self.writer)

    def close(self) -> None:
        for pid in (self.process.pid, self.worker):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(kind: str = "plain", address: str = "127.0.0.1") -> Server:
        servers.append(Server(kind, address))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def row(port: int, **changes: Any) -> dict[str, Any]:
    return {"port": port, "address": "127.0.0.1", "instance": "decode-0", "use": "port", **changes}


def run(*rows: dict[str, Any], check: bool = False, **params: Any) -> dict[str, Any]:
    return run_module(tandem_ports.main, {"ports": list(rows), **params}, check=check)


# -- reading

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:7531 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0000 100 0 0 10 0
   1: 0100007F:7531 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0000 20 4 30 10 -1
   2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0000 100 0 0 10 0
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when
   0: 00000000000000000000000000000000:7532 00000000000000000000000000000000:0000 0A 0:0 00:0 0 1000 0 31 1
   1: 00000000000000000000000001000000:7533 00000000000000000000000000000000:0000 0A 0:0 00:0 0 1000 0 32 1
   2: 0000000000000000FFFF00000500000A:7534 00000000000000000000000000000000:0000 0A 0:0 00:0 0 1000 0 33 1
"""


def test_listening_sockets_are_read_from_proc() -> None:
    assert [(str(listener), listener.inode) for listener in read_listeners(TCP)] == [
        ("127.0.0.1:30001", 4711),
        ("0.0.0.0:22", 4713),
    ]
    assert [str(listener) for listener in read_listeners(TCP6)] == ["[::]:30002", "[::1]:30003", "10.0.0.5:30004"]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("127.0.0.1", "::", True),
        ("0.0.0.0", "10.0.0.5", True),
        ("::", "10.0.0.5", True),
        ("::1", "::", True),
        ("127.0.0.1", "10.0.0.5", False),
        ("127.0.0.1", "127.0.0.2", False),
        ("127.0.0.1", "::1", False),
        ("0.0.0.0", "::1", False),
        ("::1", "0.0.0.0", False),
    ],
)
def test_which_listeners_are_in_the_way(ours: str, theirs: str, expected: bool) -> None:
    assert conflict(ipaddress.ip_address(ours), ipaddress.ip_address(theirs)) is expected


def test_what_is_said_to_be_in_the_way_is_what_the_kernel_refuses() -> None:
    six = ("::", "::1") if socket.has_dualstack_ipv6() else ()
    for theirs in ("127.0.0.1", "0.0.0.0", "127.0.0.2", *six):
        family = socket.AF_INET6 if ":" in theirs else socket.AF_INET
        with socket.create_server((theirs, 0), family=family, dualstack_ipv6=theirs == "::") as server:
            port = server.getsockname()[1]
            for ours in ("127.0.0.1", "0.0.0.0", *six[1:]):
                with socket.socket(socket.AF_INET6 if ":" in ours else socket.AF_INET) as client:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    refused = _refused(client, ours, port)
                assert conflict(ipaddress.ip_address(ours), ipaddress.ip_address(theirs)) is refused, (ours, theirs)


def _refused(client: socket.socket, address: str, port: int) -> bool:
    try:
        client.bind((address, port))
        client.listen()
    except OSError:
        return True
    return False


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/tandem-decode-0.service\n", "tandem-decode-0.service"),
        ("0::/system.slice/tandem-decode-0.service/sub\n", "tandem-decode-0.service"),
        ("9:pids:/user.slice\n1:name=systemd:/system.slice/ssh.service\n", "ssh.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ""),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.service\n", "x.service"),
        ("0::/\n", ""),
    ],
)
def test_the_unit_of_a_process(cgroup: str, unit: str) -> None:
    assert service_of(cgroup) == unit


SECRETS = [
    (["python", "-m", "s", "--api-key", "hunter2", "--port", "30001"], "python -m s --api-key *** --port 30001"),
    (["s", "--api-key=hunter2"], "s --api-key=***"),
    (
        ["s", "--control-plane-api-keys", "a:b:c:hunter2", "hunter2", "--x", "y"],
        "s --control-plane-api-keys *** *** --x y",
    ),
    (["env", "HF_TOKEN=hunter2", "s"], "env HF_TOKEN=*** s"),
    (["s", "--hf-token", "hunter2"], "s --hf-token ***"),
    (["s", "--url", "https://bob:hunter2@host/x"], "s --url 'https://***@host/x'"),
    (["curl", "-H", "Authorization: Bearer hunter2"], None),
    (["bash", "-c", "exec python -m s --flag --api-key hunter2 --port 1"], None),
    (["bash", "-c", "PORT=1 API_KEY=hunter2 s"], "bash -c 'PORT=1 API_KEY=*** s'"),
    (["s", "--json", '{"api_key": "hunter2", "port": 1}'], None),
    (["s", "hf_hunter2hunter2"], "s ***"),
    (
        ["s", "--tokenizer-path", "/m", "--num-reserved-decode-tokens", "512"],
        "s --tokenizer-path /m --num-reserved-decode-tokens 512",
    ),
    (["s", "--ssl-keyfile", "/etc/k.pem"], "s --ssl-keyfile /etc/k.pem"),
]


@pytest.mark.parametrize(("arguments", "shown"), SECRETS)
def test_a_command_line_is_shown_without_its_secrets(arguments: list[str], shown: str | None) -> None:
    text = shown_command(arguments)
    assert "hunter2" not in text
    assert shown in (None, text)


def test_a_long_command_line_is_cut() -> None:
    assert len(shown_command(["x" * 1000])) == ports.LONGEST_COMMAND


# -- judging, on a /proc of our own


class Proc:
    """Enough of a /proc: sockets, and processes with their units."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self/net").mkdir(parents=True)
        (root / "self/net/tcp").write_text(TCP, encoding="ascii")
        (root / "self/net/tcp6").write_text(TCP6, encoding="ascii")

    def add(self, pid: int, inode: int, cgroup: str, parent: int = 1, state: str = "S") -> None:
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "fd/0").symlink_to("/dev/null")
        (folder / "fd/7").symlink_to(f"socket:[{inode}]")
        (folder / "stat").write_text(f"{pid} (a) b) {state} {parent} " + "0 " * 17 + "99 0 0\n", encoding="ascii")
        (folder / "cmdline").write_bytes(b"python\0-m\0sglang.launch_server\0")
        (folder / "comm").write_text("python\n", encoding="ascii")
        (folder / "cgroup").write_text(f"0::{cgroup}\n", encoding="ascii")

    def strangers(self, port: int, instance: str = "prefill-0") -> list[ports.Stranger]:
        return find_strangers([Claim(port, "127.0.0.1", instance)], self.root)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def test_the_instances_own_unit_is_no_stranger(proc: Proc) -> None:
    proc.add(100, 4711, "/system.slice/tandem-prefill-0.service")
    proc.add(101, 4711, "/system.slice/tandem-prefill-0.service", parent=100)
    assert not proc.strangers(30001)


def test_another_instance_is_a_stranger_that_is_never_signalled(proc: Proc) -> None:
    proc.add(100, 4711, "/system.slice/tandem-prefill-0.service")
    [stranger] = proc.strangers(30001, "decode-0")
    assert "Tandem's own tandem-prefill-0.service" in ports.stop_problem(stranger)


def test_of_several_holders_the_top_one_is_named(proc: Proc) -> None:
    proc.add(101, 4711, "/user.slice/session-1.scope", parent=100)
    proc.add(100, 4711, "/user.slice/session-1.scope")
    proc.add(102, 4711, "/user.slice/session-1.scope", parent=103)
    proc.add(103, 1, "/user.slice/session-1.scope", parent=100)
    [stranger] = proc.strangers(30001)
    assert [process.pid for process in stranger.holders] == [100]
    assert not ports.stop_problem(stranger)


def test_a_holder_out_of_sight_is_a_stranger_that_cannot_be_stopped(proc: Proc) -> None:
    [stranger] = proc.strangers(30001)
    assert "cannot be seen from here" in str(stranger)
    assert ports.stop_problem(stranger)


def test_the_system_itself_is_never_signalled(proc: Proc) -> None:
    proc.add(1, 4711, "/init.scope", parent=0)
    [stranger] = proc.strangers(30001)
    assert "part of the system" in ports.stop_problem(stranger)


def test_a_listener_on_another_address_is_not_in_the_way(proc: Proc) -> None:
    proc.add(100, 33, "/")
    assert not proc.strangers(30004)
    assert proc.strangers(30002)


# -- the module, on real processes


def test_free_ports(start: Callable[..., Server]) -> None:
    server = start()
    result = run(row(server.port, address="127.0.0.2"))
    assert (result["failed"], result["changed"], result["strangers"]) == (False, False, [])


@pytest.mark.parametrize("check", [True, False])
def test_without_consent_all_strangers_are_named_and_none_is_touched(start: Callable[..., Server], check: bool) -> None:
    first, second = start(), start(address="0.0.0.0")
    result = run(row(first.port), row(second.port, instance="prefill-0", use="bootstrap_port"), check=check)
    assert result["failed"]
    user = ports.read_process(os.getpid()).user  # type: ignore[union-attr]
    assert (
        f"127.0.0.1:{first.port} (port of decode-0) is held by pid {first.process.pid} of user {user}" in result["msg"]
    )
    assert f"0.0.0.0:{second.port} (bootstrap_port of prefill-0)" in result["msg"]
    assert "-e tandem_stop_foreign=true" in result["msg"]
    assert "--api-key ***" in result["msg"] or "…" in result["msg"]
    assert "hunter2" not in str(result)
    assert {found["pid"] for found in result["strangers"]} == {first.process.pid, second.process.pid}
    assert first.process.poll() is None
    assert second.process.poll() is None


def test_with_consent_check_mode_says_what_it_would_stop(start: Callable[..., Server]) -> None:
    server = start()
    result = run(row(server.port), stop=True, check=True)
    assert (result["failed"], result["changed"]) == (False, True)
    assert f"pid {server.process.pid}" in result["msg"]
    assert server.process.poll() is None


def test_with_consent_the_main_process_ends_and_its_workers_are_waited_for(start: Callable[..., Server]) -> None:
    server = start()
    alive = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {server.worker}"])
    result = run(row(server.port), stop=True, timeout=20)
    alive.wait()
    assert (result["failed"], result["changed"]) == (False, True)
    assert server.process.wait(1) == -signal.SIGTERM
    assert ports.read_process(server.worker) is None
    again = run(row(server.port), stop=True)
    assert (again["failed"], again["changed"]) == (False, False)


def test_one_that_does_not_end_is_not_killed(start: Callable[..., Server]) -> None:
    server = start("stubborn")
    result = run(row(server.port), stop=True, timeout=1)
    assert (result["failed"], result["changed"]) == (True, True)
    assert f"pid {server.process.pid} of user" in result["msg"]
    assert "did not end" in result["msg"]
    assert server.process.poll() is None


def test_a_worker_that_outlives_its_parent_is_named(start: Callable[..., Server]) -> None:
    server = start("orphaning")
    result = run(row(server.port), stop=True, timeout=1)
    assert result["failed"]
    assert f"pid {server.worker} of user" in result["msg"]


def test_an_address_that_nobody_knows(start: Callable[..., Server]) -> None:
    assert "correct tandem_address" in run(row(start().port, address="no.such.host.invalid"))["msg"]
