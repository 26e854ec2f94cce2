"""What requests ask for is net of what is cached: behind a shared prefix no system is slower than vLLM."""

from __future__ import annotations

import pytest

from tests.support.steering import Rig
from vllm_ext.simulation.engine.harness import make_request
from vllm_ext.systems import table

RESERVES = ("orca", "conservative")
"""Systems that reserve maxima for each request, shared or not, by definition."""
COLD = ("past-future", "past-future-published")
"""Systems whose forecast knows no output length before the first requests have ended."""
SYSTEMS = [s.name for s in table(unserved=True) if not s.oracle and s.paper + s.summary and s.name not in RESERVES]


def add_sharing(rig: Rig, count: int, *, shared: int, own: int, length: int = 20, start: int = 0) -> None:
    """Requests behind a prefix of so many blocks, each with blocks of its own."""
    common = [(i * 31) % 900 + 100 for i in range(shared * 16)]
    for number in range(start, start + count):
        req_id = f"r{number}"
        rig.lengths[req_id] = length
        tokens = common + [(i * 17 + number * 131) % 900 + 100 for i in range(own * 16)]
        rig.loop.add(make_request(req_id, tokens, max_tokens=4 * length, arrival_time=rig.clock(), hasher=rig._hasher))


def steps_taken(system: str | None, *, blocks: int, shared: int, own: int, budget: int = 2048, warm: int = 0) -> int:
    rig = Rig(system, max_num_seqs=32, num_blocks=blocks, max_num_batched_tokens=budget, max_model_len=4096)
    if warm:
        add_sharing(rig, warm, shared=shared, own=own, start=1000)
        rig.drain(seconds=0.02)
    before = rig.scheduler.current_step
    add_sharing(rig, 25, shared=shared, own=own)
    rig.drain(seconds=0.02)
    if system:
        assert (rig.state["fallbacks"], rig.state["stalls"]) == (0, 0)
    return int(rig.scheduler.current_step - before)


@pytest.mark.parametrize("system", SYSTEMS)
def test_nobody_needs_more_steps_than_vllm_behind_a_shared_prefix(system: str) -> None:
    """80 shared blocks and one of their own in a pool of 120: auto and accelgen took 500 steps where vLLM takes 39."""
    scene = {"blocks": 120, "shared": 80, "own": 1}
    if (
        system in COLD
    ):  # after ten requests it goes by what it has seen; in 120 blocks vLLM preempts, which it forestalls
        scene |= {"blocks": 180, "warm": 10}
        assert steps_taken(system, **scene) <= 1.05 * steps_taken(None, **scene)
    else:
        paper = system.partition("-published")[0]
        slack = {"pensieve": 4, "fastgen": 5}.get(paper, 0)  # a tenth of the pool kept free; a small forward pass
        assert steps_taken(system, **scene) <= 1.05 * steps_taken(None, **scene) + slack


@pytest.mark.parametrize("system", ["alise", "accelgen", "past-future", "auto"])
def test_blocks_of_their_own_are_counted_in_full(system: str) -> None:
    """39 own blocks in a pool of 300: five fit beside the prefix. auto and accelgen took 180 steps, vLLM 102."""
    scene = {"blocks": 300, "shared": 80, "own": 39, "warm": 10 if system in COLD else 0}
    assert steps_taken(system, **scene) <= 1.05 * steps_taken(None, **scene)


@pytest.mark.parametrize("system", ["alise", "accelgen", "past-future", "auto"])
def test_a_chunk_that_is_cut_shares_only_what_it_computes(system: str) -> None:
    """256 tokens a step: the first sharer's prefix takes five of them."""
    scene = {"blocks": 180, "shared": 80, "own": 1, "budget": 256, "warm": 0}
    assert steps_taken(system, **scene) <= 1.05 * steps_taken(None, **scene) + (20 if system in COLD else 0)


def test_a_forecast_that_is_cold_goes_by_bounds_for_ten_requests_at_most() -> None:
    rig = Rig("past-future", max_num_seqs=32, num_blocks=120, max_num_batched_tokens=2048, max_model_len=4096)
    add_sharing(rig, 60, shared=80, own=1)
    most = 0
    while rig.state["next_record"] < 10:
        rig.step(seconds=0.02)
        most = max(most, len(rig.running))
    warm = 0
    while rig.loop.has_work:
        rig.step(seconds=0.02)
        warm = max(warm, len(rig.running))
    assert most < warm, "bounds of 80 tokens, where 20 are generated"


def test_a_cached_prompt_is_not_taken_for_one_that_comes_too_late() -> None:
    """4,016 tokens, 250 of 251 blocks cached, 300 ms to the first token: priced in full it was relegated at arrival."""
    rig = Rig(
        "accelgen",
        num_blocks=600,
        max_num_seqs=4,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        options={"prediction": {}},
    )
    rig.scheduler.tracked.runtime.given = None
    add_sharing(rig, 1, shared=250, own=1, length=4)
    rig.drain(seconds=0.01)
    full_s = rig.scheduler.tracked.runtime.prefill_s(4016)
    tokens = [(i * 31) % 900 + 100 for i in range(250 * 16)] + list(range(200, 216))
    rig.lengths["late"] = 4
    request = make_request(
        "late",
        tokens,
        max_tokens=16,
        arrival_time=rig.clock(),
        hasher=rig._hasher,
        extra_args={"ttft_slo_ms": 500 * full_s},
    )
    rig.loop.add(request)
    view = rig.scheduler.tracked.view(rig.scheduler.tracked["late"])
    assert (view.cached_tokens, view.missing_tokens) == (4000, 16)
    assert view.prefill_s < full_s / 10
    assert rig.scheduler.ranked.rank(request).level == 0, "half the time of the whole prompt is enough for its rest"
