"""The bootstrap server of a prefill: where its ranks register, and where decode servers learn of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import ClientError, ClientSession, web

from .settings import Flags, log

FetchCache = Callable[[int], Awaitable[bytes | None]]
QUERY = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
SERVER_FIELDS = (
    "attn_tp_size",
    "attn_cp_size",
    "pp_size",
    "page_size",
    "kv_cache_dtype",
    "kv_layout",
    "prefill_http_port",
    "decode_allocation_policy",
)
CONSTANTS = {"follow_bootstrap_room": True, "enable_dsa_cache_layer_split": False, "enable_kv_cache_sharding": False}
# The engine sends its whole record, with what only a decode server fills in.
DECODE_SIDE = (
    "target_tp_rank",
    "target_tp_ranks",
    "target_cp_ranks",
    "target_pp_ranks",
    "required_dst_info_num",
    "required_prefill_response_num",
)


class Bootstrap:
    """Paths, query and JSON fields are those of SGLang 0.5.23 (disaggregation/common/conn.py); /light/kv is ours."""

    def __init__(self, fetch_cache: FetchCache) -> None:
        self._fetch_cache = fetch_cache
        self._server: dict[str, Any] = {}
        self._ranks: dict[tuple[int, ...], dict[str, Any]] = {}
        self._registered = 0

    def application(self) -> web.Application:
        """Return the web application."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_put("/route", self._put_route)
        app.router.add_get("/route", self._get_route)
        app.router.add_get("/light/kv/{room}", self._get_cache)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _put_route(self, request: web.Request) -> web.Response:
        data = await request.json()
        if not self._server:
            self._server = {name: data.get(name) for name in SERVER_FIELDS}
            self._server["dp_size"] = data["attn_dp_size"] if data["system_dp_size"] == 1 else data["system_dp_size"]
        group = data["attn_dp_rank"] if data["system_dp_size"] == 1 else data["system_dp_rank"]
        key = (group, data["attn_cp_rank"], data["attn_tp_rank"], data["pp_rank"])
        self._ranks[key] = {"rank_ip": data["rank_ip"], "rank_port": data["rank_port"]}
        self._registered += 1
        return web.Response(text="OK")

    async def _get_route(self, request: web.Request) -> web.Response:
        if not all(request.query.get(name) for name in QUERY):
            return web.Response(text="Missing inputs for bootstrap server.", status=400)
        sizes = ("dp_size", "attn_cp_size", "attn_tp_size", "pp_size")
        expected = math.prod(self._server.get(name, 1) for name in sizes)
        if self._registered < expected:
            text = f"Prefill server not fully registered yet ({self._registered} workers registered)."
            return web.Response(text=text, status=503)
        key = tuple(int(request.query[name]) for name in QUERY)
        if key == (-1, -1, -1, -1):
            payload = self._server | CONSTANTS | dict.fromkeys(DECODE_SIDE)
            if payload["kv_layout"] is None:
                del payload["kv_layout"]
            return web.json_response(payload)
        if key not in self._ranks:
            return web.Response(text=f"Bootstrap info not found for {key}", status=404)
        return web.json_response(self._ranks[key])

    async def _get_cache(self, request: web.Request) -> web.Response:
        cache = await self._fetch_cache(int(request.match_info["room"]))
        return web.Response(status=404) if cache is None else web.Response(body=cache)


async def register(session: ClientSession, flags: Flags) -> None:
    """Register every rank at the bootstrap port, five tries each; as in the engine, a failure is only logged."""
    url = f"http://{flags.host}:{flags.bootstrap_port}/route"
    for rank in range(flags.tp_size):
        data = {
            "attn_tp_size": flags.tp_size,
            "attn_tp_rank": rank,
            "attn_cp_size": 1,
            "attn_cp_rank": 0,
            "attn_dp_size": 1,
            "attn_dp_rank": 0,
            "pp_size": 1,
            "pp_rank": 0,
            "system_dp_size": 1,
            "system_dp_rank": 0,
            "rank_ip": flags.host,
            "rank_port": flags.port,
            "page_size": flags.page_size,
            "kv_cache_dtype": flags.kv_cache_dtype,
            "kv_layout": None,
            "prefill_http_port": flags.port,
            "load_balance_method": "follow_bootstrap_room",
            "decode_allocation_policy": "early",
        }
        for attempt in range(5):
            try:
                async with session.put(url, json=data) as response:
                    if response.status == 200:
                        break
                    log(f"Prefill register attempt {attempt + 1}/5 failed: status {response.status}")
            except (ClientError, TimeoutError) as error:
                log(f"Prefill register attempt {attempt + 1}/5 failed: {error}")
            await asyncio.sleep(0.2 * (attempt + 1))
