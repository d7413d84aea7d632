#!/usr/bin/python
"""Puts the operator's kernel packages in place."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tandem_kernels
short_description: Put kernel packages in place
description:
  - Makes C(/opt/tandem/kernels/<id>) of each package that one of O(kinds) uses, a tree copied verbatim or a wheel
    installed without its dependencies, and holds it against its SHA-256. A package appears whole or not at all, and is
    never edited.
  - Later runs compare size, times and inode of each file with what was verified. One whose files changed is put in
    place again.
  - The action plugin of the same name checks the packages on the control node, and carries only those that are missing.
options:
  kernels:
    description: Rows of the plan.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name of the package, as in the inventory.
        type: str
        required: true
      id:
        description: Its directory's name. Changes with its content.
        type: str
        required: true
      kind:
        description: Whether it is a V(directory) or a V(wheel).
        type: str
        choices: [directory, wheel]
        required: true
      source:
        description: Where it is on the control node.
        type: path
      archive:
        description: Where the action plugin put it on the host.
        type: path
      sha256:
        description: Digest of the tree, or SHA-256 of the wheel.
        type: str
        required: true
      roles:
        description: Whom it serves (prefill, decode).
        type: list
        elements: str
        required: true
      env:
        description: Variables that enable it. Set by the units, not here.
        type: dict
        default: {}
  kinds:
    description: Put in place what serves one of these.
    type: list
    elements: str
    default: [prefill, decode]
  index_url:
    description: Package index, for uv alone where a host has none yet.
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
    description: The host's Python, which says what wheels fit.
    type: path
    default: /usr/bin/python3
  root:
    description: Where kernels, tools and cache are kept.
    type: path
    default: /opt/tandem
"""

RETURN = r"""
kernels:
  description: One row a package, with id, name, path, action (none or install) and reason.
  returned: always
  type: list
  elements: dict
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tandem import kernels, uv
from ansible.module_utils.tandem.paths import OPT
from ansible.module_utils.tandem.problems import TandemError

ROW: dict[str, Any] = {
    "name": {"type": "str", "required": True},
    "id": {"type": "str", "required": True},
    "kind": {"type": "str", "choices": ["directory", "wheel"], "required": True},
    "source": {"type": "path"},
    "archive": {"type": "path"},
    "sha256": {"type": "str", "required": True},
    "roles": {"type": "list", "elements": "str", "required": True},
    "env": {"type": "dict", "default": {}},
}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "kernels": {"type": "list", "elements": "dict", "required": True, "options": ROW},
            "kinds": {"type": "list", "elements": "str", "default": ["prefill", "decode"]},
            "index_url": {"type": "str", "default": "https://pypi.org/simple"},
            "index_auth": {"type": "str", "default": "", "no_log": True},
            "ca_file": {"type": "path"},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "root": {"type": "path", "default": OPT},
        },
        supports_check_mode=True,
    )
    given = module.params
    root = Path(given["root"])
    wanted = [
        kernels.Kernel(
            id=row["id"],
            name=row["name"],
            kind=row["kind"],
            sha256=row["sha256"],
            path=root / "kernels" / row["id"],
            archive=Path(row["archive"]) if row["archive"] else None,
        )
        for row in given["kernels"]
        if set(row["roles"]) & set(given["kinds"])
    ]
    try:
        settings = uv.Settings(
            root=root,
            index_url=given["index_url"],
            index_auth=given["index_auth"],
            ca_file=uv.ca_bundle(given["ca_file"], Path(module.tmpdir)),
        )
        rows = kernels.stage(wanted, uv.interpreter(given["python"]), settings, module.check_mode)
    except TandemError as error:
        module.fail_json(msg=str(error))
    made = [row for row in rows if row["action"] != "none"]
    result: dict[str, Any] = {"changed": bool(made), "kernels": rows}
    if made:
        after = {kernel.id: f"{kernel.kind}, sha256 {kernel.sha256}\n" for kernel in wanted}
        result["diff"] = [
            {"before_header": row["path"], "before": f"{row['reason']}\n", "after": after[row["id"]]} for row in made
        ]
    module.exit_json(**result)


if __name__ == "__main__":
    main()
