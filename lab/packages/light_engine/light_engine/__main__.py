"""Start the stand-in: `python -m light_engine <flags of sglang.launch_server>`."""

from __future__ import annotations

import asyncio
import sys

from .settings import log, parse_flags, read_behaviour


async def main() -> None:
    """Read what was asked for and serve."""
    log("THIS IS A STAND-IN for SGLang: the worker API without a model. Nothing it does is evidence about the engine.")
    flags, behaviour = parse_flags(sys.argv[1:]), read_behaviour()
    from .worker import Worker  # noqa: PLC0415 - 2026-12-01: a wrong flag is refused before the slow imports

    await Worker(flags, behaviour).run()


if __name__ == "__main__":
    asyncio.run(main())
