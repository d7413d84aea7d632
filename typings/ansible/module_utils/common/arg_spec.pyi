from collections.abc import Mapping
from typing import Any

class ValidationResult:
    error_messages: list[str]
    validated_parameters: dict[str, Any]

class ArgumentSpecValidator:
    def __init__(self, argument_spec: Mapping[str, Any]) -> None: ...
    def validate(self, parameters: Mapping[str, Any]) -> ValidationResult: ...
