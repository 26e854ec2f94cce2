"""Where KV memory is short of what runs, everybody is served all the same, in not many more steps than vLLM takes."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.support.audit import audit_drained
from tests.support.simulation_parts import PerTokenCost, ask, make_engine
from vllm_ext.simulation.workloads.requests import SimRequest, Slo
from vllm_ext.systems import known

SYSTEMS = [name for name in known(unserved=True) if not name.startswith("test-")]
_LONG_S = 400.0
"""vLLM needs a few seconds of virtual time."""
_MORE_STEPS = 8
"""Those that preempt for an objective compute much again; one that never ends takes thousands of times as many."""
_OBJECTIVES = (None, Slo(ttft_s=0.01), Slo(ttft_s=1.0), Slo(tbt_s=0.01), Slo(tbt_s=0.1))


def squeezed(seed: int) -> list[SimRequest]:
    """Return a few requests with shared prefixes and objectives; the longest one fits alone into 10 blocks of 16."""
    draw = random.Random(seed)
    shared = [1000 + i for i in range(96)]
    found = []
    for i in range(draw.randint(4, 14)):
        prompt = draw.randint(1, 110)
        ids = shared[: 32 * draw.randint(0, 3)][:prompt]
        ids += [draw.randint(100, 900) for _ in range(prompt - len(ids))]
        slo = draw.choice(_OBJECTIVES)
        more = {"max_tokens": 48, "token_ids": ids} | ({} if slo is None else {"slo": slo})
        found.append(ask(f"r{i}", draw.choice([0.0, draw.random()]), prompt, draw.randint(1, 45), **more))
    return sorted(found, key=lambda request: request.arrival_s)


def steps(system: str, seed: int, blocks: int, depth: int, *, caching: bool) -> int:
    """Serve them all; return how many steps it took."""
    engine = make_engine(
        squeezed(seed),
        PerTokenCost(),
        num_blocks=blocks,
        system=system,
        prefix_caching=caching,
        async_scheduling=depth == 2,
    )
    engine.run(_LONG_S)
    assert not list(engine.collector.unserved.rows()), f"seed {seed}, {blocks} blocks, caching {caching}"
    audit_drained(engine.scheduler)
    return len(engine.decisions or ())


@cache
def steps_of_vllm(seed: int, blocks: int, depth: int, caching: bool) -> int:
    return steps("upstream-fcfs", seed, blocks, depth, caching=caching)


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_everybody_is_served_from_a_pool_that_holds_little_more_than_one(system: str, depth: int) -> None:
    for seed in range(3):
        for blocks, caching in ((11, False), (12, True), (14, True)):
            taken = steps(system, seed, blocks, depth, caching=caching)
            assert taken <= _MORE_STEPS * steps_of_vllm(seed, blocks, depth, caching), f"seed {seed}, {blocks} blocks"
