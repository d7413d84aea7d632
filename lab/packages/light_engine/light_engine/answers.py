"""What is said to a prompt, and how a prompt is carried from prefill to decode."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

TOKEN_BYTES: Final = 1024  # what one token takes in the pretended KV cache; the lab's tiny model needs 1024 as well


class RequestError(Exception):
    """A request that cannot be answered; the text goes to the client with status 400."""


def split(text: str) -> list[str]:
    """Return the text's tokens: words with the space before them. Joined they give the text again."""
    return re.findall(r"\s*\S+|\s+$", text)


def read_answers(model: Path) -> dict[str, str]:
    """Return the answers by prompt of the model's prompts.json; none if there is no such file."""
    file = model / "prompts.json"
    if not file.is_file():
        return {}
    return {row["prompt"]: row["answer"] for row in json.loads(file.read_text("utf-8"))}


def answer(answers: dict[str, str], prompt: str) -> str:
    """Return the known answer, else an echo: never the same for two prompts."""
    return answers.get(prompt) or f"You said {len(split(prompt))} words: {prompt}"


def prompt_of(body: dict[str, Any]) -> str:
    """Return the prompt of a /generate, /v1/completions or /v1/chat/completions body; RequestError if it has none."""
    if "messages" in body:
        try:
            contents = [message["content"] for message in body["messages"]]
        except (TypeError, KeyError):
            raise RequestError("messages: expected a list of {role, content}") from None
        texts = [
            content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            for content in contents
        ]
        if not texts:
            raise RequestError("messages: expected at least one")
        return "\n".join(texts)
    for field in ("text", "prompt"):
        if isinstance(body.get(field), str):
            return str(body[field])
    if isinstance(body.get("input_ids"), list):
        return " ".join(str(number) for number in body["input_ids"])
    raise RequestError("expected one of messages, text, prompt (text) or input_ids")


def pack(prompt: str) -> bytes:
    """Return the pretended KV cache of a prompt: each token in TOKEN_BYTES bytes, padded with zeros."""
    return b"".join(
        token.encode()[start : start + TOKEN_BYTES].ljust(TOKEN_BYTES, b"\0")
        for token in split(prompt)
        for start in range(0, len(token.encode()), TOKEN_BYTES)
    )


def unpack(cache: bytes) -> str:
    """Return the prompt that `pack` has packed."""
    blocks = (cache[start : start + TOKEN_BYTES] for start in range(0, len(cache), TOKEN_BYTES))
    return b"".join(block.rstrip(b"\0") for block in blocks).decode()
