"""The main process: the worker API over HTTP, the pairing of prefill and decode, and the ways to die."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from . import answers
from .answers import RequestError
from .bootstrap import QUERY, Bootstrap, register
from .metrics import Metrics
from .scheduler import segment
from .settings import VERSION, Behaviour, Flags, log


class PairError(Exception):
    """The other side of the pair failed; the text goes to the client with status 500."""


class Scheduler:
    """The child process, seen from here."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, orphan: bool) -> Scheduler:
        """Start the child."""
        words = [sys.executable, "-m", f"{__package__}.scheduler", *(["--orphan"] if orphan else [])]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe))

    async def answer(self) -> None:
        """Return when the child has answered; never, if it is stopped."""
        assert self.process.stdin is not None  # noqa: S101 - 2026-12-01: for the type checker
        number = next(self._numbers)
        done = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.process.stdin.write(f"{number}\n".encode())
            await done
        finally:
            self._waiting.pop(number, None)

    async def _read(self) -> None:
        assert self.process.stdout is not None  # noqa: S101 - 2026-12-01: for the type checker
        async for line in self.process.stdout:
            waiting = self._waiting.get(int(line))
            if waiting is not None and not waiting.done():
                waiting.set_result(None)


@dataclass
class Room:
    """One request on a prefill: its cache once computed, and whether decode has taken it."""

    cache: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    taken: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Style:
    """How one of the three ways to ask is answered."""

    limit: int  # tokens, where the request says nothing
    chunk: str  # "object" of a streamed piece; "" for /generate
    whole: str  # "object" of a whole answer


GENERATE: Final = Style(128, "", "")
COMPLETION: Final = Style(16, "text_completion", "text_completion")
DONE: Final = b"data: [DONE]\n\n"
CHAT: Final = Style(256, "chat.completion.chunk", "chat.completion")


