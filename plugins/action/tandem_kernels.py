"""Control side of tandem_kernels: holds each package against its SHA-256, and carries those that a host lacks."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import ansible.module_utils
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

# Ansible finds module_utils for what it sends to hosts; the control node imports the same package from here.
ansible.module_utils.__path__.append(str(Path(__file__).resolve().parents[1] / "module_utils"))

from ansible.module_utils.tandem.carry import ask, hide_auth, send, take_ca_file
from ansible.module_utils.tandem.kernels import pack, tree_digest, wheel_name
from ansible.module_utils.tandem.problems import Problem, TandemError, report

MODULE = "tandem_kernels"


class ActionModule(ActionBase):
    """In check mode the question is the whole task."""

    TRANSFERS_FILES = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        ca_file, problems = take_ca_file(arguments)
        hide_auth(arguments)
        rows = arguments["kernels"] = [dict(row) for row in arguments["kernels"]]
        problems += [problem for row in rows for problem in faults(row)]
        if problems:
            raise AnsibleActionFail(report("The kernel packages cannot be put in place", problems))

        answer, settled = ask(self, MODULE, arguments, task_vars)
        if settled:
            return result | answer
        lacking = {row["id"] for row in answer["kernels"] if row["action"] != "none"}
        for row in rows:
            if row["id"] in lacking:
                row["archive"] = self._send_package(row)
        if ca_file is not None:
            arguments["ca_file"] = send(self, ca_file, "ca.pem")
        result |= self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
        return result

    def _send_package(self, row: dict[str, Any]) -> str:
        source = Path(row["source"])
        if row["kind"] == "wheel":
            return send(self, source, source.name)
        with tempfile.NamedTemporaryFile(prefix="tandem-", suffix=".tar.gz") as packed:
            pack(source, packed)
            packed.flush()
            return send(self, Path(packed.name), f"{row['id']}.tar.gz")


def faults(row: dict[str, Any]) -> list[Problem]:
    """Why a package is not what the plan says, if it is not."""
    where, source = f"tandem_kernels {row['name']}", Path(row["source"])
    try:
        if row["kind"] == "directory":
            if not source.is_dir():
                return [Problem(where, f"no directory {source}", "an importable Python tree on the control node")]
            found = tree_digest(source)
        else:
            if not source.is_file():
                return [Problem(where, f"no wheel {source}", "a .whl file on the control node")]
            wheel_name(source.name)
            found = hashlib.sha256(source.read_bytes()).hexdigest()
    except TandemError as error:
        return [Problem(where, str(error), "a package that can be copied as it is")]
    if found != row["sha256"]:
        return [Problem(f"{where}.sha256", row["sha256"], f"{found}, that of {source}")]
    return []
