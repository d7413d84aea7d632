"""The control sides of tandem_runtime and tandem_kernels in real runs against this machine: what is sent, and when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.tandem.kernels import tree_digest
from test_runtime import Host, tree

ROOT = Path(__file__).resolve().parents[2]
FILES = {"engine-1.0.lock", "kernel-1.tar.gz"}
PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - tandem_runtime: "{{ given.runtime }}"
      register: runtime
    - tandem_kernels: "{{ given.kernels }}"
      register: kernels
    - ansible.builtin.copy:
        content: "{{ {'runtime': runtime, 'kernels': kernels} }}"
        dest: "{{ given.out }}"
        mode: "0644"
      check_mode: false
"""


class Play:
    """One play with both tasks against this machine."""

    def __init__(self, folder: Path) -> None:
        self.host = Host(folder)
        self.out, self.play = folder / "out.json", folder / "play.yml"
        self.play.write_text(PLAY, encoding="utf-8")
        self.engine = folder / "engines/engine-1.0"
        self.engine.mkdir(parents=True)
        self.lock = self.engine / "requirements.lock"
        self.lock.write_text(self.host.package(), encoding="utf-8")
        (self.engine / "engine.yml").write_text("requires_python: '>=3.11'\ndisk_gib: 0.01\n", encoding="utf-8")
        self.tree = folder / "kernel"
        self.tree.mkdir()
        (self.tree / "kernel.py").write_text("X = 1\n", encoding="utf-8")
        self.kernel = {
            "name": "kernel",
            "id": "kernel-1",
            "kind": "directory",
            "source": str(self.tree),
            "sha256": tree_digest(self.tree),
            "roles": ["decode"],
            "env": {},
        }

    def run(self, *options: str, **changes: Any) -> tuple[dict[str, Any], str]:
        """Both results (none if a task failed), and all that was printed."""
        row = self.host.row(lock=str(self.lock))
        given = {
            "runtime": {**self.host.params(row), **changes},
            "kernels": {"kernels": [self.kernel], "root": str(self.host.root)},
            "out": str(self.out),
        }
        self.out.unlink(missing_ok=True)
        environment = os.environ | {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
        program = Path(sys.executable).parent / "ansible-playbook"
        argv = [str(program), "-vvv", "-i", "localhost,", "-c", "local", "-e", json.dumps({"given": given})]
        done = subprocess.run(
            [*argv, *options, str(self.play)], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        results = json.loads(self.out.read_text(encoding="utf-8")) if self.out.exists() else {}
        return results, done.stdout + done.stderr


def sent(said: str) -> set[str]:
    """Names of what was carried to the host."""
    return {line.split()[-1].rpartition("/")[2] for line in said.splitlines() if " PUT " in line}


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


def test_only_what_is_missing_is_sent_and_only_in_earnest(play: Play) -> None:
    before = tree(play.host.root)

    results, said = play.run("--check", "--diff")
    assert (results["runtime"]["changed"], results["kernels"]["changed"]) == (True, True), said
    assert not FILES & sent(said)
    assert tree(play.host.root) == before

    results, said = play.run()
    assert (results["runtime"]["changed"], results["kernels"]["changed"]) == (True, True), said
    assert sent(said) >= FILES
    assert play.host.marker()["packages"] == {"engine": "1.0"}
    assert (play.host.root / "kernels/kernel-1/kernel.py").read_text(encoding="utf-8") == "X = 1\n"

    results, said = play.run()
    assert (results["runtime"]["changed"], results["kernels"]["changed"]) == (False, False), said
    assert not FILES & sent(said)


def test_no_password_of_the_index_is_shown_even_when_all_is(play: Play) -> None:
    results, said = play.run("--check", index_url="https://me:s3cret@index.example/simple")
    assert results["runtime"]["changed"], said
    assert "https://index.example/simple" in said
    assert "s3cret" not in said


def test_what_the_control_node_lacks_is_said_at_once(play: Play) -> None:
    play.lock.unlink()
    results, said = play.run(ca_file="nosuch.pem")
    assert not results
    assert f"no file {play.lock}" in said
    assert f"no file {ROOT / 'nosuch.pem'}" in said
    assert "2 to mend" in said


def test_a_kernel_package_that_changed_since_the_plan_stops_the_run(play: Play) -> None:
    (play.tree / "kernel.py").write_text("X = 2\n", encoding="utf-8")
    results, said = play.run()
    assert not results
    assert "tandem_kernels kernel.sha256: found" in said
    assert not (play.host.root / "kernels").exists()


def test_the_engines_own_facts_reach_the_host(play: Play) -> None:
    (play.engine / "engine.yml").write_text("requires_python: '>=3.99'\n", encoding="utf-8")
    results, said = play.run("--check")
    assert not results
    assert "expects >=3.99" in said
