#!/usr/bin/python
"""Finds processes that Tandem did not start on the ports of its instances, and stops them with consent."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tandem_ports
short_description: Find strangers on our ports, and stop them only with consent
description:
  - Names every process that listens where one of our instances has to, and that does not run in that instance's unit.
  - Without consent it fails, naming them all. With consent it sends each server's main process a SIGTERM and waits
    until its whole process tree has ended and the ports are free. It never kills.
  - A listener on another address of the host that leaves ours free is no stranger.
options:
  ports:
    description: Rows with C(port), C(address), C(instance) and, for the messages, C(use). Other keys are ignored.
    type: list
    elements: dict
    required: true
  stop:
    description: Consent to stop them.
    type: bool
    default: false
  timeout:
    description: Seconds that they get to end.
    type: int
    default: 60
"""

RETURN = r"""
strangers:
  description: Who was found, with port, listener, instance, pid, user, unit and command (secrets masked).
  returned: always
  type: list
  elements: dict
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tandem.ports import CONSENT, Claim, Stranger, find_strangers, stop, stop_problem


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "ports": {"type": "list", "elements": "dict", "required": True},
            "stop": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    claims = [
        Claim(int(row["port"]), row["address"], row["instance"], row.get("use", "port"))
        for row in module.params["ports"]
    ]
    try:
        strangers = find_strangers(claims)
    except OSError as error:
        module.fail_json(msg=f"An address of this host cannot be resolved: {error}; correct tandem_address")
    result: dict[str, Any] = {"strangers": _rows(strangers)}
    if not strangers:
        module.exit_json(changed=False, msg="nobody else is on our ports", **result)
    named = "\n".join(f"  {row}" for row in strangers)
    if not module.params["stop"]:
        module.fail_json(
            msg=f"Processes that Tandem did not start are on its ports, nothing was touched:\n{named}\n"
            "Expected: the ports free, or held by the instance's own unit. Stop them yourself, give the instance "
            f"another port (tandem_instances), or let a run stop them gracefully with -e {CONSENT}=true.",
            **result,
        )
    unstoppable = [f"  {row}: {why}" for row in strangers if (why := stop_problem(row))]
    if unstoppable:
        listed = "\n".join(unstoppable)
        module.fail_json(
            msg=f"These are on Tandem's ports and are not stopped, nothing was touched:\n{listed}", **result
        )
    if module.check_mode:
        module.exit_json(changed=True, msg=f"would be asked to end:\n{named}", **result)
    left, there = stop(strangers, claims, module.params["timeout"])
    if left or there:
        lives = [f"  pid {row.pid} of user {row.user} did not end: {row.command}" for row in left]
        lives += [
            f"  {row}" for row in there if not {process.pid for process in row.holders} & {row.pid for row in left}
        ]
        listed = "\n".join(lives)
        module.fail_json(
            changed=True,
            msg=f"{module.params['timeout']} s after SIGTERM Tandem's ports are not free:\n{listed}\n"
            f"It is never killed: end it by hand, or give it longer ({CONSENT}_timeout). One that came back is started "
            "again by something (systemctl status PID): stop that.",
            **result,
        )
    module.exit_json(changed=True, msg=f"asked to end, and gone:\n{named}", **result)


def _rows(strangers: list[Stranger]) -> list[dict[str, Any]]:
    return [
        {
            "port": row.claim.port,
            "instance": row.claim.instance,
            "listener": str(row.listener),
            "pid": process.pid if process else None,
            "user": process.user if process else "",
            "unit": process.unit if process else "",
            "command": process.command if process else "",
        }
        for row in strangers
        for process in (row.holders or (None,))
    ]


if __name__ == "__main__":
    main()
