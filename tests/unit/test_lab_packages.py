"""The lab's sitecustomize packages: alone, together in any order, and where there is no NIXL. NIXL is a fake here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGES = Path(__file__).resolve().parents[2] / "lab/packages"
SHIM, SABOTAGE = str(PACKAGES / "nixl_dram_shim"), str(PACKAGES / "nixl_sabotage")

FAKE = """
class Indices(list):
    def __getitem__(self, key): return Indices(list.__getitem__(self, key))
    def copy(self): return self

class nixl_agent:
    def register_memory(self, regions, mem_type=None, backends=()): return mem_type
    def get_reg_descs(self, descs, mem_type=None): return mem_type
    def get_xfer_descs(self, descs, mem_type=None): return mem_type
    def prep_xfer_dlist(self, agent_name, descs, mem_type=None): return mem_type
    def make_prepped_xfer(self, op, local, local_indices, remote, remote_indices): return list(local_indices)
    def transfer(self, handle): return f"posted {handle}"
    def check_xfer_state(self, handle): return "PROC"
"""

ASK = """
import json
from nixl_cu13._api import Indices, nixl_agent
agent = nixl_agent()
handle = agent.make_prepped_xfer("WRITE", 1, Indices([1, 2, 3]), 2, Indices([4, 5, 6]))
memory = [agent.register_memory([], "VRAM"), agent.get_xfer_descs([], mem_type="VRAM")]
memory.append(agent.prep_xfer_dlist("", [], "DRAM"))
print(json.dumps({"memory": memory, "transfer": agent.transfer(handle), "state": agent.check_xfer_state(handle)}))
"""


def run(tmp_path: Path, path: list[str], code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code with these directories on PYTHONPATH, the fake NIXL last."""
    package = tmp_path / "nixl_cu13"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "_api.py").write_text(FAKE, "utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*path, str(tmp_path)])} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def asked(tmp_path: Path, *path: str, **environment: str) -> dict[str, Any]:
    done = run(tmp_path, list(path), ASK, **environment)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_without_them_nothing_is_changed(tmp_path: Path) -> None:
    plain = asked(tmp_path)
    assert plain == {"memory": ["VRAM", "VRAM", "DRAM"], "transfer": "posted [1, 2, 3]", "state": "PROC"}


def test_the_shim_calls_vram_dram_and_touches_nothing_else(tmp_path: Path) -> None:
    shimmed = asked(tmp_path, SHIM)
    assert shimmed == {"memory": ["DRAM", "DRAM", "DRAM"], "transfer": "posted [1, 2, 3]", "state": "PROC"}


@pytest.mark.parametrize("path", [[SHIM, SABOTAGE], [SABOTAGE, SHIM], [SHIM, SABOTAGE, SHIM]])
def test_both_work_together_in_any_order(tmp_path: Path, path: list[str]) -> None:
    both = asked(tmp_path, *path)
    assert both == {"memory": ["DRAM", "DRAM", "DRAM"], "transfer": "posted [3, 2, 1]", "state": "PROC"}


def test_a_dropped_transfer_is_never_posted_and_says_done(tmp_path: Path) -> None:
    dropped = asked(tmp_path, SHIM, SABOTAGE, TANDEM_LAB_SABOTAGE="drop")
    assert (dropped["transfer"], dropped["state"]) == ("DONE", "DONE")


def test_an_unknown_kind_of_sabotage_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, [SABOTAGE], ASK, TANDEM_LAB_SABOTAGE="explode")
    assert done.returncode == 1
    assert "TANDEM_LAB_SABOTAGE is 'explode', expected one of corrupt, drop" in done.stderr


def test_sabotage_is_announced(tmp_path: Path) -> None:
    assert "TEST ONLY" in run(tmp_path, [SABOTAGE], ASK).stderr


def test_a_process_without_nixl_notices_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, [SHIM, SABOTAGE], "import json; print('nixl' in ' '.join(__import__('sys').modules))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_the_sitecustomize_that_they_hide_runs_as_well(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the next one')", "utf-8")
    assert run(tmp_path, [SABOTAGE, SHIM], "pass").stdout == "the next one\n"
