"""Runs one of our modules in this process, as Ansible would run it on a host."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from ansible.module_utils import basic


def run_module(main: Callable[[], None], params: Mapping[str, Any], *, check: bool = False) -> dict[str, Any]:
    """What the module returned. `failed` is always there."""
    arguments = {**params, "_ansible_check_mode": check, "_ansible_diff": True, "_ansible_remote_tmp": "/tmp"}  # noqa: S108
    out = io.StringIO()
    given: dict[str, Any] = {
        "_ANSIBLE_ARGS": json.dumps({"ANSIBLE_MODULE_ARGS": arguments}).encode(),
        "_ANSIBLE_PROFILE": "legacy",
    }
    with (
        mock.patch.multiple(basic, create=True, **given),
        # another test may have loaded Ansible's controller side; a module's warnings would then go to its display
        mock.patch("ansible.module_utils._internal.is_controller", new=False),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        main()
    result: dict[str, Any] = json.loads(out.getvalue())
    return {"failed": False, **result}
