"""TEST ONLY: make a prefill server's KV transfers lie. They report success, and the decode server gets the wrong cache.

A test that compares answers proves something only if it is seen to fail. With this directory on the
PYTHONPATH of a prefill server (declared as a kernel package of that role) every health page stays green,
every request ends with status 200, the engine's own KV metrics count as before, and the answers are wrong.

TANDEM_LAB_SABOTAGE (default "corrupt"):
- corrupt: the transfer runs, with the pages of the source in reverse order, so keys and values of the wrong
  tokens and layers arrive;
- drop: the transfer is never posted, and the decode server reads what its pages held before.

Only prepared transfers are touched (`make_prepped_xfer`), which is what SGLang 0.5.23 sends KV pages with.
The small block that carries an answer's first token goes another way (`initialize_xfer`) and arrives, so
the first token of an answer is still right.

How it gets in, and how it lives beside other packages of the kind: see nixl_dram_shim/sitecustomize.py.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TARGETS = ("nixl_cu12._api", "nixl_cu13._api")
MODES = ("corrupt", "drop")


class _Unposted:
    """A prepared transfer that is never posted and says that it is done."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def release(self) -> None:
        self._handle.release()


def patch(module: ModuleType) -> None:
    """Replace what posts a KV transfer; ValueError on an unknown TANDEM_LAB_SABOTAGE."""
    mode = os.environ.get("TANDEM_LAB_SABOTAGE", MODES[0])
    if mode not in MODES:
        raise ValueError(f"TANDEM_LAB_SABOTAGE is {mode!r}, expected one of {', '.join(MODES)}")
    agent = module.nixl_agent
    prepare, transfer, check = agent.make_prepped_xfer, agent.transfer, agent.check_xfer_state

    def make_prepped_xfer(
        self: Any, operation: str, local: Any, local_indices: Any, *remote: Any, **options: Any
    ) -> Any:
        if mode == "corrupt":
            # A copy: NIXL's binding reads the array's memory and knows no strides.
            local_indices = local_indices[::-1].copy()
        handle = prepare(self, operation, local, local_indices, *remote, **options)
        return _Unposted(handle) if mode == "drop" else handle

    def pretend(original: Any) -> Any:
        def method(self: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
            return "DONE" if isinstance(handle, _Unposted) else original(self, handle, *args, **kwargs)

        return method

    agent.make_prepped_xfer = make_prepped_xfer
    agent.transfer = pretend(transfer)
    agent.check_xfer_state = pretend(check)
    print(f"nixl_sabotage: TEST ONLY, this process damages its KV transfers ({mode})", file=sys.stderr, flush=True)


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
