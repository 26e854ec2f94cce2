"""The rig drives the real scheduler as an engine core would, and notices when a scheduler cheats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.audit import AuditError, audit, audit_drained
from tests.support.engine_loop import EngineLoop
from tests.support.fake_runner import FakeRunner, RunnerError
from vllm_ext.simulation.engine.events import VirtualClock
from vllm_ext.simulation.engine.harness import block_hasher, make_request, make_scheduler
from vllm_ext.simulation.engine.token_runner import EOS_TOKEN_ID
from vllm_ext.simulation.measure.run_data import Stalled

_DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])


def make_loop(
    depth: int = 1, *, caching: bool = False, lengths: dict[str, int] | None = None, v2: bool = False, **options: int
) -> EngineLoop:
    scheduler = make_scheduler(
        async_scheduling=depth == 2, v2_model_runner=v2, enable_prefix_caching=caching, **options
    )
    runner = FakeRunner(output_lengths=lengths, pipelined=depth == 2, v2=v2)
    return EngineLoop(scheduler, runner, depth=depth)


def under_pressure(depth: int, *, v2: bool = False, caching: bool = True) -> EngineLoop:
    """Eight requests that together need more blocks than there are."""
    lengths = {f"r{i}": 5 + 6 * i for i in range(8)}
    loop = make_loop(depth, lengths=lengths, v2=v2, num_blocks=14, max_model_len=160, caching=caching)
    for i in range(8):
        hasher = block_hasher() if caching else None
        loop.add(make_request(f"r{i}", 20 + 9 * i, max_tokens=40, arrival_time=float(i), hasher=hasher))
    loop.run_until_idle(max_steps=1000, before_step=lambda: audit(loop.scheduler))
    return loop


@pytest.mark.parametrize(
    ("scheduler_cls", "expected"),
    [(None, AsyncScheduler), (Scheduler, Scheduler), ("vllm.v1.core.sched.scheduler.Scheduler", Scheduler)],
    ids=["default", "class", "name"],
)
def test_scheduler_can_be_given_as_class_or_by_name(scheduler_cls: type | str | None, expected: type) -> None:
    assert type(make_scheduler(scheduler_cls)) is expected


def test_upstream_scheduler_serves_synchronously() -> None:
    loop = EngineLoop(make_scheduler(Scheduler, enable_prefix_caching=False), FakeRunner())
    loop.add(make_request("a", 10, max_tokens=3))
    assert loop.run_until_idle() == 4, "three tokens, and an empty step that tells the runner of the end"
    assert loop.outcomes["a"].finish_reason == "length"


def test_options_reach_vllms_configuration() -> None:
    scheduler = make_scheduler(
        num_blocks=30, max_num_seqs=3, max_num_batched_tokens=77, additional_config={"x": {"y": 1}}, watermark=0.1
    )
    assert scheduler.kv_cache_manager.block_pool.num_gpu_blocks == 30
    assert scheduler.max_num_running_reqs == 3
    assert scheduler.max_num_scheduled_tokens == 77
    assert scheduler.vllm_config.additional_config == {"x": {"y": 1}}
    assert scheduler.kv_cache_manager.watermark_blocks == 3


@_DEPTHS
def test_hidden_length_ends_a_request_like_eos_does(depth: int) -> None:
    loop = make_loop(depth, lengths={"a": 4})
    loop.add(make_request("a", 10, max_tokens=20))
    loop.run_until_idle()
    assert loop.outcomes["a"].token_ids == [loop.runner.token_at("a", i) for i in range(4)]
    assert loop.outcomes["a"].token_ids[-1] == EOS_TOKEN_ID
    assert loop.outcomes["a"].finish_reason == "stop"


@_DEPTHS
def test_partial_prefill_yields_no_token(depth: int) -> None:
    loop = make_loop(depth, max_num_batched_tokens=32)
    loop.add(make_request("a", 70, max_tokens=2))
    loop.run_until_idle()
    assert [d.scheduled for d in loop.decisions][:3] == [(("a", 32),), (("a", 32),), (("a", 6),)]
    assert len(loop.outcomes["a"].token_ids) == 2


def test_depth_two_schedules_a_step_before_the_output_of_the_one_before() -> None:
    loop = make_loop(2)
    loop.add(make_request("a", 10, max_tokens=4))
    loop.step()
    assert loop.num_in_flight == 1
    assert loop.outcomes["a"].token_ids == []
    loop.step()
    assert len(loop.decisions) == 2
    assert len(loop.outcomes["a"].token_ids) == 1


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@_DEPTHS
def test_outputs_survive_preemption_unchanged(depth: int, v2: bool, caching: bool) -> None:
    loop = under_pressure(depth, v2=v2, caching=caching)
    assert any(decision.preempted for decision in loop.decisions), "the pool was large enough after all"
    for i in range(8):
        outcome = loop.outcomes[f"r{i}"]
        assert outcome.token_ids == [loop.runner.token_at(f"r{i}", k) for k in range(min(40, 5 + 6 * i))]
        assert outcome.num_finishes == 1
    audit_drained(loop.scheduler)
    loop.step()
    assert loop.runner.num_cached_requests == 0


@_DEPTHS
def test_same_input_gives_the_same_decision_log(depth: int) -> None:
    assert under_pressure(depth).decision_log() == under_pressure(depth).decision_log()


def test_shared_prefix_is_found_in_the_cache() -> None:
    loop = make_loop(caching=True)
    for name in ("a", "b"):
        loop.add(make_request(name, 50, max_tokens=1, hasher=block_hasher()))
        loop.run_until_idle()
    assert [d.num_computed_tokens for d in loop.decisions if d.new == ("b",)] == [(48,)]


@pytest.mark.parametrize("while_executing", [False, True], ids=["between steps", "while executing"])
@_DEPTHS
def test_aborted_request_ends_once_and_gives_its_blocks_back(depth: int, while_executing: bool) -> None:
    loop = make_loop(depth)
    for name in ("a", "b"):
        loop.add(make_request(name, 10, max_tokens=8))
    loop.step()
    loop.abort(["a", "unknown"], while_executing=while_executing)
    loop.run_until_idle()
    assert (loop.outcomes["a"].finish_reason, loop.outcomes["a"].num_finishes) == ("abort", 1)
    assert loop.outcomes["b"].finish_reason == "length"
    audit_drained(loop.scheduler)


@_DEPTHS
def test_cache_reset_while_running_changes_no_output(depth: int) -> None:
    loop = make_loop(depth, caching=True)
    loop.add(make_request("a", 30, max_tokens=10, hasher=block_hasher()))
    for _ in range(4):
        loop.step()
    loop.reset_prefix_cache()
    loop.run_until_idle()
    assert loop.outcomes["a"].token_ids == [loop.runner.token_at("a", i) for i in range(10)]


def test_unfinished_work_after_the_last_step_is_reported() -> None:
    loop = make_loop()
    loop.add(make_request("a", 10, max_tokens=50))
    with pytest.raises(Stalled, match="'a'"):
        loop.run_until_idle(max_steps=3)


@pytest.mark.parametrize(
    ("caching", "message"), [(False, "request_id='a'"), (True, "hasher")], ids=["id used twice", "without hashes"]
)
def test_request_that_an_engine_would_not_get_is_refused(caching: bool, message: str) -> None:
    loop = make_loop(caching=caching)
    if not caching:
        loop.add(make_request("a", 10))
    with pytest.raises(ValueError, match=message):
        loop.add(make_request("a", 10))


def test_depth_other_than_one_or_two_is_refused() -> None:
    with pytest.raises(ValueError, match="depth=3"):
        EngineLoop(make_scheduler(), FakeRunner(), depth=3)


def test_clock_never_goes_back() -> None:
    clock = VirtualClock(5.0)
    clock.advance(1.5)
    assert clock() == 6.5
    with pytest.raises(ValueError, match="clock never goes back"):
        clock.advance(-1)


# --- the rig notices cheating ---------------------------------------------------------------------------------------


def running_loop(steps: int = 3) -> EngineLoop:
    loop = make_loop()
    for name, first_token in (("a", 100), ("b", 500)):
        loop.add(make_request(name, range(first_token, first_token + 20), max_tokens=20))
    for _ in range(steps):
        loop.step()
    return loop


def _forge_computed_kv(loop: EngineLoop) -> None:
    loop.add(make_request("c", 40, max_tokens=5))
    output = loop.scheduler.schedule()
    output.scheduled_new_reqs[0] = dataclasses.replace(output.scheduled_new_reqs[0], num_computed_tokens=16)
    output.num_scheduled_tokens["c"] = 24
    loop.runner.execute(output)


def _overwrite_block(loop: EngineLoop) -> None:
    a, b = (loop.runner._rows[name] for name in ("a", "b"))
    a.block_ids[0] = b.block_ids[0]
    loop.step()


def _update_weights(loop: EngineLoop) -> None:
    loop.runner.invalidate_kv()
    loop.step()


@pytest.mark.parametrize("cheat", [_forge_computed_kv, _overwrite_block, _update_weights])
def test_kv_that_is_not_that_of_the_prefix_is_noticed(cheat: Callable[[EngineLoop], None]) -> None:
    with pytest.raises(RunnerError, match="not that of its own prefix"):
        cheat(running_loop())


def test_preemption_that_hides_from_the_runner_is_noticed() -> None:
    """A scheduler that preempts and resumes in one step must drop the id from prev_step_scheduled_req_ids."""
    loop = make_loop(2)
    loop.add(make_request("a", 20, max_tokens=20))
    for _ in range(3):
        loop.step()
    request = loop.scheduler.running.pop()
    loop.scheduler._preempt_request(request, 0.0, drop_stale_output=True)
    with pytest.raises(RunnerError, match="prev_step_scheduled_req_ids"):
        loop.step()


def _share_block(scheduler: Scheduler) -> None:
    blocks = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    blocks["a"].append(blocks["b"][-1])


@pytest.mark.parametrize(
    ("cheat", "message"),
    [
        (lambda scheduler: scheduler.running.pop(), "in no queue"),
        (lambda scheduler: scheduler.waiting.add_request(scheduler.running[0]), "more than one place"),
        (lambda s: s.kv_cache_manager.block_pool.free_block_queue.popleft(), "in free queue: False"),
        (_share_block, "no shared cached prefix"),
    ],
    ids=["lost request", "doubled request", "lost block", "shared block"],
)
def test_books_that_do_not_add_up_are_noticed(cheat: Callable[[Scheduler], Any], message: str) -> None:
    loop = running_loop()
    cheat(loop.scheduler)
    with pytest.raises(AuditError, match=message):
        audit(loop.scheduler)
