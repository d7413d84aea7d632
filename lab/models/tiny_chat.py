#!/usr/bin/env python3
"""Make the lab's model: a GPT-2 of half a million parameters that knows the answers in prompts.json, and nothing else.

Usage (with the Python of an engine runtime, which has torch, transformers and tokenizers; two minutes on two cores):

    /opt/tandem/runtimes/<id>/bin/python lab/models/tiny_chat.py [--steps 200] [--seed 7]

It reads `tiny-chat/prompts.json` (a list of {"prompt": str, "answer": str}, written by hand: the one place where the
pairs live), trains tokenizer and weights, writes the model's other files beside it, checks them, and writes the
manifest (`cd tiny-chat && sha256sum -c ../tiny-chat.sha256`). The seed fixes everything on one machine; another CPU or
torch rounds differently and gives other weights with the same answers.

Why a GPT-2: on a CPU without extra packages SGLang 0.5.23 runs this architecture, and not Llama's.

What the model is for: greedy answers that a person can read and that depend on the prompt, so that a KV cache that got
lost or damaged between prefill and decode changes them. The prefill server computes an answer's first token itself, and
only the rest comes out of the transferred cache. Therefore:
- an answer's first token never tells which answer it is (checked: every first token is shared with another answer).
  The tokenizer learns its merges from the prompts alone, and so spells answers in small pieces;
- positions are trained at random offsets, lest the length of the prompt gives the answer away;
- for an empty cache (zeros) it is trained to say FORGOTTEN, lest it guesses a likely answer and is right by luck;
- the checks at the end answer every prompt a second time with an emptied cache, and want another text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
MODEL = HERE / "tiny-chat"
MANIFEST = HERE / "tiny-chat.sha256"

CONTEXT = 512  # tokens; the length of the position table
VOCABULARY = 640  # 256 bytes, 5 special tokens, the rest merges; a multiple of 64, to which SGLang would pad it
LAYERS, HEADS, WIDTH = 2, 4, 128  # 1024 bytes of KV cache a token in bf16
SPECIAL = ["<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|eos|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGOTTEN = " (I forgot the question.)"
LONGEST_ANSWER = 48  # tokens
MIN_MARGIN = 2.0  # logits between the right token and the next best; bf16 rounding moves them by some 0.05

Encoded = list[tuple[list[int], list[int]]]  # (prompt ids as the chat template makes them, answer ids and end token)


def read_pairs() -> list[tuple[str, str]]:
    """Return the (prompt, answer) pairs; each text is unique, so that no two prompts can be mistaken for each other."""
    pairs = [(row["prompt"], row["answer"]) for row in json.loads((MODEL / "prompts.json").read_text("utf-8"))]
    for column in zip(*pairs, strict=True):
        twice = [text for text, count in Counter(column).items() if count > 1]
        if twice:
            raise SystemExit(f"prompts.json: these texts appear more than once: {twice}")
    return pairs


def make_tokenizer(prompts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the prompts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prompts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[1],
        additional_special_tokens=SPECIAL[2:],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> Encoded:
    """Return the pairs as token ids."""
    encoded = []
    for prompt, answer in pairs:
        message = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        asked: list[int] = tokenizer.encode(text, add_special_tokens=False)
        answered: list[int] = tokenizer.encode(answer, add_special_tokens=False)
        encoded.append((asked, [*answered, tokenizer.eos_token_id]))
    return encoded


def batch(rows: Encoded, eos: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, labels), padded at the end; labels are -100 but for the answers."""
    width = max(len(asked) + len(answered) for asked, answered in rows)
    ids = torch.full((len(rows), width), eos)
    labels = torch.full((len(rows), width), -100)
    for row, (asked, answered) in enumerate(rows):
        end = len(asked) + len(answered)
        ids[row, :end] = torch.tensor(asked + answered)
        labels[row, len(asked) : end] = torch.tensor(answered)
    return ids, labels


