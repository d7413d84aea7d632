"""The checks of a host against what the inventory declares for it: rows of data over facts read in one go.

`gather` reads the host; `judge_host` is pure, so that every check is tested without a GPU.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from .findings import Finding, Severity
from .nvidia import DEFAULT_TIMEOUT_S, Gpu, SmiReport, query, run_tool
from .topology import SYSFS, NumaNodes, numa_nodes, nvidia_cards, pci_numa_node

# The oldest systemd that the units are written for: Debian 12 has 252, Ubuntu 24.04 has 255.
MIN_SYSTEMD: Final = "250"
LOADED_DRIVER: Final = Path("/proc/driver/nvidia/version")
VERSION_TIMEOUT_S: Final = 10.0
"""Seconds that systemctl or python may take to say its version."""

SPLIT: Final = "tandem_instances, usually in group_vars/<hardware class>.yml"


@dataclass(frozen=True)
class Placement:
    """Where the inventory puts one instance. `numa_node` is None for one that is not bound (a router)."""

    name: str
    gpus: tuple[int, ...] = ()
    numa_node: int | None = None


@dataclass(frozen=True)
class Wanted:
    """What the inventory and the engine's data expect of a host. Empty text and 0 mean: not stated."""

    device: Literal["cuda", "cpu"]
    placements: tuple[Placement, ...] = ()
    min_driver: str = ""
    min_glibc: str = ""
    requires_python: str = ""
    gpu_model: str = ""
    """Regular expression that the product name of each used GPU has to contain."""
    min_gpu_memory_gib: float = 0.0
    packages: frozenset[str] = frozenset()
    """Debian packages that the deploy installs itself, so that their absence is no fault yet."""

    def gpu_owners(self) -> dict[int, Placement]:
        """Each GPU index that the split uses, with the instance that uses it."""
        return {gpu: row for row in self.placements for gpu in row.gpus}


@dataclass(frozen=True)
class HostFacts:
    """What was read from the host. Text that could not be read is empty."""

    smi: SmiReport = field(default_factory=SmiReport)
    gpu_nodes: Mapping[str, int | None] = field(default_factory=dict)
    """NUMA node by PCI address, as `topology.pci_numa_node` gives it."""
    cards_on_bus: tuple[str, ...] = ()
    loaded_driver: str = ""
    nodes: NumaNodes = field(default_factory=NumaNodes)
    systemd: str = ""
    glibc: str = ""
    kernel: str = ""
    python: str = ""
    numactl: str = ""

    def gpu(self, index: int) -> Gpu | None:
        return self.smi.gpus[index] if 0 <= index < len(self.smi.gpus) else None


@dataclass(frozen=True)
class Outcome:
    """What one check found. `ok` is None where it cannot be decided, and then `observed` says why."""

    ok: bool | None
    observed: str
    expected: str = ""
    fix: str = ""
    """A remedy for exactly this; empty for the check's own."""


@dataclass(frozen=True)
class Check:
    """One row of the table of checks. One with `gpu` is skipped where the engine computes on the CPU."""

    id: str
    severity: Severity
    judge: Callable[[HostFacts, Wanted], Iterable[Outcome]]
    fix: str
    source: str
    gpu: bool = False


def version_key(version: str) -> tuple[int, ...]:
    """The numbers that a version starts with, for comparing: `580.159.04` is (580, 159, 4)."""
    leading = re.match(r"\d+(?:\.\d+)*", version.strip())
    return tuple(int(part) for part in leading.group().split(".")) if leading else ()


def satisfies(version: str, specifiers: str) -> bool:
    """Whether a version is in a range such as `>=3.11,<3.14`. Raises ValueError for an unreadable range.

    A bound counts to its own length, so that 3.13.9 is not above `<=3.13`.
    """
    for part in filter(None, (part.strip() for part in specifiers.split(","))):
        read = re.fullmatch(r"(>=|<=|>|<|==|!=)\s*(\d+(?:\.\d+)*)", part)
        if read is None:
            raise ValueError(f"cannot read the version specifier {part!r} in {specifiers!r}")
        operator, bound = read.group(1), version_key(read.group(2))
        have = version_key(version)[: len(bound)]
        have += (0,) * (len(bound) - len(have))
        holds = {
            ">=": have >= bound,
            "<=": have <= bound,
            ">": have > bound,
            "<": have < bound,
            "==": have == bound,
            "!=": have != bound,
        }
        if not holds[operator]:
            return False
    return True


