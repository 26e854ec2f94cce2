"""Requests whose hints are wrong in random ways, over HTTP."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

KEYS = ("osl", "ttft_slo_ms", "tbt_slo_ms", "jct_slo_ms", "conversation_id", "slo_report", "somebody_elses")
HEADERS = ("x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-dynamo-osl", "X-Session-ID", "X-Request-Id")
_NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e-320, 1e308, -0.0)
_WORDS = (
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "0x10",
    "١٢",
    "12\u0000",
    "\ud7ff",
    "soon",
    "null",
    "true",
    "c" * 5000,
)


def value(dice: random.Random, depth: int = 0) -> Any:
    """A JSON value, mostly none that a hint may have."""
    kind = dice.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return dice.choice(_NUMBERS)
    if kind == 1:
        return dice.choice(_WORDS)
    if kind == 2:
        return dice.choice((None, True, False))
    if kind == 3:
        return "".join(chr(dice.randrange(1, 0xD800)) for _ in range(dice.randrange(12)))
    if kind == 4:
        return dice.uniform(-1e6, 1e6)
    if kind == 5:
        return [value(dice, depth + 1) for _ in range(dice.randrange(4))]
    return {dice.choice((*KEYS, "agent_hints", "x")): value(dice, depth + 1) for _ in range(dice.randrange(4))}


def requests(seed: int, count: int, model: str) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Yield path, body and headers of requests."""
    dice = random.Random(seed)
    for _ in range(count):
        chat = dice.random() < 0.5
        body: dict[str, Any] = {"model": model, "max_tokens": 1, "stream": dice.random() < 0.3}
        body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
        headers = {"Content-Type": "application/json"}
        for where in dice.sample(("vllm_xargs", "nvext", "headers"), dice.choice((1, 1, 2))):
            if where == "headers":
                headers[dice.choice(HEADERS)] = _header(dice)
            elif where == "nvext":
                hints = {dice.choice(KEYS): value(dice)} if dice.random() < 0.7 else value(dice)
                body[where] = {"agent_hints": hints} if dice.random() < 0.8 else value(dice)
            else:
                body[where] = {dice.choice(KEYS): value(dice)} if dice.random() < 0.9 else value(dice)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        yield path, json.dumps(body).encode(), headers


def _header(dice: random.Random) -> str:
    """What can be sent at all: printable, in one line."""
    text = str(value(dice))[:2000]
    return "".join(c for c in text if " " <= c <= "~").strip()
