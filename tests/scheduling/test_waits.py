"""When a wait begins and ends: with the step that computes something of a request, and with nothing else."""

from __future__ import annotations

import types

import pytest
from vllm.v1.request import RequestStatus

from tests.support.steering import Rig


def preempt(rig: Rig, req_id: str) -> None:
    rig.scheduler._now = rig.clock()
    rig.scheduler.preempt_now(rig.scheduler.requests[req_id], "policy", drop_output=False)


def test_whoever_vllm_passes_over_goes_on_waiting() -> None:
    """vLLM takes a request whose grammar is not ready from the queue in each step, and puts it back."""
    rig = Rig("alise", max_num_seqs=4)
    rig.add("runs", 20, length=30)
    rig.step()
    rig.add("blocked", 20, length=5)
    request = rig.scheduler.requests["blocked"]
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = types.SimpleNamespace(grammar=None, is_grammar_ready=False)
    arrived = rig.clock()
    rig.step(5, seconds=0.1)
    job = rig.scheduler.tracked["blocked"]
    assert (job.waiting_since, job.waited_s) == (arrived, 0.0)
    request.structured_output_request = None
    request.status = RequestStatus.WAITING
    rig.step()
    assert "blocked" in rig.running
    assert job.waiting_since is None
    assert job.waited_s == pytest.approx(0.5)


def test_an_abort_is_no_resumption() -> None:
    """AccelGen prices preemptions by the longest wait; an aborted request used to set it to 100 s."""
    rig = Rig("alise", max_num_seqs=2, num_blocks=64)
    for name in "ab":
        rig.add(name, 20, length=100, max_tokens=200)
    rig.step(10, seconds=0.01)
    preempt(rig, "b")
    rig.clock.advance(100.0)
    rig.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    rig.drain(seconds=0.01)
    assert rig.scheduler.tracked.step_stats.latest.preemption_s == 0.0


def test_a_resumption_is_counted_once_with_its_wait() -> None:
    rig = Rig("alise", max_num_seqs=2, num_blocks=64)
    for name in "ab":
        rig.add(name, 20, length=100, max_tokens=200)
    rig.step(10, seconds=0.01)
    job = rig.scheduler.tracked["b"]
    preempt(rig, "b")
    rig.clock.advance(3.0)
    waited: list[float] = []
    rig.scheduler.tracked.step_stats.resumed = waited.append
    rig.step(5, seconds=0.01)
    assert "b" in rig.running
    assert waited == [pytest.approx(3.0)]
    assert job.waited_s == pytest.approx(3.0)


def test_an_estimate_that_was_outlived_is_raised_for_those_who_wait_as_well() -> None:
    """One preempted just when it had all the tokens predicted stayed "1 token left", at the head of the queue."""
    rig = Rig("alise", max_num_seqs=2)
    rig.add("a", 20, length=100, osl=10, max_tokens=200)
    while rig.scheduler.requests["a"].num_output_tokens < 10:
        rig.step(seconds=0.01)
    job = rig.scheduler.tracked["a"]
    assert job.estimate == 10
    preempt(rig, "a")
    assert job.estimate > 10
    assert job.demotions == rig.state["demotions"] == 1