def ranges(numbers: Iterable[int]) -> str:
    """Numbers for a person: `0-3, 6`."""
    text: list[str] = []
    run: list[int] = []
    for number in [*sorted(set(numbers)), None]:
        if run and number != run[-1] + 1:
            text.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run = []
        if number is not None:
            run.append(number)
    return ", ".join(text)


def _used(facts: HostFacts, wanted: Wanted) -> Iterator[tuple[Placement, Gpu]]:
    """The GPUs of the split that exist. Those that do not are the business of `gpu_declared`."""
    for index, row in sorted(wanted.gpu_owners().items()):
        gpu = facts.gpu(index)
        if gpu is not None:
            yield row, gpu


def _nothing_to_judge(facts: HostFacts) -> Outcome | None:
    return None if facts.smi.gpus else Outcome(None, "nvidia-smi named no GPU")


_SMI_FIXES: Final = (
    (
        "Driver/library version mismatch",
        "the driver's libraries were updated under a loaded module: reboot, or reload the nvidia modules",
    ),
    (
        "couldn't communicate with the NVIDIA driver",
        "load the module (modprobe nvidia) and read dmesg: it may not be built for this kernel, be refused "
        "by Secure Boot, or lose against nouveau",
    ),
    (
        "No devices were found",
        "the driver has no card: read dmesg for NVRM and XID lines, and lspci for the cards; a reboot or a "
        "power cycle brings back one that fell off the bus",
    ),
)


def _nvidia_smi(facts: HostFacts, _: Wanted) -> Iterator[Outcome]:
    fault = facts.smi.fault
    expected = "nvidia-smi -q -x to answer for every GPU"
    if fault is None:
        yield Outcome(True, f"answered for {len(facts.smi.gpus)} GPU")
        return
    fixes = {
        "missing": "install the NVIDIA driver with its utilities (Debian: nvidia-driver, nvidia-smi), or set "
        "tandem_device: cpu on a host without GPUs",
        "timeout": "a card or the driver hangs: read dmesg for XID and NVRM lines, start "
        "nvidia-persistenced, reboot; raise driver_check_timeout if the host is merely slow",
        "failed": "run nvidia-smi -q -x on the host and read dmesg for XID and NVRM lines",
        "unreadable": "run nvidia-smi -q -x on the host: something else may be called nvidia-smi there",
    }
    fix = next((fix for text, fix in _SMI_FIXES if text in fault.detail), fixes[fault.kind])
    yield Outcome(False, fault.detail, expected, fix)


def _driver_loaded(facts: HostFacts, _: Wanted) -> Iterator[Outcome]:
    told = facts.smi.driver_version
    if not facts.loaded_driver:
        yield Outcome(False, f"{LOADED_DRIVER} is missing: no nvidia module is loaded", "a loaded nvidia module")
    elif told and told != facts.loaded_driver:
        yield Outcome(
            False,
            f"module {facts.loaded_driver} is loaded, nvidia-smi is of {told}",
            "both of one version",
            "reboot, or unload and load the nvidia modules, after an update of the driver",
        )
    else:
        yield Outcome(True, f"module {facts.loaded_driver}")


def _driver_version(facts: HostFacts, wanted: Wanted) -> Iterator[Outcome]:
    have = facts.smi.driver_version or facts.loaded_driver
    if not wanted.min_driver:
        yield Outcome(None, f"driver {have or 'unknown'}; the engine's data state no minimum")
    elif not version_key(have):
        yield Outcome(None, "nvidia-smi named no driver version")
    else:
        good = version_key(have) >= version_key(wanted.min_driver)
        yield Outcome(good, f"driver {have}", f"{wanted.min_driver} or newer")


def _gpu_count(facts: HostFacts, wanted: Wanted) -> Iterator[Outcome]:
    used = len(wanted.gpu_owners())
    have = len(facts.smi.gpus)
    observed = f"{have} by nvidia-smi, {len(facts.cards_on_bus)} on the PCI bus"
    nothing = _nothing_to_judge(facts) if facts.smi.fault else None
    yield nothing or Outcome(have >= used, observed, f"at least {used}, which the split uses")


