#!/usr/bin/python
"""Switches instances to staged releases, by comparing what is desired with what runs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tandem_switch
short_description: Make instances run the releases they should run
description:
  - Compares, for each instance, the release that is desired with the one that runs. What runs is known from
    the start record,
    which is valid only while its process is. Nothing changed, nothing restarts; changed on disk but not
    running, it restarts.
  - Stops what must change, switches unit and C(current), then starts everything that is to start in one job.
    A start returns when
    the instance is ready.
  - Where an instance does not become ready, all instances of this call go back to the release that they ran
    before, and the task
    fails with the reason and the last lines of the journal.
options:
  releases:
    description: The desired release of each instance, by name.
    type: dict
    required: true
  keep:
    description: Releases of an instance that are kept, the newest first. At least 2, so that there is a way back.
    type: int
    default: 5
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
author: [Tandem contributors]
"""

EXAMPLES = r"""
- name: Switch
  tandem_switch:
    releases: "{{ tandem_staged }}"
"""

RETURN = r"""
actions:
  description: For each instance C(none), C(install), C(start) or C(restart), and why.
  returned: always
  type: dict
previous:
  description: The release that each changed instance was switched from, for a way back.
  returned: always
  type: dict
seconds:
  description: How long stopping and starting took, in seconds.
  returned: when something was switched
  type: dict
collected:
  description: Old releases that were removed.
  returned: always
  type: list
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tandem import releases, systemd
from ansible.module_utils.tandem.paths import UNITS
from ansible.module_utils.tandem.problems import TandemError


@dataclass(frozen=True)
class Step:
    """What is to be done with an instance, and why. `previous` is the release that `current` names now."""

    instance: str
    release: str
    action: str
    reason: str
    previous: str | None

    @property
    def unit(self) -> str:
        return f"tandem-{self.instance}.service"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "releases": {"type": "dict", "required": True},
            "keep": {"type": "int", "default": 5},
        },
        supports_check_mode=True,
    )
    if module.params["keep"] < 2:
        module.fail_json(
            msg="keep: found less than 2; expected 2 or more, so that there is a way back (tandem_keep_releases)"
        )
    try:
        module.exit_json(**run(module.params["releases"], module.params["keep"], module.check_mode))
    except TandemError as error:
        module.fail_json(msg=str(error))


def run(desired: dict[str, str], keep: int, check_mode: bool) -> dict[str, Any]:
    """Does the switch. Returns the module's result; raises TandemError once everything is back as it was."""
    steps = [decide(instance, release) for instance, release in sorted(desired.items())]
    moving = [step for step in steps if step.action != "none"]
    result: dict[str, Any] = {
        "changed": bool(moving),
        "actions": {step.instance: {"action": step.action, "reason": step.reason} for step in steps},
        "previous": {step.instance: step.previous for step in moving if step.previous},
        "collected": [],
        "diff": [difference(step) for step in moving],
    }
    if check_mode:
        return result
    if moving:
        result["seconds"] = switch(moving)
    result["collected"] = [
        f"{step.instance}/{name}" for step in steps for name in releases.collect(step.instance, keep)
    ]
    return result


def difference(step: Step) -> dict[str, str]:
    """What changes for an instance, down to the flag, where both releases are on the host."""
    release = releases.Release(step.instance, step.release, {})
    staged = releases.load(step.instance, step.release).text() if release.staged() else ""
    return {
        "before_header": f"{step.instance}: {step.previous or 'nothing'}",
        "after_header": f"{step.instance}: {step.release} ({step.action}: {step.reason})",
        "before": releases.current_text(step.instance) if staged else f"{step.previous or 'nothing'}\n",
        "after": staged or f"{step.release}\n",
    }


def decide(instance: str, release: str) -> Step:
    """Compares the desired release with the running one."""
    unit = systemd.show(f"tandem-{instance}.service")
    record = releases.record(instance)
    action, reason = "none", "runs this release"
    if unit.active in ("inactive", "failed"):
        action, reason = "start", f"is {unit.active}"
    elif record is None or record["main_pid"] != unit.main_pid:
        action, reason = "restart", "there is no valid record of what runs"
    elif record["release"] != release:
        action, reason = "restart", f"runs {record['release']}"
    elif unit.active != "active":
        action, reason = "start", f"is {unit.active}"
    elif releases.current(instance) != release or not releases.unit_installed(instance, release):
        action, reason = "install", "the installed unit or `current` is of another release"
    elif not unit.enabled:
        action, reason = "install", "is not enabled"
    return Step(instance, release, action, reason, releases.current(instance))


def switch(steps: list[Step]) -> dict[str, float]:
    """Stop, switch, start. On failure every instance goes back to its previous release, then TandemError is raised."""
    for step in steps:
        releases.load(step.instance, step.release)
    began = time.monotonic()
    systemd.stop([step.unit for step in steps if step.action == "restart"])
    stopped = time.monotonic()
    install({step.instance: step.release for step in steps})
    if systemd.start([step.unit for step in steps]):
        return {"stop": round(stopped - began, 1), "start": round(time.monotonic() - stopped, 1)}
    raise TandemError(go_back(steps))


def install(chosen: dict[str, str]) -> None:
    """Unit file and `current` of each instance, each switched atomically; then systemd reads them."""
    for instance, release in chosen.items():
        name = f"tandem-{instance}.service"
        partial = Path(UNITS, f".{name}.partial")
        partial.write_text(releases.load(instance, release).files[name])
        partial.chmod(0o644)
        partial.rename(Path(UNITS, name))
        releases.point(instance, release)
    systemd.run("daemon-reload")
    systemd.run("enable", "--quiet", *(f"tandem-{instance}.service" for instance in chosen))


def go_back(steps: list[Step]) -> str:
    """Restores what ran before. Returns the whole story for the operator."""
    story = [explain(step) for step in steps if systemd.show(step.unit).active != "active"]
    # Stopping first ends the restarts of what failed.
    systemd.stop([step.unit for step in steps])
    previous = {step.instance: step.previous for step in steps if step.previous and step.previous != step.release}
    without = [step.instance for step in steps if step.instance not in previous]
    if previous:
        install({name: release for name, release in previous.items() if release})
        back = systemd.start([f"tandem-{name}.service" for name in previous])
        ran = ", ".join(f"{name} ({release})" for name, release in previous.items())
        story.append(
            f"The previous release runs again: {ran}."
            if back
            else f"The previous release does not start either: {ran}. Both are down."
        )
    if without:
        story.append(f"Stopped, since there is no earlier release to go back to: {', '.join(without)}.")
    return "\n".join(story)


def explain(step: Step) -> str:
    """Why an instance did not become ready."""
    unit = systemd.show(step.unit)
    return (
        f"{step.instance} did not become ready with release {step.release} (unit {unit.active}, result {unit.result})."
        f" Its last words, from `journalctl -u {step.unit}`:\n{systemd.journal(step.unit)}"
    )


if __name__ == "__main__":
    main()
