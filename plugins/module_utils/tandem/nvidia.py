"""What nvidia-smi says about a host: asked once, never waited for longer than agreed, read into plain values.

The format is that of `nvidia-smi -q -x` (nvsmi_device_v13.dtd), as recorded from a driver 580.159.04.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

QUERY: Final = ("nvidia-smi", "-q", "-x")
# A host with eight cards and no persistence daemon initialises each of them first.
DEFAULT_TIMEOUT_S: Final = 60.0
# How long a killed tool may take to go. One that hangs inside the driver (state D) never does: it is left.
KILL_GRACE_S: Final = 1.0

FaultKind = Literal["missing", "timeout", "failed", "unreadable"]


@dataclass(frozen=True)
class ToolAnswer:
    """What a program printed. `exit_code` is None if it was still running when its time was up."""

    exit_code: int | None
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Gpu:
    """One card. `index` counts in PCI order, as the engine does (CUDA_DEVICE_ORDER=PCI_BUS_ID)."""

    index: int
    listed: int
    """Its place in nvidia-smi's own list, which is the number that nvidia-smi shows."""
    pci: str
    """Address as sysfs spells it, `0000:c1:00.0`."""
    name: str
    memory_mib: int | None
    """Total memory; None where the tool gave no number, as it does for a card in trouble."""


@dataclass(frozen=True)
class SmiFault:
    """Why nvidia-smi said nothing, or not all."""

    kind: FaultKind
    detail: str


@dataclass(frozen=True)
class SmiReport:
    """One call of nvidia-smi. `gpus` are in index order and empty if the tool named none."""

    driver_version: str = ""
    cuda_version: str = ""
    gpus: tuple[Gpu, ...] = ()
    fault: SmiFault | None = None


def run_tool(argv: Sequence[str], timeout_s: float) -> ToolAnswer:
    """Runs a program for at most `timeout_s` seconds, and does not wait for one that cannot be killed.

    Output goes to files, since a pipe would be held open by a child that is stuck in the kernel.
    Raises FileNotFoundError or PermissionError if the program cannot be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        exit_code: int | None = None
        try:
            exit_code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_GRACE_S)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return ToolAnswer(exit_code, *texts)


def query(timeout_s: float = DEFAULT_TIMEOUT_S) -> SmiReport:
    """Asks nvidia-smi about every card. Whatever goes wrong becomes a `fault`, never an exception."""
    found = shutil.which(QUERY[0])
    if found is None:
        return SmiReport(fault=SmiFault("missing", "nvidia-smi is not on the PATH"))
    try:
        answer = run_tool((found, *QUERY[1:]), timeout_s)
    except OSError as error:
        return SmiReport(fault=SmiFault("failed", f"{found} does not start: {error.strerror}"))
    return read_answer(answer, timeout_s)


def read_answer(answer: ToolAnswer, timeout_s: float) -> SmiReport:
    """The report that an answer amounts to. One that failed half-way still names the cards it got to."""
    if answer.exit_code is None:
        return SmiReport(fault=SmiFault("timeout", f"no answer within {timeout_s:g} s"))
    try:
        report = parse(answer.stdout)
    except ValueError as error:
        if answer.exit_code:
            return SmiReport(fault=SmiFault("failed", _said(answer)))
        return SmiReport(fault=SmiFault("unreadable", str(error)))
    if answer.exit_code:
        return SmiReport(report.driver_version, report.cuda_version, report.gpus, SmiFault("failed", _said(answer)))
    return report


def parse(xml: str) -> SmiReport:
    """Reads the output of `nvidia-smi -q -x`. Raises ValueError if it is something else."""
    try:
        root = ET.fromstring(xml)  # noqa: S314 - printed by the driver's own tool, which already runs as root
    except ET.ParseError as error:
        raise ValueError(f"nvidia-smi -q -x printed no XML ({error})") from None
    if root.tag != "nvidia_smi_log":
        raise ValueError(f"nvidia-smi -q -x printed <{root.tag}>, not <nvidia_smi_log>")
    listed = [(sysfs_address(node.get("id", "")), place, node) for place, node in enumerate(root.findall("gpu"))]
    gpus = tuple(
        Gpu(
            index=index,
            listed=place,
            pci=pci,
            name=(node.findtext("product_name") or "").strip(),
            memory_mib=_mebibytes(node.findtext("fb_memory_usage/total")),
        )
        for index, (pci, place, node) in enumerate(sorted(listed, key=lambda row: pci_key(row[0])))
    )
    return SmiReport(
        driver_version=(root.findtext("driver_version") or "").strip(),
        cuda_version=(root.findtext("cuda_version") or "").strip(),
        gpus=gpus,
    )


def sysfs_address(bus_id: str) -> str:
    """`00000000:C1:00.0` (nvidia-smi) as sysfs spells it: `0000:c1:00.0`. ValueError for other text."""
    try:
        domain, bus, rest = bus_id.split(":")
        device, function = rest.split(".")
        return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{int(function, 16):x}"
    except ValueError:
        raise ValueError(f"nvidia-smi names a card {bus_id!r}, which is no PCI address") from None


def pci_key(address: str) -> tuple[int, ...]:
    """Sorts sysfs addresses as the driver and CUDA_DEVICE_ORDER=PCI_BUS_ID do."""
    return tuple(int(part, 16) for part in address.replace(".", ":").split(":"))


def _mebibytes(text: str | None) -> int | None:
    number, _, unit = (text or "").strip().partition(" ")
    return int(number) if unit == "MiB" and number.isdigit() else None


def _said(answer: ToolAnswer) -> str:
    """The last line of a failed tool, which is where nvidia-smi puts its error, with the exit code."""
    lines = [line.strip() for line in (answer.stderr or answer.stdout).splitlines() if line.strip()]
    return f"exit code {answer.exit_code}: {lines[-1] if lines else 'no output'}"[:300]
