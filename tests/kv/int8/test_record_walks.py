"""Random walks over the real scheduler whose blocks move into records and back; every read is checked.

The runner keeps what every slot of blocks and records holds, makes the moves of a step before it, and refuses to read
what is not the request's own prefix, records that the step does not name, and to write to any.
"""

from __future__ import annotations

import random

import pytest

from tests.kv.gap_talks import DEPTHS, RUNNERS, Talks, words
from tests.support.extent import with_full
from tests.support.preempting import PREEMPTING

COVERING = [("fcfs", "off"), ("fcfs", "fused"), (PREEMPTING, "off"), (PREEMPTING, "fused"), ("pensieve", "fused")]


@DEPTHS
@pytest.mark.parametrize("seed", with_full(range(2), range(8)))
@pytest.mark.parametrize(("system", "gaps"), COVERING)
def test_walk(system: str, gaps: str, seed: int, depth: int) -> None:
    """Random turns in a pool that is too small, random drops, aborts, resets."""
    rng = random.Random(seed)
    talks = Talks(
        system=system,
        gaps=gaps,
        v2=gaps == "off" and seed % 2 == 0,
        depth=depth,
        int8_share=rng.choice([0.2, 0.4]),
        num_blocks=rng.randint(54, 64),
        max_num_batched_tokens=rng.choice([24, 48, 96, 512]),
        max_num_seqs=rng.choice([4, 8]),
        max_model_len=448,
    )
    records, shared = talks.scheduler.records, words(99, rng.choice([0, 24, 48]))
    talks.walk(rng, shared, clients=4, lose=0.2, reset=0.02)
    state = records.state()
    assert state["moves"]["demoted"] > 3, "the walk went past what it is for"
    assert state["records"]["held"] == 0
    assert talks.manager.reading == {}
    assert talks.pool.get_num_free_blocks() == talks.pool.num_gpu_blocks - 1
    assert records.num_free == records.num_records
    assert talks.scheduler.vllm_ext_state()["fallbacks"] == 0


def preempting(depth: int, *, v2: bool = False, **kwargs: int) -> Talks:
    """Two requests that need more blocks than there are, one of which is preempted; another one fills the rest."""
    options = {"num_blocks": 40, "max_num_batched_tokens": 512, "max_num_seqs": 4, "max_model_len": 256, **kwargs}
    return Talks(gaps="off", depth=depth, v2=v2, int8_share=0.4, **options)


@DEPTHS
@RUNNERS
def test_a_preempted_request_computes_one_token_again(depth: int, v2: bool) -> None:
    talks = preempting(depth, v2=v2)
    names = [talks.say(name, words(ord(name), 90 + 5 * i), answer=150) for i, name in enumerate("abc")]
    resumed = 0
    while talks.loop.has_work:
        before = {n: r.num_preemptions for n in names if (r := talks.scheduler.requests.get(n)) is not None}
        waiting = {r.request_id for r in talks.scheduler.waiting if r.num_preemptions}
        for req_id, num_tokens in talks.step().items():
            if req_id in waiting and before.get(req_id):
                resumed += 1
                assert num_tokens == 1
    assert resumed > 0
    state = talks.scheduler.records.state()
    assert state["moves"]["resumed"] == resumed
    assert 0 < state["resumed_tokens"] < resumed * talks.scheduler.block_size


@DEPTHS
def test_a_reset_forgets_what_was_kept_of_preempted_requests(depth: int) -> None:
    """Whatever was computed with other weights would be found out by the runner."""
    talks = preempting(depth)
    for i, name in enumerate("abc"):
        talks.say(name, words(ord(name), 90 + 5 * i), answer=150)
    while not talks.scheduler.records._partials:
        talks.step()
    talks.scheduler.reset_prefix_cache(reset_running_requests=True)
    talks.runner.invalidate_kv()
    assert not talks.scheduler.records._partials
    talks.drain()
    assert talks.pool.get_num_free_blocks() == talks.pool.num_gpu_blocks - 1
