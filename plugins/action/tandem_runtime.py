"""Control side of tandem_runtime: carries locks and CA file to a host only where something is to be made."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import ansible.module_utils
import yaml
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

# Ansible finds module_utils for what it sends to hosts; the control node imports the same package from here.
ansible.module_utils.__path__.append(str(Path(__file__).resolve().parents[1] / "module_utils"))

from ansible.module_utils.tandem.carry import ask, hide_auth, send, take_ca_file
from ansible.module_utils.tandem.problems import Problem, report

MODULE = "tandem_runtime"
# What the module wants to know and the plan does not carry.
ENGINE_FACTS = ("requires_python", "disk_gib")


class ActionModule(ActionBase):
    """In check mode the question is the whole task."""

    TRANSFERS_FILES = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        ca_file, problems = take_ca_file(arguments)
        hide_auth(arguments)
        given = arguments["runtimes"]
        problems += [
            Problem(f"runtime {row['id']}", f"no file {row['lock']}", "the lock of its engine, made by `make locks`")
            for row in given
            if not Path(row["lock"]).is_file()
        ]
        if problems:
            raise AnsibleActionFail(report("The runtimes cannot be made", problems))
        rows = arguments["runtimes"] = [described(row) for row in given]

        answer, settled = ask(self, MODULE, arguments, task_vars)
        if settled:
            return result | answer
        lacking = {row["id"] for row in answer["runtimes"] if row["action"] != "none"}
        for row, before in zip(rows, given, strict=True):
            if row["id"] in lacking:
                row["lock"] = send(self, Path(before["lock"]), f"{row['id']}.lock")
        if ca_file is not None:
            arguments["ca_file"] = send(self, ca_file, "ca.pem")
        result |= self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
        return result


def described(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the plan without its lock, which is not on the host yet, but with what the control node knows of it."""
    lock = Path(row["lock"])
    facts = lock.with_name("engine.yml")
    engine = yaml.safe_load(facts.read_text(encoding="utf-8")) if facts.is_file() else {}
    return {
        **{name: value for name, value in row.items() if name != "lock"},
        **{name: engine[name] for name in ENGINE_FACTS if name in engine},
        "lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest(),
    }
