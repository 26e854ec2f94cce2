"""The lean runner returns what FakeRunner, which checks the KV, would return, and measures each step's shape."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.engine_loop import EngineLoop
from tests.support.fake_runner import FakeRunner
from vllm_ext.simulation.harness import make_request, make_scheduler
from vllm_ext.simulation.step_shape import EMPTY_SHAPE, StepShape
from vllm_ext.simulation.token_runner import EOS_TOKEN_ID, FILLER_TOKEN_ID, TokenRunner, output_ids


def step(scheduler: Scheduler, runner: TokenRunner) -> tuple[dict[str, list[int]], StepShape]:
    """One synchronous step; return the tokens by request and the shape."""
    output = scheduler.schedule()
    result, shape = runner.execute(output.num_scheduled_tokens, scheduler.requests)
    tokens = dict(zip(result.req_ids, (list(ids) for ids in result.sampled_token_ids), strict=True))
    scheduler.update_from_output(output, result)
    return tokens, shape


def served(*prompts: int, **options: Any) -> Scheduler:
    scheduler = make_scheduler(enable_prefix_caching=False, **options)
    for number, prompt in enumerate(prompts):
        scheduler.add_request(make_request(f"r{number}", prompt, max_tokens=10))
    return scheduler


def test_last_token_ends_the_request_and_output_ids_are_what_was_sampled() -> None:
    scheduler, runner = served(10), TokenRunner({"r0": 3})
    found = [token for _ in range(3) for token in step(scheduler, runner)[0]["r0"]]
    assert found == output_ids(3, ended=True) == [FILLER_TOKEN_ID, FILLER_TOKEN_ID, EOS_TOKEN_ID]
    assert not scheduler.requests
    assert output_ids(2, ended=False) == found[:2]
    assert output_ids(0, ended=False) == []


def test_step_without_tokens_has_the_empty_shape() -> None:
    assert step(served(), TokenRunner({})) == ({}, EMPTY_SHAPE)


def test_chunks_count_what_was_held_before_and_only_the_last_yields_a_token() -> None:
    """A prompt of 6 in chunks of 4: its tokens see 1 + 2 + 3 + 4, then 5 + 6 keys."""
    scheduler, runner = served(6, max_num_batched_tokens=4, max_num_seqs=1), TokenRunner({"r0": 2})
    tokens, shapes = zip(*(step(scheduler, runner) for _ in range(3)), strict=True)
    assert [each["r0"] for each in tokens] == [[], [FILLER_TOKEN_ID], [EOS_TOKEN_ID]]
    assert shapes == (StepShape(1, 4, 0, 0, 0, 4, 10.0), StepShape(1, 2, 0, 1, 0, 6, 11.0), StepShape.of_decodes(1, 7))
    assert shapes[0] == StepShape.of_chunk(4, sampled=False)
    assert shapes[1] == StepShape.of_chunk(2, 4)


def test_shape_of_a_mixed_step() -> None:
    scheduler, runner = served(5), TokenRunner({"r0": 9, "late": 9})
    step(scheduler, runner)
    scheduler.add_request(make_request("late", 8, max_tokens=10))
    _, shape = step(scheduler, runner)
    assert shape == StepShape(2, 9, 1, 2, 6, 8, 36.0) == StepShape.of_decodes(1, 6).plus(StepShape.of_chunk(8))
    assert shape.num_prefill_tokens == 8


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_same_lengths_and_ends_as_the_runner_that_checks_kv(depth: int) -> None:
    """Both run the same crowd under memory pressure; a runner is then checked by the number of tokens of each."""

    class Both:
        """Hands the checking runner's outputs on, and compares the positions of all tokens and ends."""

        def __init__(self, scheduler: Scheduler, lengths: dict[str, int]) -> None:
            self.scheduler, self.lean = scheduler, TokenRunner(lengths)
            self.checking = FakeRunner(output_lengths=lengths, pipelined=depth == 2)
            self.compared = 0

        def execute(self, output: Any) -> Any:
            expected = self.checking.execute(output)
            found, _ = self.lean.execute(output.num_scheduled_tokens, self.scheduler.requests)
            assert found.req_ids == expected.req_ids
            assert found.req_id_to_index == expected.req_id_to_index
            for ours, theirs in zip(found.sampled_token_ids, expected.sampled_token_ids, strict=True):
                assert len(ours) == len(theirs)
                assert [token == EOS_TOKEN_ID for token in ours] == [token == EOS_TOKEN_ID for token in theirs]
                self.compared += len(ours)
            return expected

    lengths = {f"r{i}": 5 + 6 * i for i in range(8)}
    scheduler = make_scheduler(
        num_blocks=14, max_model_len=160, async_scheduling=depth == 2, enable_prefix_caching=False
    )
    runner = Both(scheduler, lengths)
    loop = EngineLoop(scheduler, runner, depth=depth)  # type: ignore[arg-type]
    for i in range(8):
        loop.add(make_request(f"r{i}", 20 + 9 * i, max_tokens=40, arrival_time=float(i)))
    loop.run_until_idle(max_steps=2000)
    assert any(decision.preempted for decision in loop.decisions)
    assert runner.compared >= sum(min(40, length) for length in lengths.values())
