#!/usr/bin/env python3
"""Try a running router on two points that decided docs/router.md: latency on kept-alive connections, and holding.

    router_trial.py latency URL... [--rounds 30]
    router_trial.py hold URL --decode WORKER_URL [--away 30] [--key-file FILE]

`latency` alternates between the routers given, so that they share the machine's weather. `hold` takes a decode out of
the router, keeps asking, puts it back, and fails unless every answer came whole and right. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final
from urllib.parse import urlsplit

PROMPT: Final = "Tell me about the sea."
CLIENT_TIMEOUT: Final = 1200.0
"""Seconds; longer than any hold that is tried."""


@dataclass
class Answer:
    """One answer. Whole means a finish reason and, streamed, a [DONE]: a cut stream can end like a good one."""

    status: int = 0
    text: str = ""
    finish: str | None = None
    done: bool = True
    fault: str = ""
    seconds: float = 0.0
    tokens_at: list[float] = field(default_factory=list)
    """Seconds from the request to each piece of content."""

    @property
    def whole(self) -> bool:
        return self.status == 200 and self.finish in ("stop", "length") and self.done and not self.fault


def connect(url: str) -> HTTPConnection:
    """A connection to the host and port of `url`."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise SystemExit(f"{url}: expected http://HOST:PORT")
    return HTTPConnection(parts.hostname, parts.port, timeout=CLIENT_TIMEOUT)


def call(url: str, method: str, path: str, body: dict[str, Any] | None, key: str) -> Any:
    """One call of the router's worker API. Raises SystemExit on any status but 2xx."""
    connection = connect(url)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    raw = response.read()
    connection.close()
    if response.status // 100 != 2:
        raise SystemExit(f"{method} {path}: {response.status} {raw[:200].decode(errors='replace')}")
    return json.loads(raw) if raw else None


def ask(connection: HTTPConnection, model: str, *, stream: bool, tokens: int = 16) -> Answer:
    """One chat completion, read to its end."""
    answer = Answer(done=not stream)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
    }
    start = time.monotonic()
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer.status = response.status
        if not stream or response.status != 200:
            raw = response.read()
            if response.status != 200:
                answer.fault = raw[:200].decode(errors="replace")
            else:
                choice = json.loads(raw)["choices"][0]
                answer.text, answer.finish = choice["message"]["content"], choice["finish_reason"]
        else:
            while line := response.readline():
                read_event(line, answer, start)
    except (OSError, HTTPException, ValueError, LookupError) as error:
        answer.fault = repr(error)
    answer.seconds = time.monotonic() - start
    return answer


def read_event(line: bytes, answer: Answer, start: float) -> None:
    """Takes one line of a stream into the answer. Raises ValueError on an event that is not JSON."""
    if not line.startswith(b"data: "):
        return
    if line[6:].strip() == b"[DONE]":
        answer.done = True
        return
    event = json.loads(line[6:])
    if "error" in event:
        answer.fault = str(event["error"])[:200]
    for choice in event.get("choices", []):
        if choice["delta"].get("content"):
            answer.text += choice["delta"]["content"]
            answer.tokens_at.append(time.monotonic() - start)
        answer.finish = choice.get("finish_reason") or answer.finish


def latency(urls: list[str], rounds: int) -> int:
    """Prints, per router, the median time to the first content and between pieces of content, in milliseconds."""
    models = {url: call(url, "GET", "/v1/models", None, "")["data"][0]["id"] for url in urls}
    connections = {url: connect(url) for url in urls}
    first: dict[str, list[float]] = {url: [] for url in urls}
    between: dict[str, list[float]] = {url: [] for url in urls}
    for turn in range(rounds + 1):
        for url in urls if turn % 2 else reversed(urls):
            answer = ask(connections[url], models[url], stream=True)
            if not answer.whole or not answer.tokens_at:
                print(f"{url}: not a whole stream: {answer}", file=sys.stderr)
                return 1
            if turn:  # the first one warms up
                at = answer.tokens_at
                first[url].append(at[0])
                between[url] += [after - before for before, after in pairwise(at)]
    for url in urls:
        gap = 1e3 * median(between[url]) if between[url] else float("nan")
        print(f"{url}  medians of {rounds}: first content {1e3 * median(first[url]):.1f} ms, between {gap:.1f} ms")
    return 0


def hold(url: str, decode: str, away: float, key: str) -> int:
    """Takes `decode` out of the router for `away` seconds under one request a second; 1 if any answer is not whole."""
    model = call(url, "GET", "/v1/models", None, "")["data"][0]["id"]
    expected = ask(connect(url), model, stream=False)
    if not expected.whole:
        print(f"no whole answer before the drain: {expected}", file=sys.stderr)
        return 1
    found = [worker["id"] for worker in call(url, "GET", "/workers", None, key)["workers"] if worker["url"] == decode]
    if not found:
        print(f"{url} has no worker {decode}", file=sys.stderr)
        return 1
    answers: list[Answer] = []
    threads: list[threading.Thread] = []

    def one(stream: bool) -> None:
        answers.append(ask(connect(url), model, stream=stream))

    call(url, "DELETE", f"/workers/{found[0]}", None, key)
    end = time.monotonic() + away
    while time.monotonic() < end:
        threads.append(threading.Thread(target=one, args=(bool(len(threads) % 2),)))
        threads[-1].start()
        time.sleep(1)
    call(url, "POST", "/workers", {"url": decode, "worker_type": "decode"}, key)
    for thread in threads:
        thread.join()
    bad = [answer for answer in answers if not answer.whole or answer.text != expected.text]
    longest = max((answer.seconds for answer in answers), default=0.0)
    print(f"{len(answers)} asked while away, {len(answers) - len(bad)} whole and right, longest {longest:.1f} s")
    for answer in bad[:5]:
        print(f"  {answer.status} after {answer.seconds:.1f} s: {answer.fault or answer.text!r}", file=sys.stderr)
    return 1 if bad or not answers else 0


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("latency")
    verb.add_argument("urls", nargs="+", metavar="URL")
    verb.add_argument("--rounds", type=int, default=30)
    verb = verbs.add_parser("hold")
    verb.add_argument("url", metavar="URL")
    verb.add_argument("--decode", required=True, metavar="WORKER_URL")
    verb.add_argument("--away", type=float, default=30.0, help="seconds (default 30)")
    verb.add_argument("--key-file", type=Path, help="the router's control-plane key")
    arguments = parser.parse_args()
    if arguments.verb == "latency":
        return latency(arguments.urls, arguments.rounds)
    key = arguments.key_file.read_text().strip() if arguments.key_file else ""
    return hold(arguments.url, arguments.decode, arguments.away, key)


if __name__ == "__main__":
    sys.exit(main())
