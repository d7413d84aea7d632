"""The gate of a deploy: real requests through the router, answered right and in time, and KV bytes seen to move."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from .prometheus import total

# What each worker counts, on the prefill, which sends. The engine computes its figure from the request; NIXL measures.
KV_MB: Final = "sglang:kv_transfer_total_mb_sum"
NIXL_BYTES: Final = "agent_tx_bytes_total"
REQUESTS: Final = "sglang:num_requests_total"
POLL: Final = 0.5
# Seconds until a counter must show what was sent. A second was the most that was seen.
COUNTERS_LATE: Final = 15.0


@dataclass(frozen=True)
class Question:
    """One request of the gate. `expect` is a regular expression that the answer must contain."""

    prompt: str
    expect: str
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """What came back. `fault` is empty for a right answer; `seconds` is the wall time."""

    question: Question
    text: str
    seconds: float
    fault: str


def get(url: str, timeout: float, key: str = "") -> tuple[int, str]:
    """Status and body of a GET; status 0 where nothing answered. `key` is a bearer token."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, str(error)


def wait_registered(router: str, workers: Sequence[Mapping[str, str]], timeout: float, key: str = "") -> str:
    """Waits until the router is ready and knows every worker as healthy. Returns what is missing, empty if nothing."""
    deadline = time.monotonic() + timeout
    while True:
        missing = unregistered(router, workers, key)
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(POLL)


def unregistered(router: str, workers: Sequence[Mapping[str, str]], key: str = "") -> str:
    """Why the router cannot serve yet, empty if it can."""
    status, body = get(f"{router}/readiness", 5)
    if status != 200:
        return f"{router}/readiness answers {status or 'nothing'}: {body[:200]}"
    status, body = get(f"{router}/workers", 5, key)
    try:
        known = {row["url"].rstrip("/"): bool(row.get("is_healthy")) for row in json.loads(body)["workers"]}
    except (ValueError, KeyError, TypeError):
        return f"{router}/workers answers {status}: {body[:200]}"
    lost = [
        f"{worker['name']} of {worker['host']} ({worker['url']})" for worker in workers if not known.get(worker["url"])
    ]
    return f"the router does not know as healthy: {', '.join(lost)}" if lost else ""


def ask(router: str, model: str, question: Question, timeout: float) -> Answer:
    """One greedy chat request, as any OpenAI client sends it, and what is wrong with its answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question.prompt}],
        "temperature": 0,
        "max_tokens": question.max_tokens,
    }
    request = urllib.request.Request(
        f"{router}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.monotonic()
    text, fault = "", ""
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            choice = json.load(answer)["choices"][0]
        text = choice["message"]["content"] or choice["message"].get("reasoning_content") or ""
        # A failed transfer can come as HTTP 200 with another reason (vllm, smg#2382): look at reason and content.
        if choice["finish_reason"] not in ("stop", "length"):
            fault = f"finish_reason {choice['finish_reason']!r}"
        elif not re.search(question.expect, text):
            fault = f"answer {text!r}, which does not match {question.expect!r}"
    except urllib.error.HTTPError as error:
        fault = f"HTTP {error.code}: {error.read().decode(errors='replace')[:300]}"
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        fault = f"no answer: {error}"
    return Answer(question, text, time.monotonic() - began, fault)


def ask_all(
    send: Callable[[Question], Answer], questions: Sequence[Question], count: int, parallel: int
) -> list[Answer]:
    """`count` requests, going round the questions, `parallel` at a time."""
    chosen = [questions[number % len(questions)] for number in range(count)]
    with ThreadPoolExecutor(max_workers=parallel) as pool:
        return list(pool.map(send, chosen))


def counters(workers: Sequence[Mapping[str, str]]) -> dict[str, dict[str, float]]:
    """What each worker counted so far, by its URL: requests, KV bytes as the engine accounts them, bytes of NIXL."""
    found = {}
    for worker in workers:
        _status, text = get(f"{worker['url']}/metrics", 10)
        found[worker["url"]] = {"requests": total(text, REQUESTS), "kv_bytes": total(text, KV_MB) * 2**20}
        if worker["telemetry"]:
            _status, text = get(worker["telemetry"], 10)
            found[worker["url"]]["nixl_bytes"] = total(text, NIXL_BYTES)
    return found


def moved(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """What each worker counted in between. A worker that restarted counts from 0 again."""
    return {
        url: {name: value - before[url][name] if value >= before[url][name] else value for name, value in now.items()}
        for url, now in after.items()
    }


def settled(
    before: Mapping[str, Mapping[str, float]], workers: Sequence[Mapping[str, str]], timeout: float
) -> dict[str, dict[str, float]]:
    """What each worker counted since `before`, once nothing of it is missing, or as it is after `timeout` seconds.

    Counters come late: NIXL and the engine write theirs some time after the answer.
    """
    deadline = time.monotonic() + timeout
    while True:
        deltas = moved(before, counters(workers))
        if not judge([], workers, deltas) or time.monotonic() > deadline:
            return deltas
        time.sleep(POLL)


def judge(
    answers: Sequence[Answer], workers: Sequence[Mapping[str, str]], deltas: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Everything that speaks against the deploy: wrong answers, workers that took no part, KV that did not move."""
    wrong = Counter(f"{answer.question.prompt!r}: {answer.fault}" for answer in answers if answer.fault)
    faults = [f"{number} of {len(answers)} requests, {fault}" for fault, number in wrong.items()]
    for worker in workers:
        counted, who = deltas[worker["url"]], f"{worker['name']} of {worker['host']}"
        if worker["role"] == "decode" and counted["requests"] <= 0:
            faults.append(f"{who} took no request: {REQUESTS} stood still")
        if worker["role"] == "prefill" and counted["kv_bytes"] <= 0:
            faults.append(f"{who} moved no KV bytes: {KV_MB} stood still")
        # NIXL sends the KV cache and some bytes beside it, never less than the engine accounts for.
        if counted.get("nixl_bytes", counted["kv_bytes"]) < counted["kv_bytes"]:
            faults.append(
                f"{who} accounts for {counted['kv_bytes']:.0f} KV bytes, NIXL sent {counted['nixl_bytes']:.0f}"
                f" ({NIXL_BYTES} at {worker['telemetry']})"
            )
    return faults
