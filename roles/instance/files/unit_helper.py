#!/usr/bin/python3 -I
"""What a unit of Tandem does around its main process. Part of a release; reads the manifest beside it.

before-start  (root)  refuses a start that would serve the wrong GPUs or a taken port; sweeps what a crash left
until-ready   (unit)  writes the start record, then waits until the instance answers or its main process is gone
after-stop    (root)  sweeps shared memory that the instance's user left behind
with-key      (unit)  is the router's main process where its worker API has a key: starts the launcher named next

systemd bounds all of them (TimeoutStartSec, TimeoutStopSec). Exit status: 0, or 1 with the reason on stderr,
which is the journal.
"""

from __future__ import annotations

import json
import os
import pwd
import runpy
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
SHM = Path("/dev/shm")  # noqa: S108 - 2026-12-01: POSIX shared memory is what the engine leaks (sglang#40723)
POLL = 0.2
# One answer may take this long. The real engine answers /ready at once or not at all.
ANSWER_TIMEOUT = 5.0


class Refused(Exception):  # noqa: N818 - 2026-12-01: it reads as what happened: the start was refused
    """The start must not go on; the text says why and what to do."""


def main(argv: list[str]) -> int:
    if argv[1:2] == ["with-key"]:
        with_key(argv[2], argv[3:])
    manifest = json.loads((HERE / "manifest.json").read_text())
    verbs = {"before-start": before_start, "until-ready": until_ready, "after-stop": after_stop}
    if len(argv) != 2 or argv[1] not in verbs:
        print(f"usage: {argv[0]} {'|'.join(verbs)}", file=sys.stderr)
        return 2
    try:
        verbs[argv[1]](manifest)
    except Refused as refusal:
        print(f"tandem: {refusal}", file=sys.stderr)
        return 1
    return 0


def before_start(manifest: dict[str, Any]) -> None:
    """Raises Refused where the start would be wrong."""
    sweep_shared_memory(manifest["user"])
    for path in manifest["needs"]:
        if not Path(path).exists():
            raise Refused(f"{path} is not there, and this release needs it. Deploy again to stage it.")
    for listener in manifest["ports"]:
        check_port_free(listener["address"], listener["port"], listener["use"])
    if manifest["gpu_addresses"]:
        check_gpus(manifest["gpu_addresses"], query_gpus())
        ensure_uvm()


def until_ready(manifest: dict[str, Any]) -> None:
    """Waits for the instance's answers. Raises Refused once the main process is gone."""
    pid = int(os.environ["MAINPID"])
    write_record(manifest, pid)
    waiting = list(manifest["ready"])
    began = time.monotonic()
    while waiting:
        if not alive(pid):
            raise Refused(f"main process {pid} ended before it was ready: its reason is above, in this unit's journal.")
        waiting = [check for check in waiting if not answers(check["url"], check["fields"])]
        if waiting:
            time.sleep(POLL)
    print(f"tandem: ready after {time.monotonic() - began:.1f} s")


def after_stop(manifest: dict[str, Any]) -> None:
    """Only the last process of the user makes its shared memory garbage; the unit has just lost its last."""
    sweep_shared_memory(manifest["user"])


def with_key(module: str, words: list[str]) -> NoReturn:
    """Runs a router's launcher with its key, which no command line, environment or log has held."""
    key = Path(os.environ["CREDENTIALS_DIRECTORY"], "router-key").read_text().strip()
    sys.argv = [module, *words, "--control-plane-api-keys", f"tandem:tandem:admin:{key}"]
    runpy.run_module(module, run_name="__main__")
    sys.exit(0)


def write_record(manifest: dict[str, Any], pid: int) -> None:
    """What was started, for `is it still that?`: valid while the PID lives and its start time matches."""
    record = {
        "instance": manifest["instance"],
        "release": manifest["release"],
        "main_pid": pid,
        "start_ticks": start_ticks(pid),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "argv_sha256": manifest["argv_sha256"],
        "env_sha256": manifest["env_sha256"],
    }
    target = Path(os.environ["RUNTIME_DIRECTORY"], "record.json")
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.chmod(0o644)
    partial.rename(target)


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot: field 22 of /proc/PID/stat (proc(5))."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        raise Refused(f"main process {pid} ended at once: its reason is above, in this unit's journal.") from error
    return int(stat.rpartition(")")[2].split()[19])


def alive(pid: int) -> bool:
    """Whether a process lives. A zombie, which systemd has not reaped yet, does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def answers(url: str, fields: dict[str, Any]) -> bool:
    """Whether GET `url` is a 200 whose JSON carries `fields`."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT) as answer:
            if answer.status != 200:
                return False
            if not fields:
                return True
            body = json.load(answer)
    except (OSError, ValueError, urllib.error.URLError):
        return False
    return all(body.get(name) == value for name, value in fields.items())


def check_port_free(address: str, port: int, use: str) -> None:
    """By binding it, as the engine will. SO_REUSEADDR, as servers set it, looks past TIME_WAIT."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise Refused(
                f"{use} {address}:{port} cannot be bound ({error.strerror})."
                f" Find its owner with `ss -ltnp sport = :{port}`."
            ) from error


def query_gpus() -> dict[int, str]:
    """PCI address of each GPU by its nvidia-smi index."""
    command = ["nvidia-smi", "--query-gpu=index,pci.bus_id", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Refused(f"nvidia-smi failed: {error}") from error
    rows = (line.split(",") for line in text.splitlines() if line.strip())
    return {int(index): address.strip().lower() for index, address in rows}


def check_gpus(expected: dict[str, str], found: dict[int, str]) -> None:
    """A GPU that fell off the bus shifts every index behind it: the instance would take its neighbour's."""
    for index, address in expected.items():
        now = found.get(int(index))
        if now != address:
            raise Refused(
                f"GPU {index} is {now or 'absent'}, this release was deployed for {address}."
                " Look at `nvidia-smi -L` and `dmesg`; deploy again once the machine is as it should be."
            )


def ensure_uvm() -> None:
    """/dev/nvidia-uvm is made on demand, and an unprivileged process cannot make it."""
    if not Path("/dev/nvidia-uvm").exists():
        try:
            subprocess.run(["nvidia-modprobe", "-u", "-c=0"], check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise Refused(f"/dev/nvidia-uvm is missing and nvidia-modprobe failed: {error}") from error


def sweep_shared_memory(user: str) -> None:
    """Leaked segments of a crash end in a crash loop (sglang#40723). One user an instance makes the owner proof."""
    uid = pwd.getpwnam(user).pw_uid
    for segment in SHM.iterdir():
        try:
            if segment.lstat().st_uid == uid and not segment.is_dir():
                segment.unlink()
                print(f"tandem: swept {segment}")
        except FileNotFoundError:
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv))
