#!/usr/bin/python
"""Documentation of the action tandem_inventory, which runs on the control node alone."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tandem_inventory
short_description: Check the inventory and make the plan of a host
description:
  - Runs on the control node, contacts no host, and changes nothing.
  - Checks everything that the inventory alone can tell and reports all faults at once, each with what was found,
    what was expected, and the file and line to change.
  - Returns the host's plan. The prologue registers it as C(tandem_plan), which every role of Tandem reads.
options:
  check_files:
    description: Whether files that the inventory names must be on the control node. Not needed to render.
    type: bool
    default: true
attributes:
  check_mode: {support: full}
  diff_mode: {support: none}
author: [Tandem contributors]
"""

EXAMPLES = r"""
- name: Check the inventory and make the plan
  tandem_inventory:
  register: tandem_plan
"""

RETURN = r"""
host:
  description: The host's name in the inventory.
  returned: success
  type: str
engine:
  description: The engine release with its data. On hosts of the group tandem_gpu.
  returned: success
  type: dict
model:
  description: Name, revision and path of the model. On hosts of the group tandem_gpu.
  returned: success
  type: dict
runtimes:
  description: The Python environments that the host needs, each from a lock.
  returned: success
  type: list
kernels:
  description: The kernel packages that the host needs.
  returned: success
  type: list
instances:
  description: The instances of the host, the router included, with command line, environment, ports and time-outs.
  returned: success
  type: list
routers:
  description: The routers of the fleet and the servers behind them.
  returned: success
  type: list
keep_releases:
  description: Releases of an instance that are kept.
  returned: success
  type: int
package_index_url:
  description: The Python package index.
  returned: success
  type: str
package_ca_file:
  description: CA bundle for that index, on the control node.
  returned: success
  type: str
stop_foreign:
  description: Whether the operator consents to stop strangers on our ports.
  returned: success
  type: bool
stop_foreign_timeout:
  description: Seconds that a stranger gets to end.
  returned: success
  type: int
"""
