"""Where a host's NUMA nodes and PCI cards are, from sysfs.

`sysfs` is a parameter of each function for the unit tests alone; no module offers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .nvidia import pci_key

SYSFS: Final = Path("/sys")
NVIDIA_VENDOR: Final = "0x10de"
# PCI classes, without the programming interface: VGA controller, and 3D controller (data-centre cards).
DISPLAY_CLASSES: Final = ("0x0300", "0x0302")


@dataclass(frozen=True)
class NumaNodes:
    """Online nodes, and which of them have CPUs and memory: a node of GPU or CXL memory may lack either.

    All are empty on a kernel without NUMA support.
    """

    online: tuple[int, ...] = ()
    with_cpus: tuple[int, ...] = ()
    with_memory: tuple[int, ...] = ()


def parse_list(text: str) -> tuple[int, ...]:
    """The kernel's list format, `0-3,8`, as numbers. Empty text is an empty list."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def numa_nodes(sysfs: Path = SYSFS) -> NumaNodes:
    """The nodes of this host."""
    folder = sysfs / "devices/system/node"
    return NumaNodes(*(parse_list(_read(folder / name)) for name in ("online", "has_cpu", "has_memory")))


def pci_numa_node(address: str, sysfs: Path = SYSFS) -> int | None:
    """NUMA node of a PCI device: -1 where the firmware names none, None where sysfs has no such device."""
    text = _read(sysfs / "bus/pci/devices" / address / "numa_node").strip()
    return int(text) if text else None


def nvidia_cards(sysfs: Path = SYSFS) -> tuple[str, ...]:
    """Addresses of the NVIDIA GPUs on the bus, in PCI order, whether or not a driver has them."""
    return tuple(
        sorted(
            (
                device.name
                for device in (sysfs / "bus/pci/devices").glob("*")
                if _read(device / "vendor").strip() == NVIDIA_VENDOR
                and _read(device / "class").startswith(DISPLAY_CLASSES)
            ),
            key=pci_key,
        )
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
