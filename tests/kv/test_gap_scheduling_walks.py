"""Random walks over the real scheduler whose conversations lose blocks between turns."""

from __future__ import annotations

import random

import pytest

from tests.extent import with_full
from tests.support.preempting import PREEMPTING

from .gap_talks import DEPTHS, Talks, words


@DEPTHS
@pytest.mark.parametrize("seed", with_full(range(2), range(6)))
@pytest.mark.parametrize("system", ["fcfs", PREEMPTING, "auto"])
def test_walk(system: str, seed: int, depth: int) -> None:
    """Random turns in a pool that is too small, random drops, aborts; every read is checked."""
    rng = random.Random(seed)
    budget = rng.choice([24, 48, 96, 512])
    talks = Talks(
        system=system,
        depth=depth,
        num_blocks=rng.randint(34, 48),
        max_num_batched_tokens=budget,
        max_num_seqs=8 if seed % 2 == 0 else 4,
        max_model_len=448,
    )
    shared = words(99, rng.choice([0, 24, 48]))
    talks.walk(rng, shared, clients=3, lose=0.3)
    counts = talks.scheduler.gaps.counts
    assert counts.requests > 3, "the walk went past what it is for"
    if (system, seed) == (PREEMPTING, 0):
        assert sum(talks.scheduler.vllm_ext_state()["preemptions"].values()) > 0
    assert talks.manager.placements == {}
    assert talks.pool.get_num_free_blocks() == talks.pool.num_gpu_blocks - 1
    assert talks.scheduler.vllm_ext_state()["fallbacks"] == 0
