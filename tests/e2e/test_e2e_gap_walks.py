"""Long random walks over conversations with gaps, on the real engine: tokens are those of an engine without any cache.

float32. Conversations share a system prompt; turns come one by one or several at a time, some twice at once, some are
aborted, and pools are so small that requests are preempted. Before every few steps blocks and chunks are lost wherever
they stand, and all that holds nothing is poisoned, on the device and in host memory.

`make soak` walks ``SOAK_TURNS`` turns, each on several engines, from ``SOAK_SEED`` on; CI some sixty.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, Engines, Outcome, arrival

from tests.support.upstream import WITH_GAPS

pytestmark = [pytest.mark.e2e, WITH_GAPS, pytest.mark.timeout(3000)]

TURNS = int(os.environ.get("SOAK_TURNS", "60"))
FIRST_SEED = int(os.environ.get("SOAK_SEED", "0"))
WALK_TURNS = 60
MAX_MODEL_LEN = 512
NO_CACHE: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False}
SMALL: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4, "num_gpu_blocks_override": 22}
GIB = 0.7 / 1024
_CHARACTERS = range(32, 127)


def engine(system: str, budget: int, **tier: Any) -> dict[str, Any]:
    options = {"kv_tier": tier, "prediction": {"sources": ["hint", "history"]}}
    steered = {"scheduler_cls": system, "additional_config": {"vllm_ext": options}}
    return {**SMALL, **steered, "max_num_batched_tokens": budget}


ENGINES = {
    "device": engine("fcfs", 200, gaps="fused"),
    "pensieve": engine("pensieve-published", 48, gib=GIB),
    "alise+pensieve": engine("alise+pensieve", 48, gib=GIB, bits=16, gaps="fused", policy="leading"),
}
"""Budgets of 48 tokens cut gaps in pieces, some of one token."""
BOOTS = ("plain", "async", "v2")
"""Of the walks, in turn; models take turns more slowly."""


def walk(seed: int) -> list[dict[str, Any]]:
    """Requests in a random order, with aborted ones."""
    dice = random.Random(seed)
    shared = said(dice, 40)
    last: dict[int, str | None] = dict.fromkeys(range(6))
    length = dict.fromkeys(last, 0)
    made: list[dict[str, Any]] = []
    step = 0
    while len(made) < WALK_TURNS:
        step += dice.choice((0, 0, 3, 8, 20))
        talk, answer = dice.randrange(len(last)), dice.randrange(3, 25)
        name, words = f"{len(made)}-c{talk}", said(dice, dice.randrange(5, 60))
        if last[talk] is None or length[talk] + len(words) + answer > MAX_MODEL_LEN - 60:
            last[talk], length[talk] = None, 0
            words = shared + words
        turn = arrival(name, step, words, answer) | ({} if last[talk] is None else {"after": last[talk]})
        kind = dice.random()
        if kind < 0.15:
            made.append(turn | {"abort_after": dice.randrange(1, 12)})
            continue
        made.append(turn)
        if kind < 0.3:
            made.append(turn | {"id": f"{name}-twin"})
        last[talk], length[talk] = name, length[talk] + len(words) + answer
    return made


def said(dice: random.Random, num_tokens: int) -> list[int]:
    return dice.choices(_CHARACTERS, k=num_tokens)


def spec(name: str, model: Path, engine: dict[str, Any], arrivals: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"name": name, "engine": {**BASE_ENGINE, "model": str(model), **engine}, "arrivals": arrivals, **more}


@pytest.mark.parametrize("part", range(-(-TURNS // WALK_TURNS)))
def test_4_the_tokens_are_those_without_a_cache(part: int, run_engines: Engines, llama: Path, opt: Path) -> None:
    boot, model = BOOTS[part % len(BOOTS)], (llama, opt)[part // len(BOOTS) % 2]
    arrivals = walk(FIRST_SEED + part)
    kept = [each for each in arrivals if "abort_after" not in each]
    runs = [spec("none", model, NO_CACHE, kept)]
    runs += [spec(name, model, engine, arrivals, odd_gaps="drops") for name, engine in ENGINES.items()]
    found = run_engines(runs, boot=boot)
    expected = found.pop("none").tokens
    assert expected.keys() == {each["id"] for each in kept}
    for name, outcome in found.items():
        assert {each: outcome.tokens[each] for each in expected} == expected, name
        assert left(outcome) == (0, 0, 0, 0), name
    # Who pushes whom out depends on when copies are there: one engine alone may have had no gaps.
    assert sum(outcome.gaps["requests"] for outcome in found.values()) > 3, "nothing was shown"
    assert found["pensieve"].gaps["tokens_loaded"] > 0
    assert sum(outcome.preemptions for outcome in found.values()) > 0


def left(outcome: Outcome) -> tuple[int, int, int, int]:
    return (outcome.blocks_missing, outcome.left_running, outcome.left_waiting, outcome.fallbacks)
