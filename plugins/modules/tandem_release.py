#!/usr/bin/python
"""Stages releases of instances. Nothing is switched or restarted."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tandem_release
short_description: Stage a release of each instance beside the live one
description:
  - A release is a directory with everything that an instance needs to start, C(unit), C(env), C(argv),
    C(manifest.json) and the
    unit's helper, under C(/var/lib/tandem/releases/<instance>/<id>). Its id is a hash of its content.
  - Each unit is verified by C(systemd-analyze) before it is staged.
  - Sets the fact C(tandem_staged), which the switch reads.
options:
  instances:
    description: Instances of the host's plan.
    type: list
    elements: dict
    required: true
  template:
    description: Template of the unit, in the role's templates. It sees C(instance).
    type: str
  units:
    description: The rendered units by instance name. Filled in on the control node.
    type: dict
    required: true
  helper:
    description: Text of the unit's helper. Filled in on the control node.
    type: str
    required: true
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
author: [Tandem contributors]
"""

EXAMPLES = r"""
- name: Stage the releases
  tandem_release:
    instances: "{{ tandem_plan.instances }}"
    template: instance.service.j2
"""

RETURN = r"""
releases:
  description: The release of each instance, by name.
  returned: always
  type: dict
"""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tandem import releases
from ansible.module_utils.tandem.problems import TandemError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "instances": {"type": "list", "elements": "dict", "required": True},
            "template": {"type": "str"},
            "units": {"type": "dict", "required": True},
            "helper": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**run(module.params, module.check_mode))
    except TandemError as error:
        module.fail_json(msg=str(error))


def run(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """Stages what is not staged yet. Returns the module's result."""
    built = []
    for instance in params["instances"]:
        addresses = gpu_addresses(instance, check_mode)
        built.append(releases.build(instance, params["units"][instance["name"]], params["helper"], addresses))
    new = [release for release in built if not release.staged()]
    for release in new:
        if not check_mode:
            verify(release)
            releases.stage(release)
    return {
        "changed": bool(new),
        "releases": {release.instance: release.id for release in built},
        "diff": [
            {
                "before_header": f"{release.instance}, current release",
                "after_header": f"{release.instance}, release {release.id}",
                "before": releases.current_text(release.instance),
                "after": release.text(),
            }
            for release in new
        ],
    }


def gpu_addresses(instance: dict[str, Any], check_mode: bool) -> dict[str, str]:
    """The PCI address of each of the instance's GPUs now, by nvidia-smi index."""
    if not instance["gpus"]:
        return {}
    if not shutil.which("nvidia-smi"):
        if check_mode:
            return {}
        raise TandemError(
            f"{instance['name']}: found no nvidia-smi; expected it, to record which GPUs are meant. Install the driver."
        )
    command = ["nvidia-smi", "--query-gpu=index,pci.bus_id", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise TandemError(f"{instance['name']}: nvidia-smi failed: {error}") from error
    rows = (line.split(",") for line in text.splitlines() if line.strip())
    found = {int(index): address.strip().lower() for index, address in rows}
    missing = [gpu for gpu in instance["gpus"] if gpu not in found]
    if missing:
        raise TandemError(
            f"{instance['name']}: found GPUs {sorted(found)}; expected {missing} too. Mend host or tandem_instances."
        )
    return {str(gpu): found[gpu] for gpu in instance["gpus"]}


def verify(release: releases.Release) -> None:
    """Raises TandemError with systemd's own words where it refuses the unit."""
    name = f"tandem-{release.instance}.service"
    with tempfile.TemporaryDirectory(prefix="tandem-verify-") as folder:
        unit = Path(folder, name)
        unit.write_text(release.files[name])
        command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if name in line]
    if done.returncode or complaints:
        raise TandemError(f"{name}: systemd refuses the unit: {' '.join(complaints) or done.stderr.strip()}")


if __name__ == "__main__":
    main()