def _gpu_declared(facts: HostFacts, wanted: Wanted) -> Iterator[Outcome]:
    missing = {index: row for index, row in wanted.gpu_owners().items() if facts.gpu(index) is None}
    nothing = _nothing_to_judge(facts)
    if nothing or not missing:
        yield nothing or Outcome(True, f"GPU {ranges(wanted.gpu_owners())} exist")
        return
    have = ranges(gpu.index for gpu in facts.smi.gpus)
    for row in dict.fromkeys(missing.values()):
        lost = ranges(index for index, owner in missing.items() if owner is row)
        yield Outcome(
            False,
            f"no GPU {lost}, which {row.name} uses; the host has {have}",
            f"every GPU of {row.name} to exist",
        )


def _gpu_order(facts: HostFacts, _: Wanted) -> Iterator[Outcome]:
    moved = [gpu for gpu in facts.smi.gpus if gpu.index != gpu.listed]
    nothing = _nothing_to_judge(facts)
    if nothing or not moved:
        yield nothing or Outcome(True, "nvidia-smi lists the GPUs in PCI order")
        return
    shown = ", ".join(f"{gpu.pci} is {gpu.index} here and {gpu.listed} there" for gpu in moved)
    yield Outcome(False, f"nvidia-smi numbers GPUs otherwise: {shown}", "numbers in PCI order")


def _gpu_model(facts: HostFacts, wanted: Wanted) -> Iterator[Outcome]:
    models = sorted({gpu.name for _, gpu in _used(facts, wanted)})
    nothing = _nothing_to_judge(facts)
    if nothing or not wanted.gpu_model:
        yield nothing or Outcome(None, f"{', '.join(models)}; the hardware class declares no model")
        return
    others = [gpu for _, gpu in _used(facts, wanted) if not re.search(wanted.gpu_model, gpu.name)]
    if not others:
        yield Outcome(True, ", ".join(models) or "no GPU is used")
    for name in sorted({gpu.name for gpu in others}):
        found = ranges(gpu.index for gpu in others if gpu.name == name)
        yield Outcome(False, f"GPU {found}: {name or 'no name'}", f"a model that matches {wanted.gpu_model!r}")


def _gpu_memory(facts: HostFacts, wanted: Wanted) -> Iterator[Outcome]:
    nothing = _nothing_to_judge(facts)
    if nothing or not wanted.min_gpu_memory_gib:
        yield nothing or Outcome(None, "the hardware class declares no minimum")
        return
    expected = f"at least {wanted.min_gpu_memory_gib:g} GiB"
    small = False
    for _, gpu in _used(facts, wanted):
        if gpu.memory_mib is None or gpu.memory_mib < wanted.min_gpu_memory_gib * 1024:
            small = True
            size = "unknown" if gpu.memory_mib is None else f"{gpu.memory_mib / 1024:.1f} GiB"
            yield Outcome(False, f"GPU {gpu.index} at {gpu.pci}: {size}", expected)
    if not small:
        yield Outcome(True, f"each used GPU has {expected}")


def _gpu_numa(facts: HostFacts, wanted: Wanted) -> Iterator[Outcome]:
    nothing = _nothing_to_judge(facts)
    if nothing:
        yield nothing
        return
    online = facts.nodes.online
    right: dict[int, list[int]] = {}
    wrong: dict[tuple[Placement, int | None], list[Gpu]] = {}
    unnamed = False
    for row, gpu in _used(facts, wanted):
        node = facts.gpu_nodes.get(gpu.pci)
        if row.numa_node is None:
            continue
        if node == row.numa_node or (node == -1 and online == (row.numa_node,)):
            unnamed = unnamed or node == -1
            right.setdefault(row.numa_node, []).append(gpu.index)
        else:
            wrong.setdefault((row, node), []).append(gpu)
    for (row, node), gpus in wrong.items():
        where = f"GPU {ranges(gpu.index for gpu in gpus)} ({row.name}, {', '.join(gpu.pci for gpu in gpus)})"
        expected = f"NUMA node {row.numa_node}, as {row.name} declares"
        if node is None:
            yield Outcome(
                False,
                f"{where}: sysfs has no such PCI device, the node is unknown",
                expected,
                "run where the kernel shows the cards that nvidia-smi names in /sys/bus/pci/devices; on bare "
                "metal, reboot and read dmesg",
            )
        elif node == -1 and len(online) > 1:
            yield Outcome(
                False,
                f"{where}: node -1, the firmware names none; online: {ranges(online)}",
                expected,
                "set the NUMA mode in the BIOS (AMD: NPS, and ACPI SRAT/_PXM for PCIe) or update the "
                "firmware; in a VM, give the card's bridge a node; until then the binding cannot be proven",
            )
        else:
            only = f", on a host with the single node {online[0]}" if len(online) == 1 else ""
            yield Outcome(False, f"{where}: node {node}{only}", expected)
    shown = "; ".join(f"GPU {ranges(indices)} on node {node}" for node, indices in sorted(right.items()))
    note = " (sysfs says -1, as is usual on a host with a single node)" if unnamed else ""
    if right:
        yield Outcome(True, shown + note)


