"""Control side of tandem_release: renders each instance's unit from the role's template, then runs the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ansible.module_utils
from ansible.plugins.action import ActionBase

# Ansible finds module_utils for what it sends to hosts; the control node imports the same package from here.
ansible.module_utils.__path__.append(str(Path(__file__).resolve().parents[1] / "module_utils"))

from ansible.module_utils.tandem.releases import HELPER


class ActionModule(ActionBase):
    """Adds `units` and `helper` to what the task says, and merges the staged releases into the fact `tandem_staged`."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        arguments = dict(self._task.args)
        template = self._find_needle("templates", arguments.pop("template"))
        lookup = self._shared_loader_obj.lookup_loader.get(
            "ansible.builtin.template", loader=self._loader, templar=self._templar
        )
        arguments["units"] = {
            instance["name"]: lookup.run([template], variables={**variables, "instance": instance})[0]
            for instance in arguments["instances"]
        }
        arguments["helper"] = Path(self._find_needle("files", HELPER)).read_text()
        result |= self._execute_module(module_name="tandem_release", module_args=arguments, task_vars=variables)
        staged = {**variables["ansible_facts"].get("tandem_staged", {}), **result.get("releases", {})}
        return {**result, "ansible_facts": {"tandem_staged": staged}}
