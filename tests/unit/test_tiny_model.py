"""The lab's model as committed: whole, small, and made of pairs that tell a lost KV cache from a right one."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parents[2] / "lab/models"
MODEL = MODELS / "tiny-chat"


def read(name: str) -> Any:
    return json.loads((MODEL / name).read_text("utf-8"))


def pairs() -> list[tuple[str, str]]:
    return [(row["prompt"], row["answer"]) for row in json.loads((MODELS / "prompts.json").read_text("utf-8"))]


def test_the_manifest_names_every_file_and_its_content() -> None:
    lines = (MODELS / "tiny-chat.sha256").read_text("ascii").splitlines()
    listed = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    found = {str(path.relative_to(MODEL)): path for path in MODEL.rglob("*") if path.is_file()}
    assert listed == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}


def test_it_is_small_enough_to_live_in_the_repository() -> None:
    assert sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file()) < 2_000_000


def test_every_prompt_has_an_answer_of_its_own() -> None:
    prompts, answers = zip(*pairs(), strict=True)
    assert len(prompts) >= 60
    assert len(set(prompts)) == len(set(answers)) == len(prompts)


def test_the_default_question_of_the_gate_is_among_them() -> None:
    assert dict(pairs())["What is the capital of France? Answer with one word."] == "Paris"


def test_some_prompts_are_long_and_differ_only_far_from_their_end() -> None:
    long = [prompt for prompt, _ in pairs() if len(prompt.split()) >= 100]
    assert len(long) >= 10
    endings = Counter(" ".join(prompt.split()[-60:]) for prompt in long)
    assert all(count > 1 for count in endings.values())


def test_no_answer_begins_alone() -> None:
    firsts = Counter(answer[0] for _, answer in pairs())
    assert all(count > 1 for count in firsts.values()), firsts


def test_it_is_what_the_engine_runs_on_a_cpu_and_ends_its_answers() -> None:
    config, generation, tokenizer = read("config.json"), read("generation_config.json"), read("tokenizer.json")
    assert (config["architectures"], config["n_positions"], config["dtype"]) == (["GPT2LMHeadModel"], 512, "bfloat16")
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert config["eos_token_id"] == generation["eos_token_id"] == special["<|eos|>"]
    assert len(tokenizer["model"]["vocab"]) == config["vocab_size"]
    assert "<|assistant|>" in (MODEL / "chat_template.jinja").read_text("utf-8")


def test_the_weights_are_bf16_and_whole() -> None:
    data = (MODEL / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    assert {row["dtype"] for row in header.values()} == {"BF16"}
    assert max(row["data_offsets"][1] for row in header.values()) == len(data) - 8 - length
