"""Roles as their users see them: documented options and real defaults are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())


def options(role: Path) -> dict[str, dict[str, Any]]:
    specs = yaml.safe_load((role / "meta" / "argument_specs.yml").read_text())
    found: dict[str, dict[str, Any]] = specs["argument_specs"]["main"].get("options") or {}
    return found


def defaults(role: Path) -> dict[str, Any]:
    file = role / "defaults" / "main.yml"
    return (yaml.safe_load(file.read_text()) or {}) if file.exists() else {}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_argument_specs_and_defaults_are_one(role: Path) -> None:
    documented = {name: option["default"] for name, option in options(role).items() if "default" in option}
    assert documented == defaults(role)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_an_option_is_required_or_has_a_default(role: Path) -> None:
    for name, option in options(role).items():
        assert option.get("required", False) != ("default" in option), name


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_options_carry_their_role(role: Path) -> None:
    prefix = f"{role.name}_"
    assert [name for name in options(role) if not name.startswith(prefix)] == []


def test_no_two_roles_have_one_option() -> None:
    names = [name for role in ROLES for name in options(role)]
    assert sorted(set(names)) == sorted(names)


def test_no_group_vars_all_beside_site() -> None:
    """It would beat the fleet's own under site.yml and be absent under playbooks/."""
    assert list((ROOT / "group_vars").glob("all*")) == []
    assert (ROOT / "playbooks" / "group_vars").resolve() == ROOT / "group_vars"


def test_readmes_are_generated() -> None:
    import role_docs

    assert role_docs.main(["--check"]) == 0, "run `make docs`"
