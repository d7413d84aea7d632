"""TEST ONLY: let a server without a GPU move its KV cache over NIXL, by calling its memory what it is.

SGLang's NIXL backend registers the KV pool as "VRAM" whatever the device. On `--device cpu` the pool lies
in ordinary memory, which NIXL and UCX call "DRAM". With this directory on PYTHONPATH every "VRAM" that
reaches a NIXL agent becomes "DRAM"; nothing else changes, and the transfer is a real one between two
processes. On a host with a GPU this must never be installed. A process that does not import NIXL notices
nothing.

How it gets in: Python imports the first `sitecustomize` on its path, and only that. Every package of the
lab that needs one therefore hands over to the next at its end (`_run_next`), so that any number of them, in
any order, and a sitecustomize of the distribution all run.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TARGETS = ("nixl_cu12._api", "nixl_cu13._api")
"""Modules that define `nixl_agent` (nixl 1.5.1; `nixl._api` is an alias of one of them)."""

METHODS = ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist")
"""Methods of `nixl_agent` that take a memory type by name."""


def _as_dram(value: Any) -> Any:
    return "DRAM" if isinstance(value, str) and value == "VRAM" else value


def patch(module: ModuleType) -> None:
    """Wrap METHODS of the module's nixl_agent; AttributeError if this NIXL has another interface."""
    agent = module.nixl_agent

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            named = {name: _as_dram(value) for name, value in kwargs.items()}
            return original(self, *(_as_dram(value) for value in args), **named)

        return method

    for name in METHODS:
        setattr(agent, name, wrapped(getattr(agent, name)))


class _Loader(importlib.abc.Loader):
    """Load a module by its own loader, then patch it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Find TARGETS as the finders behind this one do, and put _Loader around what they found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in TARGETS:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


def _run_next() -> None:
    """Run the sitecustomize that this one hides: the first on the path behind this directory."""
    here = Path(__file__).resolve().parent
    own = [index for index, entry in enumerate(sys.path) if Path(entry or ".").resolve() == here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path[own[-1] + 1 :]) if own else None
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Finder())
_run_next()