class Worker:
    """One server."""

    def __init__(self, flags: Flags, behaviour: Behaviour) -> None:
        self.flags = flags
        self.behaviour = behaviour
        self.metrics = Metrics()
        self.answers = answers.read_answers(flags.model_path)
        self.started = time.time()
        self.warm = self.draining = self.unhealthy = False
        self.running = self.waiting = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.ended = asyncio.Event()
        self.rooms: dict[int, Room] = {}
        self.scheduler: Scheduler
        self.session: ClientSession
        self._tasks: set[asyncio.Task[None]] = set()

    # Life and death

    async def run(self) -> None:
        """Load, open the port, warm up, and serve until a signal ends it."""
        flags, behaviour = self.flags, self.behaviour
        self.session = ClientSession()
        if flags.mode == "prefill":
            await self._serve_bootstrap()
        self.scheduler = await Scheduler.start(behaviour.orphans)
        self._spawn(self._watch_scheduler())
        await asyncio.sleep(behaviour.start_delay)
        if behaviour.die and behaviour.die_after is None:
            self._die()
        if flags.mode == "prefill":
            await register(self.session, flags)
        runner = web.AppRunner(self.application(), access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, flags.host, flags.port).start()
        except OSError as error:
            log(f"{error}")
            self._kill_all(status=1)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: self._spawn(self._stop()))
        await asyncio.sleep(behaviour.warmup_delay)
        await self.scheduler.answer()
        self.warm = True
        log("The server is fired up and ready to roll!")
        if behaviour.die and behaviour.die_after is not None:
            await asyncio.sleep(behaviour.die_after)
            self._die()
        await self.ended.wait()

    async def _serve_bootstrap(self) -> None:
        runner = web.AppRunner(Bootstrap(self._hand_over).application(), access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.flags.host, self.flags.bootstrap_port).start()
        except OSError as error:
            log(f"bootstrap server: {error}")  # the engine goes on as well

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch_scheduler(self) -> None:
        code = await self.scheduler.process.wait()
        log(f"Subprocess scheduler_0 crashed with exit code {code}. Killing all that is left.")
        self._kill_all()

    async def _stop(self) -> None:
        self.draining = True
        log(f"Gracefully exiting... Remaining number of requests {self.running}.")
        if not self.unhealthy:
            while self.running:
                await self.idle.wait()
        await asyncio.sleep(self.behaviour.stop_delay)
        segment(self.scheduler.process.pid).unlink(missing_ok=True)
        self._kill_all(status=None if self.behaviour.stop_by_kill else 0)

    def _die(self) -> None:
        how = self.behaviour.die
        log(f"dying as told: {how}")
        match how:
            case "exit":
                self._kill_all(status=1)
            case "kill":
                self._kill_all()
            case "scheduler":
                self.scheduler.process.send_signal(signal.SIGSEGV)
            case "hang":
                self.scheduler.process.send_signal(signal.SIGSTOP)

    def _kill_all(self, status: int | None = None) -> NoReturn:
        """End now: the child (unless it is to be orphaned) and this process, by SIGKILL or with a status."""
        if not self.behaviour.orphans and self.scheduler.process.returncode is None:
            self.scheduler.process.kill()
        if status is None:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(status or 0)

    # Prefill and decode

    async def _hand_over(self, number: int) -> bytes | None:
        """Wait for the cache of a room and give it away; None if it never came."""
        room = self.rooms.setdefault(number, Room())
        try:
            async with asyncio.timeout(self.behaviour.waiting_timeout):
                cache = await asyncio.shield(room.cache)
        except TimeoutError:
            self.rooms.pop(number, None)
            return None
        room.taken.set()
        self.metrics.transferred(len(cache))
        return cache

    async def _prefill(self, number: int, prompt: str) -> None:
        """Compute the cache of a room and wait until decode has taken it; PairError if it never does."""
        room = self.rooms.setdefault(number, Room())
        if not room.cache.done():
            room.cache.set_result(answers.pack(prompt))
        try:
            async with asyncio.timeout(self.behaviour.bootstrap_timeout):
                await room.taken.wait()
        except TimeoutError:
            raise PairError(f"Request timed out in the bootstrap queue, room {number}") from None
        finally:
            self.rooms.pop(number, None)

    async def _decode(self, body: dict[str, Any], number: int) -> str:
        """Fetch the cache of a room from its prefill and return the prompt that it holds."""
        base = f"http://{body.get('bootstrap_host')}:{body.get('bootstrap_port') or self.flags.bootstrap_port}"
        server = await self._prefill_server(base)
        if server["page_size"] != self.flags.page_size:
            log(f"Page size mismatch: prefill {server['page_size']}, decode {self.flags.page_size}")
            self._kill_all()
        try:
            timeout = ClientTimeout(total=self.behaviour.waiting_timeout)
            async with self.session.get(f"{base}/light/kv/{number}", timeout=timeout) as response:
                response.raise_for_status()
                return answers.unpack(await response.read())
        except (ClientError, TimeoutError) as error:
            raise PairError(f"KV transfer of room {number} from {base} failed: {error!r}") from None

    async def _prefill_server(self, base: str) -> dict[str, Any]:
        tries = max(1, round(self.behaviour.handshake_timeout))
        for attempt in range(tries):
            try:
                async with self.session.get(f"{base}/route", params=dict.fromkeys(QUERY, "-1")) as response:
                    if response.status == 200:
                        data: dict[str, Any] = await response.json()
                        return data
            except (ClientError, TimeoutError):
                pass
            if attempt < tries - 1:
                await asyncio.sleep(self.behaviour.handshake_timeout / tries)
        raise PairError(f"Could not fetch prefill parallel info from {base} after {tries} attempts")

    # Requests

    def application(self) -> web.Application:
        """Return the web application of the worker's port."""
        app = web.Application(client_max_size=64 << 20)
        get, post = app.router.add_get, app.router.add_post
        get("/ready", self._ready)
        for path in ("/health", "/health_generate"):
            get(path, self._health)
        for path in ("/server_info", "/get_server_info"):
            get(path, self._server_info)
        for path in ("/model_info", "/get_model_info"):
            get(path, self._model_info)
        get("/v1/models", self._models)
        get("/v1/loads", self._loads)
        if self.flags.enable_metrics:
            get("/metrics", self._metrics)
        post("/generate", lambda request: self._ask(request, GENERATE))
        post("/v1/completions", lambda request: self._ask(request, COMPLETION))
        post("/v1/chat/completions", lambda request: self._ask(request, CHAT))
        for path in ("/flush_cache", "/abort_request"):
            app.router.add_route("*", path, self._accept)
        return app

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.warm and not self.draining and not self.unhealthy else 503)

    async def _health(self, _: web.Request) -> web.Response:
        if not self.warm or self.draining:
            return web.Response(status=503)
        try:
            async with asyncio.timeout(self.behaviour.health_timeout):
                await self.scheduler.answer()
        except TimeoutError:
            self.unhealthy = True
            return web.Response(status=503)
        self.unhealthy = False
        return web.Response()

    async def _server_info(self, _: web.Request) -> web.Response:
        flags = self.flags
        return web.json_response(
            {
                **{name: value for name, value in flags.given.items() if not isinstance(value, os.PathLike)},
                "stand_in": "light_engine",
                "model_path": str(flags.model_path),
                "served_model_name": flags.served_model_name,
                "tp_size": flags.tp_size,
                "dp_size": 1,
                "page_size": flags.page_size,
                "kv_cache_dtype": flags.kv_cache_dtype,
                "disaggregation_mode": flags.mode,
                "disaggregation_bootstrap_port": flags.bootstrap_port,
                "max_total_num_tokens": 1 << 20,
                "startup_time": self.started,
                "internal_states": [{}],
                "version": VERSION,
            }
        )

    async def _model_info(self, _: web.Request) -> web.Response:
        flags = self.flags
        return web.json_response(
            {
                "stand_in": "light_engine",
                "model_path": str(flags.model_path),
                "served_model_name": flags.served_model_name,
                "tokenizer_path": str(flags.model_path),
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "load_format": "auto",
                "disaggregation_mode": flags.mode,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": "light",
                "architectures": ["LightEngine"],
            }
        )

    async def _models(self, _: web.Request) -> web.Response:
        name = self.flags.served_model_name
        card = {"id": name, "object": "model", "created": int(self.started), "owned_by": "light_engine", "root": name}
        return web.json_response({"object": "list", "data": [{**card, "max_model_len": self.flags.context_length}]})

    async def _loads(self, _: web.Request) -> web.Response:
        load = {
            "dp_rank": 0,
            "num_running_reqs": self.running - self.waiting,
            "num_waiting_reqs": self.waiting,
            "num_total_reqs": self.running,
            "num_used_tokens": 0,
            "num_total_tokens": 0,
            "max_total_num_tokens": 1 << 20,
            "token_usage": 0.0,
        }
        now = datetime.now(UTC).isoformat()
        return web.json_response({"timestamp": now, "version": VERSION, "loads": [load]})

    async def _metrics(self, _: web.Request) -> web.Response:
        page = self.metrics.page(
            self.flags.served_model_name, self.flags.mode, self.running - self.waiting, self.waiting
        )
        return web.Response(text=page)

    async def _accept(self, _: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n")

    async def _ask(self, request: web.Request, style: Style) -> web.StreamResponse:
        self.running += 1
        self.idle.clear()
        body: Any = None
        try:
            body = json.loads(await request.text())
            if not isinstance(body, dict):
                raise RequestError("expected a JSON object")
            prompt = answers.prompt_of(body)
            text = await self._think(body, prompt)
            return await self._say(request, style, body, prompt, text)
        except (RequestError, ValueError) as error:
            return _error(body, 400, "BadRequestError", str(error))
        except PairError as error:
            log(str(error))
            return _error(body, 500, "InternalServerError", str(error))
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def _think(self, body: dict[str, Any], prompt: str) -> str:
        """Return the whole answer, or its first token on a prefill."""
        room = body.get("bootstrap_room")
        if self.flags.mode != "null" and room is None:
            raise RequestError("Invalid request: Disaggregated request received without bootstrap room id.")
        await self.scheduler.answer()
        if self.flags.mode != "null":
            self.waiting += 1
            try:
                if self.flags.mode == "prefill":
                    await self._prefill(int(str(room)), prompt)
                else:
                    prompt = await self._decode(body, int(str(room)))
            finally:
                self.waiting -= 1
        text = answers.answer(self.answers, prompt)
        if self.behaviour.wrong:
            text = text[::-1]
        return answers.split(text)[0] if self.flags.mode == "prefill" else text

    async def _say(
        self, request: web.Request, style: Style, body: dict[str, Any], prompt: str, text: str
    ) -> web.StreamResponse:
        sampling = body.get("sampling_params") or {} if style is GENERATE else body
        limits = (sampling.get(name) for name in ("max_new_tokens", "max_completion_tokens", "max_tokens"))
        limit = next(filter(None, limits), style.limit)
        pieces = answers.split(text)
        if sampling.get("ignore_eos"):
            pieces = list(itertools.islice(itertools.cycle([*pieces[:-1], pieces[-1] + " "]), limit + 1))
        ending = "length" if len(pieces) > limit or self.flags.mode == "prefill" else "stop"
        pieces = pieces[:limit]
        prompt_tokens = len(answers.split(prompt))
        self.metrics.requests += 1
        self.metrics.prompt_tokens += prompt_tokens
        self.metrics.generation_tokens += len(pieces)
        reply = _Reply(style, self.flags.served_model_name, pieces, ending, prompt_tokens)
        if not body.get("stream"):
            async for _ in self._paced(pieces):
                pass
            return web.json_response(reply.whole())
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        async for number in self._paced(pieces):
            await stream.write(reply.chunk(number))
        await stream.write(reply.end(bool((body.get("stream_options") or {}).get("include_usage"))))
        return stream

    async def _paced(self, pieces: list[str]) -> AsyncIterator[int]:
        for number in range(len(pieces)):
            await asyncio.sleep(self.behaviour.token_delay)
            yield number


class _Reply:
    """One answer in the form that was asked for."""

    def __init__(self, style: Style, model: str, pieces: list[str], ending: str, prompt_tokens: int) -> None:
        self.style = style
        self.pieces = pieces
        self.ending = ending
        self.head = {"id": os.urandom(16).hex(), "created": int(time.time()), "model": model}
        self.usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(pieces),
            "total_tokens": prompt_tokens + len(pieces),
        }

    def whole(self) -> dict[str, Any]:
        """Return the JSON of a plain answer."""
        text = "".join(self.pieces)
        if self.style is GENERATE:
            return self._generated(text, ended=True)
        content = {"message": {"role": "assistant", "content": text}} if self.style is CHAT else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": self.ending}
        return {**self.head, "object": self.style.whole, "choices": [choice], "usage": self.usage}

    def chunk(self, number: int) -> bytes:
        """Return one event of a stream. /generate repeats the text so far, as the engine does."""
        if self.style is GENERATE:
            return _event(self._generated("".join(self.pieces[: number + 1]), ended=number + 1 == len(self.pieces)))
        piece = self.pieces[number]
        role = {"role": "assistant"} if number == 0 else {}
        content: dict[str, Any] = {"delta": {**role, "content": piece}} if self.style is CHAT else {"text": piece}
        return self._event(content, None)

    def end(self, with_usage: bool) -> bytes:
        """Return the events that close a stream."""
        if self.style is GENERATE:
            return DONE
        content: dict[str, Any] = {"delta": {}} if self.style is CHAT else {"text": ""}
        last = self._event(content, self.ending)
        if with_usage:
            last += _event({**self.head, "object": self.style.chunk, "choices": [], "usage": self.usage})
        return last + DONE

    def _event(self, content: dict[str, Any], ending: str | None) -> bytes:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": ending}
        return _event({**self.head, "object": self.style.chunk, "choices": [choice]})

    def _generated(self, text: str, ended: bool) -> dict[str, Any]:
        finish = {"type": self.ending, **({"length": len(self.pieces)} if self.ending == "length" else {})}
        return {
            "text": text,
            "meta_info": {
                "id": self.head["id"],
                "finish_reason": finish if ended else None,
                "prompt_tokens": self.usage["prompt_tokens"],
                "completion_tokens": self.usage["completion_tokens"],
                "cached_tokens": 0,
                "weight_version": "default",
            },
        }


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _error(body: Any, status: int, kind: str, message: str) -> web.Response:
    """Return an error: with its status, but to a request for a stream as an event, under status 200."""
    error = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    if isinstance(body, dict) and body.get("stream"):
        return web.Response(body=_event({"error": error}) + DONE, content_type="text/event-stream")
    return web.json_response(error, status=status)
