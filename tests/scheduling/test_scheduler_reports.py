"""What the scheduler tells the outside: records, state, refusals. Time passes on a virtual clock."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.steering import STEERED, Rig
from vllm_ext.config import ConfigError
from vllm_ext.simulation.engine.harness import make_config, make_kv_cache_config

SYSTEMS = pytest.mark.parametrize("system", ["fcfs", "alise"])


@SYSTEMS
def test_a_record_has_the_times_of_the_scheduler_s_clock(system: str) -> None:
    """One seat. a: 2 steps of prefill, 3 tokens. A step takes 1 s on the clock after it was processed."""
    rig = Rig(system, max_num_seqs=1, max_num_batched_tokens=16, scheduling_policy="priority")
    rig.add("a", 20, length=3, max_tokens=50, priority=-3, conversation_id="talk")
    rig.add("b", 5, length=1, max_tokens=7)
    rig.drain(seconds=1.0)
    a, b = rig.record("a"), rig.record("b")
    assert (a["queue_s"], a["ttft_s"], a["e2e_s"]) == (0.0, 1.0, 3.0)
    assert (b["queue_s"], b["ttft_s"], b["e2e_s"]) == (4.0, 4.0, 4.0)
    expected = {
        "seq": 0,
        "arrival_unix_s": 100.0,
        "prompt_tokens": 20,
        "output_tokens": 3,
        "max_tokens": 50,
        "predicted_tokens": 50,
        "prediction_source": "prior",
        "num_preemptions": 0,
        "finish_reason": "stop",
        "priority": -3,
        "conversation_id": "talk",
    }
    assert {key: a[key] for key in expected} == expected
    assert (b["seq"], b["finish_reason"], b["max_tokens"]) == (1, "stop", 7)


def test_in_async_scheduling_the_first_token_counts_when_its_output_arrives() -> None:
    rig = Rig(depth=2)
    rig.add("a", 5, length=2)
    rig.drain(seconds=1.0)
    assert (rig.record("a")["queue_s"], rig.record("a")["ttft_s"]) == (0.0, 1.0)


@SYSTEMS
def test_an_abort_is_timed_when_it_comes_not_at_the_last_step(system: str) -> None:
    """While paused no step is taken, and a client may give up minutes later."""
    rig = Rig(system)
    rig.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    rig.add("a")
    rig.clock.advance(60.0)
    rig.loop.abort(["a"])
    assert rig.record("a")["e2e_s"] == 60.0


def test_queue_time_ends_with_the_first_admission() -> None:
    rig = Rig(max_num_seqs=1, num_blocks=64, options={"admission": {"gain_ratio": 0.01, "min_progress_tokens": 1}})
    rig.add("long", length=60, osl=60)
    rig.step(3, seconds=0.01)
    rig.add("short", length=1, osl=1)
    rig.drain(seconds=0.01)
    record = rig.record("long")
    assert record["num_preemptions"] == 1
    assert record["queue_s"] == 0.0
    assert record["output_tokens"] == 60


@SYSTEMS
def test_state_is_json_and_complete(system: str) -> None:
    rig = Rig(system, max_num_seqs=1)
    rig.add("a", length=5)
    rig.add("b", length=5)
    rig.step(2, seconds=1.0)
    state = rig.state
    assert json.loads(json.dumps(state)) == state
    assert state.keys() == {
        "preemptions", "fallbacks", "stalls", "demotions", "bad_hints", "policy_steps", "policy_s", "steps", "runtime",
        "records", "next_record", "lost_records", "system", "policies", "running", "waiting_by_level", "oldest_wait_s",
        "late_predictions", "wait_forecast", "dispositions", "waits_compared", "wait_expected_s", "wait_actual_s",
        "wait_error_s", "refusals", "waiting_for", "why_waiting", "sharing", "load", "load_report", "switch",
        "longest_wait_by_level",
    }  # fmt: skip
    assert (state["system"], state["running"], state["steps"]) == (system, 1, 2)
    assert sum(state["waiting_by_level"].values()) == 1
    assert state["oldest_wait_s"] == 2.0
    assert state["policy_steps"] == (2 if system == "alise" else 0)
    refused = {"seats": 1} if system == "alise" else {}
    assert (state["waiting_for"], state["refusals"].keys()) == (refused, refused.keys())
    assert state["why_waiting"] == ({"b": "seats"} if system == "alise" else {})
    assert state["policies"].startswith(f"{system}: ordering=")
    assert len(state["runtime"]["coefficients"]) == 5


@SYSTEMS
def test_the_oldest_wait_is_the_current_one(system: str) -> None:
    """A request that ran and was thrown out waits since then, not since it came."""
    rig = Rig(system, max_num_seqs=1)
    rig.add("a", length=20)
    rig.step(3, seconds=1.0)
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.runner.invalidate_kv()
    rig.clock.advance(2.0)
    assert rig.state["oldest_wait_s"] <= 3.0
    rig.drain()


def test_records_are_fetched_from_a_number_on_and_losses_are_told() -> None:
    rig = Rig("fcfs", options={"record_capacity": 3})
    for i in range(5):
        rig.add(f"r{i}", length=1)
    rig.drain()
    state = rig.scheduler.vllm_ext_state(0)
    assert ([r["seq"] for r in state["records"]], state["next_record"], state["lost_records"]) == ([2, 3, 4], 5, 2)
    state = rig.scheduler.vllm_ext_state(4)
    assert ([r["seq"] for r in state["records"]], state["lost_records"]) == ([4], 0)
    assert rig.scheduler.vllm_ext_state(5)["records"] == []


def _build(system: str, kv: KVCacheConfig, **options: Any) -> Any:
    config = make_config(STEERED, additional_config={"vllm_ext": {"system": system, **options}})
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        hash_block_size=16,
    )


def _sliding_window_kv() -> KVCacheConfig:
    kv = make_kv_cache_config(64, 16)
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=64)
    kv.kv_cache_groups.append(KVCacheGroupSpec(["layer.1"], window))
    return kv


def test_hybrid_kv_is_refused_with_preemption_and_the_remedy_is_named() -> None:
    with pytest.raises(ValueError, match="--no-ext-preemption"):
        _build("alise-published", _sliding_window_kv())


@pytest.mark.parametrize(
    "options",
    [{"system": "fcfs"}, {"system": "alise"}, {"system": "alise-published", "admission": {"preempt": False}}],
    ids=str,
)
def test_hybrid_kv_is_served_without_preemption(options: dict[str, Any]) -> None:
    assert _build(kv=_sliding_window_kv(), **options) is not None


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"system": "nonsense"}, "system"),
        ({"system": "oracle-alise"}, "system"),
        ({"unknown": 1}, "unknown"),
        ({"system": "alise", "ordering": {"gamma": 0}}, "ordering.gamma"),
    ],
    ids=str,
)
def test_a_bad_option_stops_the_start_and_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Rig(options.pop("system", "alise"), options=options)
    assert caught.value.field == field
