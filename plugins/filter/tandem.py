"""Filters of Tandem's templates; each is documented in the YAML file of its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ansible.module_utils

# Ansible finds module_utils for what it sends to hosts; the control node imports the same package from here.
ansible.module_utils.__path__.append(str(Path(__file__).resolve().parents[1] / "module_utils"))

from ansible.module_utils.tandem.unitfile import environment_file, exec_line


class FilterModule:
    """How command lines and environments are written for systemd."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"tandem_exec_line": exec_line, "tandem_environment_file": environment_file}