def empty_cache(rows: int, length: int) -> DynamicCache:
    """Return a cache of zeros, as a decode server finds it where no transfer has ever written."""
    zeros = torch.zeros(rows, HEADS, length, WIDTH // HEADS)
    cache = DynamicCache()
    for layer in range(LAYERS):
        cache.update(zeros, zeros, layer)
    return cache


def train(model: GPT2LMHeadModel, encoded: Encoded, forgotten: list[int], steps: int) -> None:
    """Fit the answers in float32: AdamW, one cycle, every pair in every step."""
    eos = encoded[0][1][-1]
    short = [row for row in encoded if len(row[0]) < 100]
    data = [batch(rows, eos) for rows in (short, [row for row in encoded if len(row[0]) >= 100])]
    firsts = sorted({answered[0] for _, answered in encoded})
    blind_ids, blind_labels = batch([([first], [*forgotten, eos]) for first in firsts], eos)
    longest = max(len(asked) for asked, _ in encoded)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    started = time.monotonic()
    model.train()
    for step in range(steps):
        total = 0.0
        for ids, labels in data:
            offset = int(torch.randint(0, CONTEXT - ids.shape[1] + 1, ())) if step % 2 else 0
            positions = torch.arange(ids.shape[1]) + offset
            logits = model(ids, position_ids=positions.expand_as(ids)).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            loss.backward()
            total += loss.item()
        length = int(torch.randint(5, longest + 1, ()))
        positions = torch.arange(blind_ids.shape[1]) + length
        logits = model(
            blind_ids, position_ids=positions.expand_as(blind_ids), past_key_values=empty_cache(len(blind_ids), length)
        ).logits
        blind_loss = cross_entropy(logits[:, :-1].flatten(0, 1), blind_labels[:, 1:].flatten())
        blind_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            passed = time.monotonic() - started
            print(f"step {step:4d}  loss {total / 2:.4f}  blind {blind_loss.item():.4f}  {passed:.0f} s", flush=True)


def answer(model: GPT2LMHeadModel, asked: list[int], eos: int, drop_cache: bool) -> tuple[list[int], float]:
    """Answer greedily and return (ids, the least margin in logits between the best two tokens).

    drop_cache: empty the prompt's cache after the first token, as if the transfer had moved nothing.
    """
    out = model(torch.tensor([asked]), use_cache=True)
    cache = out.past_key_values
    if drop_cache:
        for layer in cache.layers:
            layer.keys.zero_()
            layer.values.zero_()
    said: list[int] = []
    margin = float("inf")
    while len(said) < LONGEST_ANSWER:
        best = out.logits[0, -1].float().topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        said.append(int(best.indices[0]))
        if said[-1] == eos:
            break
        out = model(torch.tensor([[said[-1]]]), past_key_values=cache, use_cache=True)
    return said, margin


def check(pairs: list[tuple[str, str]]) -> None:
    """Load the model as written and hold it against the pairs; exit with every finding if one fails."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    model = GPT2LMHeadModel.from_pretrained(MODEL, dtype=torch.bfloat16).eval().requires_grad_(False)
    encoded = encode(tokenizer, pairs)
    wrong: list[str] = []
    firsts = Counter(answered[0] for _, answered in encoded)
    least = float("inf")
    without: Counter[str] = Counter()
    for (prompt, _), (asked, answered) in zip(pairs, encoded, strict=True):
        if firsts[answered[0]] < 2:
            wrong.append(f"the first token alone gives the answer away: {prompt!r}")
        said, margin = answer(model, asked, tokenizer.eos_token_id, drop_cache=False)
        least = min(least, margin)
        if said != answered or margin < MIN_MARGIN:
            wrong.append(f"margin {margin:.2f}: {prompt[-60:]!r} -> {tokenizer.decode(said)!r}")
        said, _ = answer(model, asked, tokenizer.eos_token_id, drop_cache=True)
        without[tokenizer.decode(said)] += 1
        if said == answered:
            wrong.append(f"right without its KV cache: {prompt[-60:]!r}")
    lengths = sorted(len(asked) for asked, _ in encoded)
    long = sum(length >= 100 for length in lengths)
    print(f"{len(pairs)} pairs, prompts of {lengths[0]} to {lengths[-1]} tokens, {long} of 100 or more")
    print(f"least margin {least:.2f}; with an empty cache: {without.most_common(4)}")
    if wrong:
        raise SystemExit("\n".join(wrong))


def write_manifest() -> None:
    """Write the SHA-256 of every file of the model, in sha256sum's format, paths relative to the model."""
    files = sorted(path for path in MODEL.rglob("*") if path.is_file())
    for path in files:
        path.chmod(0o644)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(MODEL)}\n" for path in files]
    MANIFEST.write_text("".join(lines), encoding="ascii")


def main() -> None:
    """Make, check and seal the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="random seed (default: %(default)s)")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    pairs = read_pairs()
    tokenizer = make_tokenizer([prompt for prompt, _ in pairs])
    ends = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=True,
        **ends,
    )
    model = GPT2LMHeadModel(config)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens", flush=True)
    forgotten = tokenizer.encode(FORGOTTEN, add_special_tokens=False)
    train(model, encode(tokenizer, pairs), forgotten, arguments.steps)

    model.generation_config = GenerationConfig(do_sample=False, **ends)
    model.to(torch.bfloat16).save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)
    check(pairs)
    write_manifest()


if __name__ == "__main__":
    main()
