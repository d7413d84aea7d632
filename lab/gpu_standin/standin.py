"""A stand-in for nvidia-smi: prints `-q -x` of a described host, made out of one recorded card.

Nothing here is a driver. README.md beside this file has the description's keys, and what it cannot show.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORDING = Path(__file__).resolve().parent / "h200.xml"
DESCRIPTION = "/etc/tandem-gpu-standin.json"


def xml_of(description: Mapping[str, Any]) -> str:
    """The XML that the described host would print. What it does not state is the recorded H200's."""
    root = ET.parse(RECORDING).getroot()  # noqa: S314 - the recording beside this file
    recorded = root.find("gpu")
    if recorded is None:
        raise ValueError(f"{RECORDING} has no card")
    cards = [_card(recorded, minor, row) for minor, row in enumerate(description["gpus"])]
    root.remove(recorded)
    root.extend(cards)
    _set(root, "driver_version", description.get("driver_version"))
    _set(root, "cuda_version", description.get("cuda_version"))
    _set(root, "attached_gpus", len(cards))
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n'
    return head + ET.tostring(root, encoding="unicode") + "\n"


def _card(recorded: ET.Element, minor: int, row: Mapping[str, Any]) -> ET.Element:
    card = copy.deepcopy(recorded)
    domain, bus, rest = row["pci"].split(":")
    bus_id = f"{int(domain, 16):08X}:{bus.upper()}:{rest.upper()}"
    card.set("id", bus_id)
    _set(card, "pci/pci_bus_id", bus_id)
    _set(card, "pci/pci_domain", domain.upper())
    _set(card, "pci/pci_bus", bus.upper())
    _set(card, "pci/pci_device", rest.partition(".")[0].upper())
    _set(card, "minor_number", minor)
    _set(card, "product_name", row.get("name"))
    _set(card, "product_architecture", row.get("architecture"))
    memory = row.get("memory_mib")
    _set(card, "fb_memory_usage/total", f"{memory} MiB" if isinstance(memory, int) else memory)
    return card


def _set(node: ET.Element, path: str, value: object) -> None:
    found = node.find(path)
    if found is None:
        raise ValueError(f"the recording has no {path}")
    if value is not None:
        found.text = str(value)


def main(arguments: list[str]) -> int:
    description = json.loads(Path(os.environ.get("TANDEM_GPU_STANDIN", DESCRIPTION)).read_text(encoding="utf-8"))
    behaviour = description.get("behaviour", "answer")
    if behaviour == "hang":
        while True:
            time.sleep(60)
    if behaviour == "fail":
        print(description["message"], file=sys.stderr)
        return int(description["exit_code"])
    if sorted(arguments) != ["-q", "-x"]:
        print(f"GPU stand-in: only -q -x is stood in for, not {arguments}", file=sys.stderr)
        return 2
    sys.stdout.write(xml_of(description))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
