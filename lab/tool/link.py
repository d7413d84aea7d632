"""One ssh connection to a lab host, for commands and for ports that listen on the host's loopback only."""

import json
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.tool import shell
from lab.tool.hosts import Host, Lab


class Link:
    """An open connection; make it with `connect`."""

    def __init__(self, command: list[str]) -> None:
        """Keep the ssh call that goes through the open connection."""
        self._command = command

    def run(self, script: str, timeout: float = 60.0) -> str:
        """Run a shell command on the host and return its stdout; raises LabError if it fails."""
        return shell.output([*self._command, script], timeout=timeout)

    def python(self, script: str, timeout: float = 60.0) -> Any:
        """Run a Python script on the host as root; return what it prints as JSON."""
        return json.loads(self.run(f"sudo python3 -c {shlex.quote(script)}", timeout))

    def forward(self, host: str, port: int) -> int:
        """Make a port of the host's network reachable at 127.0.0.1 here; return the local port."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            local = int(probe.getsockname()[1])
        destination = self._command[-1]
        shell.output(
            [*self._command[:-1], "-O", "forward", "-L", f"127.0.0.1:{local}:{host}:{port}", destination], timeout=10.0
        )
        return local


@contextmanager
def connect(lab: Lab, host: Host) -> Iterator[Link]:
    """Hold one connection to a host."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        path = str(Path(folder) / "ssh")
        options = ["-S", path, "-o", "BatchMode=yes"]
        # -f: returns as soon as the connection stands. The master must not hold our pipes.
        subprocess.run(
            lab.ssh_command(host, *options, "-M", "-f", "-N"),
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=30.0,
        )
        try:
            yield Link(lab.ssh_command(host, *options))
        finally:
            shell.succeeds(lab.ssh_command(host, *options, "-O", "exit"), timeout=10.0)