def _numa_node(facts: HostFacts, wanted: Wanted) -> Iterator[Outcome]:
    nodes = facts.nodes
    usable = [node for node in nodes.online if node in nodes.with_cpus and node in nodes.with_memory]
    lost = [row for row in wanted.placements if row.numa_node is not None and row.numa_node not in usable]
    if not nodes.online:
        yield Outcome(
            False,
            "/sys/devices/system/node is missing",
            "a kernel with NUMA support, for numactl to bind with",
            "boot a kernel with CONFIG_NUMA and without numa=off",
        )
        return
    for row in lost:
        state = "lacks CPUs or memory" if row.numa_node in nodes.online else "does not exist"
        yield Outcome(False, f"node {row.numa_node} of {row.name} {state}", f"one of the nodes {ranges(usable)}")
    if not lost:
        yield Outcome(True, f"nodes {ranges(usable)}")


def _numactl(facts: HostFacts, wanted: Wanted) -> Iterator[Outcome]:
    if not facts.numactl and "numactl" in wanted.packages:
        yield Outcome(True, "not installed yet; this deploy installs it")
    else:
        yield Outcome(bool(facts.numactl), facts.numactl or "not on the PATH", "numactl, which binds each unit")


def _at_least(have: str, least: str, what: str) -> Outcome:
    known = bool(version_key(have))
    observed = f"{what} {have}" if known else f"no {what} found"
    return Outcome(known and version_key(have) >= version_key(least), observed, f"{what} {least} or newer")


def _glibc(facts: HostFacts, wanted: Wanted) -> Iterator[Outcome]:
    if not wanted.min_glibc:
        yield Outcome(None, f"glibc {facts.glibc}; the engine's data state no minimum")
    else:
        yield _at_least(facts.glibc, wanted.min_glibc, "glibc")


def _systemd(facts: HostFacts, _: Wanted) -> Iterator[Outcome]:
    yield _at_least(facts.systemd, MIN_SYSTEMD, "systemd")


def _python(facts: HostFacts, wanted: Wanted) -> Iterator[Outcome]:
    observed = f"Python {facts.python}" if facts.python else "no Python where the runtimes take theirs from"
    if not wanted.requires_python:
        yield Outcome(None, f"{observed}; the engine's data state no range")
    else:
        good = bool(facts.python) and satisfies(facts.python, wanted.requires_python)
        yield Outcome(good, observed, f"Python {wanted.requires_python}")


