"""KV in 8 bits on a simulated device: the scheduler that serves, and what moves and reads take."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.support.simulation_parts import rows
from tests.support.tier_parts import Server, conversation, offload, serve
from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.int8.step import step_of

SHARE: dict[str, Any] = {"kv_tier": {"device_int8_share": 0.4}}


def served(options: dict[str, Any], **more: Any) -> Server:
    return serve(conversation(), system="fcfs", options=options, num_blocks=24, **more)


def cached(server: Server) -> dict[str, float]:
    return {name: row["cached_prompt_tokens"] for name, row in rows(server.collector.table).items()}


def state(server: Server) -> dict[str, Any]:
    scheduler: Any = server.scheduler
    found: dict[str, Any] = scheduler.records.state()
    return found


def test_a_turn_finds_more_on_a_device_of_the_same_size() -> None:
    """Others need 24 blocks in between, and take those of the first turn from the last one on.

    24 blocks, one of which vLLM keeps, become 14 and as many records: 16 tokens of a block take 1.6 times less.
    """
    assert cached(served({}))["turn-2"] == 16
    with_records = served(SHARE)
    assert cached(with_records)["turn-2"] == 80
    assert state(with_records)["moves"]["demoted"] > 0
    assert state(with_records)["records"]["held"] == 0


def test_a_run_is_the_same_each_time_and_told_of_every_request() -> None:
    first, second = served(SHARE), served(SHARE, exact=False)
    assert first.engine.decisions == second.engine.decisions
    assert state(first) == state(second)


def test_moves_and_reads_take_their_time() -> None:
    slow = serve(conversation(), system="fcfs", options=SHARE, num_blocks=24, run=False)
    scheduler: Any = slow.scheduler
    scheduler.holding.price(1e7)  # bytes per second
    busy: list[float] = []
    launch = slow.engine._cost.device_s
    schedule = scheduler.schedule

    def noted(*args: Any) -> SchedulerOutput:
        output: SchedulerOutput = schedule(*args)
        step = step_of(output)
        busy.append(0.0 if step is None else scheduler.place.prices.step_s(step))
        return output

    scheduler.schedule = noted
    slow.engine.run()
    fast = served(SHARE)
    assert sum(busy) > 0
    assert launch is not None
    difference = slow.collector.device_busy_s - fast.collector.device_busy_s
    assert difference == pytest.approx(sum(busy), rel=1e-3)


def test_vllms_own_connector_knows_no_records() -> None:
    with pytest.raises(ConfigError, match=r"device_int8_share=0\.4: must be 0 beside kv_offload"):
        served(SHARE, kv_offload=offload())
