#!/usr/bin/python
"""What runs on a host, and whether that is what was deployed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tandem_status
short_description: What runs, and whether it is what was deployed
description:
  - Reads each instance's unit, its start record, C(current) and its readiness, and says in words what is not
    as it should be.
  - Finds units of Tandem that no instance of the plan has any more.
  - Changes nothing.
options:
  instances:
    description: Instances of the host's plan.
    type: list
    elements: dict
    required: true
attributes:
  check_mode: {support: full}
  diff_mode: {support: none}
author: [Tandem contributors]
"""

EXAMPLES = r"""
- name: Look
  tandem_status:
    instances: "{{ tandem_plan.instances }}"
"""

RETURN = r"""
instances:
  description: State of each instance; C(drift) is empty where all is as deployed.
  returned: always
  type: list
table:
  description: The same as lines of text.
  returned: always
  type: list
"""

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tandem import releases, systemd
from ansible.module_utils.tandem.paths import UNITS


def main() -> None:
    module = AnsibleModule(
        argument_spec={"instances": {"type": "list", "elements": "dict", "required": True}},
        supports_check_mode=True,
    )
    planned = {instance["unit"]: instance for instance in module.params["instances"]}
    found = [look(instance) for instance in planned.values()]
    strangers = [path.name for path in sorted(Path(UNITS).glob("tandem-*.service")) if path.name not in planned]
    found += [
        {"name": name.removeprefix("tandem-").removesuffix(".service"), **state(name), "drift": ["no row declares it"]}
        for name in strangers
    ]
    module.exit_json(changed=False, instances=found, table=[line(row) for row in found])


def state(unit_name: str) -> dict[str, Any]:
    """What systemd says of a unit."""
    unit = systemd.show(unit_name)
    return {
        "unit": unit_name,
        "active": unit.active,
        "sub": unit.sub,
        "main_pid": unit.main_pid,
        "restarts": unit.restarts,
        "since": unit.since,
    }


def look(instance: dict[str, Any]) -> dict[str, Any]:
    """State and drift of one planned instance."""
    name = instance["name"]
    now = state(instance["unit"])
    record, current = releases.record(name), releases.current(name)
    running = record["release"] if record and record["main_pid"] == now["main_pid"] else None
    ready = bool(running) and all(answers(check["url"]) for check in instance["ready"])
    drift = []
    if current is None:
        drift.append("never deployed")
    elif running is None:
        drift.append(f"not running (unit is {now['active']}), {current} should be")
    elif running != current:
        drift.append(f"runs {running}, {current} is deployed")
    if current and not releases.unit_installed(name, current):
        drift.append(f"{UNITS}/{instance['unit']} was changed by hand")
    if running and not ready:
        drift.append("does not answer as ready")
    return {
        "name": name,
        "kind": instance["kind"],
        **now,
        "running": running,
        "current": current,
        "ready": ready,
        "drift": drift,
    }


def answers(url: str) -> bool:
    """Whether a GET is a 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status) == 200
    except (OSError, urllib.error.URLError):
        return False


def line(row: dict[str, Any]) -> str:
    """One instance as a line."""
    verdict = "; ".join(row["drift"]) or "as deployed"
    return (
        f"{row['name']:<14} {row['active']:<10} pid {row['main_pid']:<8} restarts {row['restarts']:<3}"
        f" release {row.get('running') or '-':<12} since {row['since'] or '-'}: {verdict}"
    )


if __name__ == "__main__":
    main()