CHECKS: Final[tuple[Check, ...]] = (
    Check("nvidia_smi", "fail", _nvidia_smi, "", "nvidia-smi(1)", gpu=True),
    Check(
        "driver_loaded",
        "fail",
        _driver_loaded,
        "load the module (modprobe nvidia) or install the driver; a fresh install may want a reboot",
        "/proc/driver/nvidia/version",
        gpu=True,
    ),
    Check(
        "driver_version",
        "fail",
        _driver_version,
        "install a newer NVIDIA driver and reboot, or choose an older tandem_engine",
        "min_driver in the engine's engine.yml (CUDA release notes, minimum driver)",
        gpu=True,
    ),
    Check(
        "gpu_count",
        "fail",
        _gpu_count,
        f"correct {SPLIT}; a card that lspci shows and nvidia-smi lacks fell off: read dmesg for XID lines",
        "nvidia-smi -q -x, /sys/bus/pci/devices",
        gpu=True,
    ),
    Check("gpu_declared", "fail", _gpu_declared, f"correct gpus in {SPLIT}", "nvidia-smi -q -x", gpu=True),
    Check(
        "gpu_order",
        "warn",
        _gpu_order,
        "count gpus in PCI order, which is what the engine is given (CUDA_DEVICE_ORDER=PCI_BUS_ID)",
        "nvidia-smi -q -x",
        gpu=True,
    ),
    Check(
        "gpu_model",
        "fail",
        _gpu_model,
        "put the host into the group of its hardware class, or correct driver_check_gpu_model of this one",
        "nvidia-smi -q -x",
        gpu=True,
    ),
    Check(
        "gpu_memory",
        "fail",
        _gpu_memory,
        "correct driver_check_min_gpu_memory_gib of the hardware class, or look at the card: nvidia-smi -q",
        "nvidia-smi -q -x",
        gpu=True,
    ),
    Check(
        "gpu_numa",
        "fail",
        _gpu_numa,
        f"correct gpus or numa_node in {SPLIT}",
        "/sys/bus/pci/devices/*/numa_node",
        gpu=True,
    ),
    Check("numa_node", "fail", _numa_node, f"correct numa_node in {SPLIT}", "/sys/devices/system/node"),
    Check("numactl", "fail", _numactl, "apt-get install numactl", "ExecStart of the units"),
    Check(
        "glibc",
        "fail",
        _glibc,
        "upgrade the distribution (Debian 12, Ubuntu 24.04 or newer)",
        "glibc in the engine's engine.yml (the tag of its wheels)",
    ),
    Check(
        "systemd",
        "fail",
        _systemd,
        "upgrade the distribution (Debian 12, Ubuntu 24.04 or newer)",
        "directives that the units use",
    ),
    Check(
        "python",
        "fail",
        _python,
        "install a Python of that range and set runtime_python to it, or change tandem_engine",
        "requires_python in the engine's engine.yml",
    ),
)


def judge_host(facts: HostFacts, wanted: Wanted, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Every finding about a host, in the order of the checks. Pure."""
    findings = []
    for check in checks:
        if check.gpu and wanted.device == "cpu":
            outcomes: Iterable[Outcome] = [Outcome(None, "tandem_device is cpu: no GPU is used")]
        else:
            outcomes = check.judge(facts, wanted)
        findings += [
            Finding(
                id=check.id,
                status="skip" if outcome.ok is None else "pass" if outcome.ok else check.severity,
                observed=outcome.observed,
                expected=outcome.expected,
                fix=outcome.fix or check.fix,
                source=check.source,
            )
            for outcome in outcomes
        ]
    return findings


def gather(
    device: Literal["cuda", "cpu"], python: str, smi_timeout_s: float = DEFAULT_TIMEOUT_S, sysfs: Path = SYSFS
) -> HostFacts:
    """Reads the host once: one nvidia-smi on a GPU host, one systemctl, one start of `python`, and files."""
    smi = query(smi_timeout_s) if device == "cuda" else SmiReport()
    return HostFacts(
        smi=smi,
        gpu_nodes={gpu.pci: pci_numa_node(gpu.pci, sysfs) for gpu in smi.gpus},
        cards_on_bus=nvidia_cards(sysfs),
        loaded_driver=_loaded_driver(),
        nodes=numa_nodes(sysfs),
        systemd=read_systemd(_said(("systemctl", "--version"))),
        glibc=(os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc "),
        kernel=platform.release(),
        python=_said((python, "-ISc", "import platform; print(platform.python_version())")),
        numactl=shutil.which("numactl") or "",
    )


def read_loaded_driver(text: str) -> str:
    """The version in /proc/driver/nvidia/version, of the proprietary module and of the open one alike.

    The first line ends `Kernel Module  580.159.04  Release …`, or `Kernel Module for x86_64  580.159.04 …`.
    """
    found = re.search(r"Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\s", text.partition("\n")[0] + " ")
    return found.group(1) if found else ""


def _loaded_driver() -> str:
    try:
        return read_loaded_driver(LOADED_DRIVER.read_text(errors="replace"))
    except OSError:
        return ""


def read_systemd(text: str) -> str:
    """The number in `systemd 252 (252.38-1~deb12u1)`, the first line of `systemctl --version`."""
    words = text.split()
    return words[1] if len(words) > 1 and words[0] == "systemd" else ""


def _said(argv: Sequence[str]) -> str:
    try:
        return run_tool(argv, VERSION_TIMEOUT_S).stdout.strip()
    except OSError:
        return ""
