"""Where things live on a host. These are not settings: every role, module and page of the docs relies on them.

An operator who wants the models on another disk mounts that disk at MODELS.
"""

from __future__ import annotations

from typing import Final

OPT: Final = "/opt/tandem"
TOOLS: Final = f"{OPT}/tools"
CACHE: Final = f"{OPT}/cache"
RUNTIMES: Final = f"{OPT}/runtimes"
KERNELS: Final = f"{OPT}/kernels"

STATE: Final = "/var/lib/tandem"
RELEASES: Final = f"{STATE}/releases"
MODELS: Final = f"{STATE}/models"
HOMES: Final = f"{STATE}/state"
# Compiled kernels (Triton, torch, flashinfer, DeepGEMM): one directory a unit, named by what it was compiled for.
JIT_CACHE: Final = "/var/cache/tandem"

RUN: Final = "/run/tandem"
UNITS: Final = "/etc/systemd/system"
