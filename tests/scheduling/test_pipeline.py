"""Pipeline parallelism under vLLM's V1 model runner: two batches in flight, and no token is asked for before the last.

vLLM's scheduler for that is not `AsyncScheduler`: a request that is in a batch in flight has nothing to be scheduled.
"""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.steering import Rig
from vllm_ext.simulation.engine.harness import make_request, make_scheduler


def in_two_batches(system: str) -> Rig:
    """An engine core with a queue of two batches and without async scheduling."""
    rig = Rig(system, max_num_seqs=8, num_blocks=400, max_model_len=512, max_num_batched_tokens=64)
    rig.loop.depth = 2
    return rig


def test_vllms_scheduler_has_nothing_to_schedule_of_a_request_in_flight() -> None:
    scheduler = make_scheduler(Scheduler, max_num_seqs=8, num_blocks=400, max_num_batched_tokens=64)
    scheduler.add_request(make_request("a", list(range(100, 110)), max_tokens=6))
    assert [dict(scheduler.schedule().num_scheduled_tokens) for _ in range(2)] == [{"a": 10}, {}]


@pytest.mark.parametrize("system", ["fcfs", "alise"])
def test_a_request_in_flight_is_not_scheduled_again(system: str) -> None:
    rig = in_two_batches(system)
    rig.add("a", 10, length=6)
    rig.step(4)
    assert [dict(decision.scheduled) for decision in rig.loop.decisions[:4]] == [{"a": 10}, {}, {"a": 1}, {}]
