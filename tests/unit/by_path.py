"""Loads a program by its file: a module and its action plugin have the same name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load(folder: str, name: str) -> ModuleType:
    """The program <folder>/<name>.py of the repository."""
    spec = importlib.util.spec_from_file_location(f"{Path(folder).name}_{name}", ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
