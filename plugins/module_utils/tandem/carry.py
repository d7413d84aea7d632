"""For action plugins, on the control node: ask the host what it lacks, and carry only that to it."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import Any, Protocol

from .problems import Problem

ROOT = Path(__file__).resolve().parents[3]


class Action(Protocol):
    """What of Ansible's ActionBase is used here."""

    _task: Any
    _connection: Any

    def _execute_module(self, module_name: str, module_args: dict[str, Any], task_vars: Any) -> dict[str, Any]: ...
    def _make_tmp_path(self) -> Any: ...
    def _transfer_file(self, local_path: str, remote_path: str) -> Any: ...
    def _fixup_perms2(self, remote_paths: tuple[str, ...]) -> Any: ...


def ask(action: Action, module: str, arguments: dict[str, Any], task_vars: Any) -> tuple[dict[str, Any], bool]:
    """The module's answer in check mode, and whether it is the task's result: nothing is, must or can be done."""
    asked = action._task.check_mode
    action._task.check_mode = True
    try:
        answer = action._execute_module(module_name=module, module_args=arguments, task_vars=task_vars)
    finally:
        action._task.check_mode = asked
    return answer, bool(asked or answer.get("failed") or not answer.get("changed"))


def send(action: Action, local: Path, name: str) -> str:
    """Copies a file into the task's own folder on the host, which goes with the task. Returns its path there."""
    shell = action._connection._shell
    if not shell.tmpdir:
        action._make_tmp_path()
    remote: str = shell.join_path(shell.tmpdir, name)
    action._transfer_file(str(local), remote)
    action._fixup_perms2((shell.tmpdir, remote))
    return remote


def take_ca_file(arguments: dict[str, Any]) -> tuple[Path | None, list[Problem]]:
    """Takes the CA file, a path on the control node, out of a task's arguments."""
    given = arguments.pop("ca_file", None)
    if not given:
        return None, []
    path = ROOT / given
    if path.is_file():
        return path, []
    expected = "a CA bundle on the control node, absolute or relative to the repository"
    return None, [Problem("tandem_package_ca_file", f"no file {path}", expected)]


def hide_auth(arguments: dict[str, Any]) -> None:
    """Moves user and password of `index_url` to `index_auth`, which no log shows."""
    if arguments.get("index_url"):
        arguments["index_url"], arguments["index_auth"] = split_auth(arguments["index_url"])


def split_auth(url: str) -> tuple[str, str]:
    """An index's URL without user and password, and these: https://u:p@host/x is (https://host/x, u:p)."""
    parts = urllib.parse.urlsplit(url)
    auth, at, host = parts.netloc.rpartition("@")
    return (urllib.parse.urlunsplit(parts._replace(netloc=host)), auth) if at else (url, "")
