"""The filter `tandem_exec_line`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.module_utils.tandem.unitfile import exec_line


class FilterModule:
    """Filters of Tandem's templates."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"tandem_exec_line": exec_line}
