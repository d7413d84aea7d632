"""How words and environment are written so that systemd reads them back unchanged (systemd.service(5))."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


def exec_word(word: str) -> str:
    """One word of an ExecStart line: specifiers and variables are escaped, odd words quoted."""
    escaped = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(escaped):
        return escaped
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"') + '"'


def exec_line(argv: Iterable[str]) -> str:
    """A command line with each flag on a line of its own, so that a diff shows the flag that changed."""
    line = ""
    for word in argv:
        lead = " \\\n    " if word.startswith("--") and line else " " if line else ""
        line += lead + exec_word(word)
    return line


def environment_file(env: Mapping[str, str]) -> str:
    """The content of an EnvironmentFile=, sorted. A value must not hold a line break."""
    return "".join(f"{name}={_env_value(value)}\n" for name, value in sorted(env.items()))


def _env_value(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    if "'" not in value:
        return f"'{value}'"
    return '"' + re.sub(r'([\\"$`])', r"\\\1", value) + '"'
