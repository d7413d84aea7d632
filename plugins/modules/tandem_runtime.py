#!/usr/bin/python
"""Makes the Python environments that engines and routers run in."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tandem_runtime
short_description: Make Python environments from locks
description:
  - Installs each runtime that serves one of O(kinds) from its lock, every file held against its hash, with a pinned uv
    that it fetches by itself. A runtime appears whole or not at all, and is never edited.
  - A complete runtime costs one small file read. Nothing is imported and no lock is sent then.
  - The action plugin of the same name carries locks and CA file to the host when something is to be made.
options:
  runtimes:
    description: Rows of the plan.
    type: list
    elements: dict
    required: true
    suboptions:
      id:
        description: Name of the runtime. Changes with its lock.
        type: str
        required: true
      path:
        description: Its directory on the host.
        type: path
        required: true
      engine:
        description: The engine release that it is made for.
        type: str
        required: true
      kinds:
        description: Whom it serves (prefill, decode, router).
        type: list
        elements: str
        required: true
      lock:
        description: The lock, a path on the control node. The action plugin makes it one on the host.
        type: path
      lock_sha256:
        description: Its SHA-256, from the action plugin.
        type: str
      import_check:
        description: Modules that have to import, separated by commas. Their bytecode is written on the way.
        type: str
        default: ""
      requires_python:
        description: Range of Python versions, such as C(>=3.11,<3.14), from the engine's data by the action plugin.
        type: str
        default: ""
      disk_gib:
        description: Space that a first installation takes, from the engine's data by the action plugin.
        type: float
        default: 0
      packages:
        description: Debian packages that it needs. Not read here.
        type: list
        elements: str
        default: []
  kinds:
    description: Make the runtimes that serve one of these.
    type: list
    elements: str
    default: [prefill, decode, router]
  index_url:
    description: Package index. User and password in it are kept out of command lines and messages.
    type: str
    default: https://pypi.org/simple
  index_auth:
    description: C(user:password) of O(index_url), from the action plugin.
    type: str
    default: ""
  ca_file:
    description: CA bundle for the index beside the system's, a path on the control node.
    type: path
  python:
    description: The host's Python that runtimes link to.
    type: path
    default: /usr/bin/python3
  root:
    description: Where tools and cache are kept.
    type: path
    default: /opt/tandem
"""

RETURN = r"""
runtimes:
  description: One row a runtime, with id, path, action (none or install), reason and, when it was made, seconds.
  returned: always
  type: list
  elements: dict
"""

import hashlib
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tandem import uv
from ansible.module_utils.tandem.paths import OPT
from ansible.module_utils.tandem.problems import TandemError

ROW: dict[str, Any] = {
    "id": {"type": "str", "required": True},
    "path": {"type": "path", "required": True},
    "engine": {"type": "str", "required": True},
    "kinds": {"type": "list", "elements": "str", "required": True},
    "lock": {"type": "path"},
    "lock_sha256": {"type": "str"},
    "import_check": {"type": "str", "default": ""},
    "requires_python": {"type": "str", "default": ""},
    "disk_gib": {"type": "float", "default": 0},
    "packages": {"type": "list", "elements": "str", "default": []},
}


def wanted(row: dict[str, Any]) -> uv.Runtime:
    """A row of the plan as the library has it. Raises TandemError for a lock that is not the one announced."""
    lock = Path(row["lock"]) if row["lock"] else None
    digest = row["lock_sha256"]
    if lock is not None:
        found = hashlib.sha256(lock.read_bytes()).hexdigest()
        if digest not in (None, found):
            raise TandemError(f"runtime {row['id']}: found a lock of sha256 {found} at {lock}, expected {digest}")
        digest = found
    return uv.Runtime(
        id=row["id"],
        path=Path(row["path"]),
        engine=row["engine"],
        lock_sha256=digest or "",
        lock=lock,
        import_check=row["import_check"],
        requires_python=row["requires_python"],
        disk_gib=row["disk_gib"],
    )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "runtimes": {"type": "list", "elements": "dict", "required": True, "options": ROW},
            "kinds": {"type": "list", "elements": "str", "default": ["prefill", "decode", "router"]},
            "index_url": {"type": "str", "default": "https://pypi.org/simple"},
            "index_auth": {"type": "str", "default": "", "no_log": True},
            "ca_file": {"type": "path"},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "root": {"type": "path", "default": OPT},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        settings = uv.Settings(
            root=Path(given["root"]),
            index_url=given["index_url"],
            index_auth=given["index_auth"],
            ca_file=uv.ca_bundle(given["ca_file"], Path(module.tmpdir)),
        )
        runtimes = [wanted(row) for row in given["runtimes"] if set(row["kinds"]) & set(given["kinds"])]
        rows = make(runtimes, uv.interpreter(given["python"]), settings, module.check_mode)
    except TandemError as error:
        module.fail_json(msg=str(error))
    made = [row for row in rows if row["action"] != "none"]
    result: dict[str, Any] = {"changed": bool(made), "runtimes": rows}
    if made:
        result["diff"] = [
            {"before_header": row["path"], "before": f"{row['reason']}\n", "after": row["after"]} for row in made
        ]
    module.exit_json(**result)


def make(
    runtimes: list[uv.Runtime], python: uv.Interpreter, settings: uv.Settings, check_mode: bool
) -> list[dict[str, Any]]:
    """One row a runtime. All that can be known to fail is found before the first is made."""
    reasons = {runtime.id: uv.missing(runtime, python) for runtime in runtimes}
    for runtime in runtimes:
        if reasons[runtime.id]:
            uv.check(runtime, python)
            uv.check_space(runtime, settings)
    if check_mode or not any(reasons.values()):
        return [_row(runtime, python, reasons[runtime.id]) for runtime in runtimes]
    rows = []
    with uv.exclusive(settings.root):
        for runtime in runtimes:
            # Asked again: another run may have made it while this one waited.
            reason = uv.missing(runtime, python)
            rows.append(_row(runtime, python, reason))
            if reason:
                rows[-1]["seconds"] = uv.install(runtime, python, settings)["seconds"]
    return rows


def _row(runtime: uv.Runtime, python: uv.Interpreter, reason: str) -> dict[str, Any]:
    row = {"id": runtime.id, "path": str(runtime.path), "action": "install" if reason else "none", "reason": reason}
    if reason:
        row["after"] = f"{runtime.engine}, lock sha256 {runtime.lock_sha256}, Python {python.version}\n"
    return row


if __name__ == "__main__":
    main()
