#!/usr/bin/env python3
"""Writes each role's README.md from its meta/argument_specs.yml.

usage: tools/role_docs.py [--check]     (--check: exit 1 if a README is not what it should be)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
# Ansible's documentation markup: C(code), O(option=value), V(value).
MARKUP = re.compile(r"\b[COV]\(([^)]*)\)")


def main(arguments: list[str]) -> int:
    stale = []
    for role in sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir()):
        readme, text = role / "README.md", render(role)
        if not readme.exists() or readme.read_text() != text:
            stale.append(role.name)
            if "--check" not in arguments:
                readme.write_text(text)
    if "--check" in arguments and stale:
        print(f"README of {', '.join(stale)}: found another text; expected what `make docs` writes", file=sys.stderr)
        return 1
    return 0


def render(role: Path) -> str:
    """The README of one role."""
    spec = yaml.safe_load((role / "meta" / "argument_specs.yml").read_text())["argument_specs"]["main"]
    lines = ["<!-- Written by `make docs` from meta/argument_specs.yml. -->", "", f"# {role.name}", ""]
    lines += [f"**{spec['short_description']}.**", ""]
    for paragraph in paragraphs(spec["description"]):
        lines += [paragraph, ""]
    options: dict[str, dict[str, Any]] = spec.get("options") or {}
    lines += ["## Options", ""]
    lines += ["| option | type | default |", "|---|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {kind(option)} | {default(option)} |" for name, option in options.items()]
    for name, option in options.items():
        lines += ["", f"### {name}", "", f"{kind(option)}, {default(option)}", ""]
        lines += [*body(option)]
    return "\n".join(lines).rstrip() + "\n"


def body(option: dict[str, Any]) -> Iterator[str]:
    """What is said of an option: its text, its choices, the keys of its rows."""
    yield "\n\n".join(paragraphs(option["description"]))
    if "choices" in option:
        yield ""
        yield f"One of {', '.join(f'`{choice}`' for choice in option['choices'])}."
    if "options" in option:
        yield ""
        yield "Keys of a row:"
        yield ""
        for name, key in option["options"].items():
            yield f"- `{name}` ({kind(key)}, {default(key)}): {' '.join(paragraphs(key['description']))}"


def paragraphs(description: str | list[str]) -> list[str]:
    found = [description] if isinstance(description, str) else description
    return [MARKUP.sub(lambda match: f"`{match[1]}`", text.strip()) for text in found]


def kind(option: dict[str, Any]) -> str:
    return f"list of {option['elements']}" if "elements" in option else str(option["type"])


def default(option: dict[str, Any]) -> str:
    if option.get("required"):
        return "**required**"
    if "default" not in option:
        return "no default"
    value = option["default"]
    if value in ("", [], {}):
        return "empty"
    if isinstance(value, list | dict):
        return "see below" if len(str(value)) > 40 else f"`{yaml.safe_dump(value, default_flow_style=True).strip()}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
