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
  - Sets the fact C(tandem_plan), which every role of Tandem reads.
options: {}
attributes:
  check_mode: {support: full}
  diff_mode: {support: none}
author: [Tandem contributors]
"""

EXAMPLES = r"""
- name: Check the inventory and make the plan
  tandem_inventory:
"""

RETURN = r"""
ansible_facts:
  description: The fact C(tandem_plan).
  returned: success
  type: dict
  contains:
    tandem_plan:
      description: Engine, runtimes, model, kernels and instances of the host, with command lines and environments.
      returned: success
      type: dict
"""
