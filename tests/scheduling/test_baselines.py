"""orca and vllm-2023 on vLLM's scheduler, step by step: who gets how many tokens, worked by hand."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from tests.support.steering import SCRIPT, Rig, Table, play, steps, workload
from vllm_ext.contract import Split, Step

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
BASELINES = pytest.mark.parametrize("system", ["orca", "vllm-2023"])


def add_all(rig: Rig, **requests: tuple[int, int, int]) -> None:
    """Add requests given as (prompt, max_tokens, true length)."""
    for req_id, (prompt, max_tokens, length) in requests.items():
        rig.add(req_id, prompt, max_tokens=max_tokens, length=length)


def test_orca_takes_whole_prompts_and_reserves_their_maximum() -> None:
    """64 tokens per step, 10 blocks. Bounds: a 2 blocks, b 4, c 4, d 1."""
    requests = {"a": (20, 12, 3), "b": (40, 24, 9), "c": (50, 14, 9), "d": (10, 6, 9)}
    rig = Rig("orca", num_blocks=11)
    add_all(rig, **requests)
    assert steps(rig, 4) == [
        {"a": 20, "b": 40},  # c has the memory, but its 50 tokens do not fit beside 60
        {"a": 1, "b": 1, "c": 50},  # all 10 blocks are promised
        {"a": 1, "b": 1, "c": 1},  # d waits although 2 + 3 + 4 blocks are used: no block is free of a promise
        {"b": 1, "c": 1, "d": 10},  # a is done
    ]
    upstream = Rig(None, num_blocks=11)
    add_all(upstream, **requests)
    assert steps(upstream, 1) == [{"a": 20, "b": 40, "c": 4}], "or the table above shows nothing of Orca"


def test_orca_takes_a_prompt_longer_than_a_step_alone() -> None:
    rig = Rig("orca", max_num_batched_tokens=16)
    add_all(rig, a=(4, 9, 9), long=(40, 9, 9), b=(6, 9, 9))
    assert steps(rig, 5) == [
        {"a": 4},
        {"a": 1, "long": 15},
        {"a": 1, "long": 15},
        {"a": 1, "long": 10},  # 5 tokens are left: too few for b
        {"a": 1, "long": 1, "b": 6},
    ]


@DEPTHS
@pytest.mark.parametrize(
    ("reserve", "blocks", "expected"), [(0, 63, 15), (0, 3, 1), (100, 63, 9), (2048, 95, 2), (2048, 96, 3)]
)
def test_orca_runs_as_many_as_reservations_fit_the_pool(reserve: int, blocks: int, expected: int, depth: int) -> None:
    """Bound 64 tokens = 4 blocks; 100 tokens = 7 blocks; 2048 is cut at max_model_len = 512 = 32 blocks."""
    rig = Rig(
        "orca",
        depth=depth,
        options={"admission": {"reserve_tokens": reserve}},
        num_blocks=blocks + 1,
        max_num_seqs=32,
        max_num_batched_tokens=512,
    )
    for i in range(20):
        rig.add(f"r{i}", 10, max_tokens=54, length=40)
    rig.step(4)
    assert len(rig.running) == expected
    assert rig.running == [f"r{i}" for i in range(expected)]


@DEPTHS
def test_orca_never_preempts_where_vllm_does(depth: int) -> None:
    """Every request runs to its bound, the worst case; the pool holds a few of them."""
    rng = random.Random(3)
    jobs = [(f"r{i}", rng.randint(1, 60), rng.randint(1, 60)) for i in range(40)]
    preemptions = {}
    for system in ("orca", "fcfs"):
        rig = Rig(system, depth=depth, num_blocks=20, max_num_seqs=8)
        for req_id, prompt, length in jobs:
            rig.add(req_id, prompt, max_tokens=length, length=1000)
        rig.drain()
        preemptions[system] = rig.state["preemptions"]["memory"]
    assert preemptions["orca"] == 0
    assert preemptions["fcfs"] > 5


def test_vllm_2023_runs_prompts_before_decodes_and_never_both() -> None:
    rig = Rig("vllm-2023")
    add_all(rig, a=(20, 9, 9), b=(30, 9, 9), c=(30, 9, 9))
    assert steps(rig, 3) == [{"a": 20, "b": 30}, {"c": 30}, {"a": 1, "b": 1, "c": 1}]
    add_all(rig, d=(10, 9, 9))
    assert steps(rig, 2) == [{"d": 10}, {"a": 1, "b": 1, "c": 1, "d": 1}]


@pytest.mark.parametrize("system", ["vllm-2023", "sarathi-chunked-only"])
def test_decodes_go_on_while_vllm_puts_prompts_off(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM throttles prompts to balance data-parallel engines; decodes that made way for them left the step empty."""
    rig = Rig(system)
    add_all(rig, a=(20, 9, 9))
    rig.step()
    add_all(rig, b=(10, 9, 9))
    with monkeypatch.context() as throttling:
        throttling.setattr(rig.scheduler, "schedule", functools.partial(rig.scheduler.schedule, True))
        assert steps(rig, 2) == [{"a": 1}, {"a": 1}]
    assert {"b": 10} in steps(rig, 2)


def test_vllm_2023_completes_a_prompt_longer_than_a_step_before_any_decode() -> None:
    rig = Rig("vllm-2023")
    add_all(rig, a=(20, 9, 9))
    rig.step(2)
    add_all(rig, long=(150, 9, 9), b=(10, 9, 9))
    assert steps(rig, 4) == [{"long": 64}, {"long": 64}, {"long": 22, "b": 10}, {"a": 1, "long": 1, "b": 1}]


