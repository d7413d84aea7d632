#!/usr/bin/python
"""Checks driver, GPUs, NUMA nodes and system versions of a host against what the inventory declares."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tandem_driver_check
short_description: Check a host against the split that the inventory declares
description:
  - Gathers C(nvidia-smi -q -x), sysfs and versions in one go, judges every check, and reports all at once.
  - Keeps the findings as JSON on the host. Nothing in it changes by itself, so a second run changes nothing.
  - Fails, after all checks are judged, if one of severity C(fail) found a fault. Warnings never fail it.
options:
  device:
    description: What the engine computes on. The rows about GPUs are skipped with V(cpu).
    type: str
    choices: [cuda, cpu]
    required: true
  instances:
    description: Rows with C(name), C(gpus) and C(numa_node). Other keys are ignored.
    type: list
    elements: dict
    required: true
  min_driver:
    description: Lowest NVIDIA driver that the engine's CUDA runs with.
    type: str
    default: ""
  min_glibc:
    description: Lowest glibc that the engine's wheels run with.
    type: str
    default: ""
  python:
    description: The Python that runtimes link to.
    type: path
    default: /usr/bin/python3
  requires_python:
    description: Range of Python versions that the engine runs with, such as C(>=3.11,<3.14).
    type: str
    default: ""
  packages:
    description: Debian packages that the deploy installs by itself. Their absence is no fault.
    type: list
    elements: str
    default: []
  gpu_model:
    description: Regular expression that the product name of each used GPU has to contain.
    type: str
    default: ""
  min_gpu_memory_gib:
    description: Lowest total memory of each used GPU, in GiB as nvidia-smi counts it. 0 checks nothing.
    type: float
    default: 0
  severity:
    description: Severities that differ on this host, C({check id}={severity, reason}).
    type: dict
    default: {}
  timeout:
    description: Seconds that nvidia-smi may take.
    type: int
    default: 60
  report:
    description: Where the findings are kept as JSON on the host.
    type: path
    default: /var/lib/tandem/driver_check.json
"""

RETURN = r"""
findings:
  description:
    - One row a finding, with id, status (fail, warn, skip or pass), observed, expected, fix, source, reason.
  returned: success
  type: list
  elements: dict
gpus:
  description: The GPUs in PCI order, with index, pci (address), name, memory_mib and numa_node.
  returned: success
  type: list
  elements: dict
"""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tandem.files import write_atomically
from ansible.module_utils.tandem.findings import as_rows, count, override, read_overrides, table
from ansible.module_utils.tandem.preflight import CHECKS, Placement, Wanted, gather, judge_host
from ansible.module_utils.tandem.problems import Problem, report

SETTING = "driver_check_severity"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "device": {"type": "str", "choices": ["cuda", "cpu"], "required": True},
            "instances": {"type": "list", "elements": "dict", "required": True},
            "min_driver": {"type": "str", "default": ""},
            "min_glibc": {"type": "str", "default": ""},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "requires_python": {"type": "str", "default": ""},
            "packages": {"type": "list", "elements": "str", "default": []},
            "gpu_model": {"type": "str", "default": ""},
            "min_gpu_memory_gib": {"type": "float", "default": 0},
            "severity": {"type": "dict", "default": {}},
            "timeout": {"type": "int", "default": 60},
            "report": {"type": "path", "default": "/var/lib/tandem/driver_check.json"},
        },
        supports_check_mode=True,
    )
    given = module.params
    overrides, problems = read_overrides(given["severity"], [check.id for check in CHECKS], SETTING)
    try:
        re.compile(given["gpu_model"])
    except re.error as error:
        found = f"{given['gpu_model']!r} ({error})"
        problems.append(Problem("driver_check_gpu_model", found, "a regular expression"))
    if problems:
        module.fail_json(msg=report("The settings of driver_check are wrong", problems))

    wanted = Wanted(
        device=given["device"],
        placements=tuple(
            Placement(row["name"], tuple(row.get("gpus") or ()), row.get("numa_node")) for row in given["instances"]
        ),
        min_driver=given["min_driver"],
        min_glibc=given["min_glibc"],
        requires_python=given["requires_python"],
        gpu_model=given["gpu_model"],
        min_gpu_memory_gib=given["min_gpu_memory_gib"],
        packages=frozenset(given["packages"]),
    )
    facts = gather(wanted.device, given["python"], given["timeout"])
    findings = override(judge_host(facts, wanted), overrides)
    counts = count(findings)
    gpus = [
        {
            "index": gpu.index,
            "pci": gpu.pci,
            "name": gpu.name,
            "memory_mib": gpu.memory_mib,
            "numa_node": facts.gpu_nodes.get(gpu.pci),
        }
        for gpu in facts.smi.gpus
    ]
    record = {
        "format": 1,
        "counts": counts,
        "findings": as_rows(findings),
        "gpus": gpus,
        "host": {
            "driver": facts.smi.driver_version,
            "loaded_driver": facts.loaded_driver,
            "driver_cuda": facts.smi.cuda_version,
            "cards_on_bus": list(facts.cards_on_bus),
            "numa": asdict(facts.nodes),
            "kernel": facts.kernel,
            "glibc": facts.glibc,
            "systemd": facts.systemd,
            "python": facts.python,
        },
    }
    path = Path(given["report"])
    text = json.dumps(record, indent=2) + "\n"
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text != before and not module.check_mode:
        write_atomically(path, text)
    for row in findings:
        if row.status == "warn":
            told = f"{row.id}: {row.observed}; expected {row.expected}. "
            module.warn(told + (f"Accepted on this host: {row.reason}" if row.reason else f"Fix: {row.fix}"))
    result: dict[str, Any] = {
        "changed": text != before,
        "findings": record["findings"],
        "gpus": gpus,
        "msg": table(findings),
        "diff": {"before_header": str(path), "after_header": str(path), "before": before, "after": text},
    }
    if counts["fail"]:
        # The table alone: Ansible prints every key of a failed result, and the rows are in the report.
        module.fail_json(msg=result["msg"], changed=result["changed"])
    module.exit_json(**result)


if __name__ == "__main__":
    main()
