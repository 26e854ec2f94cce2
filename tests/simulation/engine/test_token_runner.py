"""The lean runner fabricates tokens and measures each step's shape.

That decisions are those with `FakeRunner`, which checks the KV, is shown in `test_simulation_edges`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ext.simulation.cost.step_shape import EMPTY_SHAPE, StepShape
from vllm_ext.simulation.engine.harness import make_request, make_scheduler
from vllm_ext.simulation.engine.token_runner import EOS_TOKEN_ID, FILLER_TOKEN_ID, TokenRunner, output_ids


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