def test_vllm_2023_leaves_the_watermark_free() -> None:
    """10 blocks, 3 of them kept free: prompts of 2 blocks fit three times."""
    rig = Rig("vllm-2023", options={"admission": {"watermark": 0.7}}, num_blocks=11)
    for i in range(5):
        rig.add(f"r{i}", 20, max_tokens=20, length=20)
    assert steps(rig, 2) == [{"r0": 20, "r1": 20, "r2": 20}, {"r0": 1, "r1": 1, "r2": 1}]


def test_vllm_2023_preempts_the_last_arrival_and_recomputes_it_as_a_prompt() -> None:
    """3 blocks. At 17 tokens each, a takes the third one and b leaves with 2 tokens generated; a grows to 3 blocks."""
    rig = Rig("vllm-2023", num_blocks=4, options={"admission": {"watermark": 1.0}}, enable_prefix_caching=False)
    add_all(rig, a=(15, 25, 25), b=(15, 25, 25))
    expected: Table = [{"a": 15, "b": 15}, {"a": 1, "b": 1}, *[{"a": 1}] * 23, {"b": 17}, *[{"b": 1}] * 22]
    assert steps(rig, len(expected)) == expected
    assert rig.state["preemptions"]["memory"] == 1
    assert not rig.scheduler.requests


@BASELINES
@DEPTHS
@pytest.mark.parametrize("kwargs", [{"num_blocks": 28}, {"num_blocks": 28, "enable_prefix_caching": False}, {}])
def test_outputs_are_upstreams_and_no_step_stalls(system: str, depth: int, kwargs: dict[str, Any]) -> None:
    """With 28 blocks the largest bound is more than the pool, so that single requests run alone."""
    expected = play(Rig(None, depth=depth, max_num_seqs=5, **kwargs), workload())
    rig = Rig(system, depth=depth, max_num_seqs=5, **kwargs)
    assert play(rig, workload()) == expected
    assert (rig.state["stalls"], rig.state["fallbacks"]) == (0, 0)


@DEPTHS
def test_vllm_2023_never_mixes_on_a_random_workload(depth: int) -> None:
    rig = Rig("vllm-2023", depth=depth, num_blocks=40, max_num_seqs=6)
    play(rig, workload(60, gap=1.0))
    kinds = set()
    for decision in rig.loop.decisions:
        prompts = {*decision.new, *decision.resumed} | {req_id for req_id, tokens in decision.scheduled if tokens > 1}
        scheduled = {req_id for req_id, _ in decision.scheduled}
        if scheduled:
            # The last chunk of a long prompt may be of one token; no prompt here is that long.
            assert not prompts or prompts == scheduled
            kinds.add(bool(prompts))
    assert kinds == {True, False}


def test_the_view_counts_blocks_and_prompts_as_the_pool_does() -> None:
    seen: list[tuple[int, int, int, int, int]] = []

    def look(step: Step) -> Split:
        bounds = step.batch().bound
        seen.append(
            (step.pool.total, step.pool.free, step.pool.blocks_of(bounds), step.num_prefilling, step.num_decoding)
        )
        return Split()

    SCRIPT.split = look
    rig = Rig("scripted", num_blocks=31, max_model_len=128)
    add_all(rig, a=(10, 6, 6), b=(100, 400, 9))
    rig.step(3)
    assert seen == [
        (30, 30, 0, 0, 0),
        (30, 30 - 1 - 4, 1 + 8, 1, 1),  # b has 54 of 100 tokens; its bound is cut at 128
        (30, 30 - 1 - 7, 1 + 8, 0, 2),
    ]


def test_admission_gets_what_the_budget_leaves() -> None:
    rig = Rig("scripted")
    rig.add("a")
    rig.step()
    SCRIPT.split = lambda step: Split(tokens=12)
    for name in ("b", "c", "d"):
        rig.add(name, 10)
    assert steps(rig, 1) == [{"a": 1, "b": 10, "c": 1}], "d would get no token: it is not named"
    assert rig.state["why_waiting"] == {"d": "tokens"}


def test_a_paused_session_keeps_its_seat() -> None:
    """vLLM counts sessions that wait for their client's next input towards the seats."""
    rig = Rig("scripted", max_num_seqs=2)
    add_all(rig, a=(10, 6, 6), b=(10, 6, 6))
    rig.scheduler.num_waiting_for_streaming_input = 1
    assert steps(rig, 1) == [{"a": 10}]


def test_accelgen_can_cut_a_prompt_that_starts_to_the_kv_that_is_left() -> None:
    """16 blocks, 10 of them held: 6 are left for a prompt of 160 tokens, of which vLLM starts none."""
    cut = {"budget": {"within_kv": True}}
    for system, options, expected in (
        ("accelgen-published", cut, {"a": 160, "b": 96}), ("accelgen", cut, {"a": 160, "b": 96}),
        ("accelgen-published", {}, {"a": 160}), ("accelgen", {}, {"a": 160}), (None, {}, {"a": 160}),
    ):  # fmt: skip
        rig = Rig(system, num_blocks=17, max_num_batched_tokens=512, options=options)
        add_all(rig, a=(160, 9, 9), b=(160, 9, 9))
        assert steps(rig, 1) == [expected], (system, options)
