"""Makes `ansible.module_utils.tandem` importable as it is inside a run, without an Ansible process."""

from __future__ import annotations

import sys
from pathlib import Path

import ansible.module_utils

ROOT = Path(__file__).resolve().parent.parent
ansible.module_utils.__path__.append(str(ROOT / "plugins" / "module_utils"))
for folder in (".", "plugins/modules", "plugins/action", "lab", "tools", "roles/instance/files"):
    sys.path.insert(0, str(ROOT / folder))
