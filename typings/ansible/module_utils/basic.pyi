from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

class AnsibleModule:
    params: dict[str, Any]
    check_mode: bool
    tmpdir: str
    def __init__(
        self,
        argument_spec: Mapping[str, Any],
        *,
        supports_check_mode: bool = ...,
        mutually_exclusive: Sequence[Sequence[str]] = ...,
        required_together: Sequence[Sequence[str]] = ...,
        required_one_of: Sequence[Sequence[str]] = ...,
        required_if: Sequence[Sequence[Any]] = ...,
        no_log: bool = ...,
    ) -> None: ...
    def exit_json(self, **kwargs: Any) -> NoReturn: ...
    def fail_json(self, msg: str, **kwargs: Any) -> NoReturn: ...
    def warn(self, warning: str) -> None: ...
    def log(self, msg: str) -> None: ...
