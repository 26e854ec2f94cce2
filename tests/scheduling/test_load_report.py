"""What a scheduler tells routers of its load. Time passes on a virtual clock; numbers by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tests.support.steering import Rig, save_profile
from vllm_ext.scheduling.load_report.report import LoadReport, session_key
from vllm_ext.scheduling.load_report.reporter import LoadReporter
from vllm_ext.scheduling.load_report.residency import Residency

BLOCK = 16


def report(rig: Rig) -> LoadReport:
    return LoadReport.parse(json.loads(json.dumps(rig.scheduler.load_reporter.report().as_dict())))


def test_who_runs_and_waits_is_counted_with_the_prompts_that_are_left(tmp_path: Path) -> None:
    """One seat and 16 tokens a step: of a's prompt 34 tokens are left after the first one, b waits with 30."""
    profile = save_profile(tmp_path / "p.json", step_s=0.01, prefill_token_s=1e-3)
    rig = Rig("fcfs", max_num_seqs=1, max_num_batched_tokens=16, options={"profile": profile})
    empty = report(rig)
    assert (empty.running, empty.waiting, empty.prefill_tokens, empty.context_tokens) == (0, 0, 0, 0)
    rig.add("a", 50, length=2)
    rig.add("b", 30, length=2)
    rig.loop.step()
    found = report(rig)
    assert (found.running, found.waiting, found.seats) == (1, 1, 1)
    assert found.prefill_tokens == 34 + 30
    assert found.context_tokens == BLOCK + 30
    assert found.pool_tokens == rig.scheduler.kv_cache_manager.block_pool.num_gpu_blocks * BLOCK
    assert found.number == empty.number + 1
    assert found.started == empty.started
    prices = found.prices
    assert found.queue_s == pytest.approx(64 * prices.prefill_token_s)
    assert found.step_s == pytest.approx(prices.base_s + prices.decode_s + prices.context_token_s * 46)


def test_what_is_in_the_prefix_cache_need_not_be_computed() -> None:
    rig = Rig("fcfs", max_num_seqs=1)
    rig.add("a", 64, length=1)
    rig.drain()
    rig.add("hold", 5, length=40)
    rig.loop.step()
    rig.add("again", 64, length=1)
    same = rig.scheduler.requests["again"]
    known = rig.scheduler.kv_cache_manager.get_computed_blocks(same)[1]
    assert report(rig).prefill_tokens == 64 - known


def test_more_who_wait_than_are_looked_up_are_taken_to_be_like_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two that are looked up three quarters are cached, or so it is said."""
    monkeypatch.setattr("vllm_ext.scheduling.load_report.reporter._MOST_PROBED", 2)
    rig = Rig("fcfs", max_num_seqs=1)
    monkeypatch.setattr(rig.scheduler.load_reporter._probe, "cached", lambda _: (3, 0, 0))
    for number in range(4):
        rig.add(f"r{number}", 64)
    assert report(rig).prefill_tokens == 4 * 16


def test_who_has_ended_or_loads_its_kv_holds_blocks_and_is_no_queue() -> None:
    """A connector may hold blocks of those who ended; an asynchronous load has blocks for what it brings."""
    rig = Rig("fcfs", max_num_seqs=1)
    rig.add("ended", 30)
    rig.add("loads", 40)
    requests = rig.scheduler.requests
    requests["ended"].status = RequestStatus.FINISHED_STOPPED
    requests["loads"].status = RequestStatus.WAITING_FOR_REMOTE_KVS
    requests["loads"].num_computed_tokens = 32
    found = report(rig)
    assert (found.prefill_tokens, found.context_tokens) == (8, 0)


def test_with_several_groups_of_layers_a_token_takes_a_block_of_each() -> None:
    rig = Rig("fcfs")
    rig.add("a", 60, length=5)
    rig.loop.step()
    one = report(rig)
    rig.scheduler.kv_cache_config.kv_cache_groups = 2 * rig.scheduler.kv_cache_config.kv_cache_groups
    two = report(rig)
    assert (two.pool_tokens, two.context_tokens) == (one.pool_tokens // 2, one.context_tokens // 2)


def test_a_conversation_is_told_of_by_a_hash_and_only_from_the_first_report_on() -> None:
    rig = Rig("fcfs")
    rig.add("early", 40, length=1, conversation_id="early")
    rig.drain()
    assert report(rig).resident == {}
    rig.add("a", 40, length=9, conversation_id="talk")
    rig.add("b", 20, length=1)
    rig.drain()
    (name,) = found = report(rig).resident
    assert name == session_key("talk")
    assert "talk" not in name
    assert found[name].device == 48
    rig.scheduler.reset_prefix_cache()
    assert report(rig).resident == {}


def test_gauges_follow_no_conversations() -> None:
    rig = Rig("fcfs")
    rig.scheduler.vllm_ext_state()
    rig.add("a", 40, length=1, conversation_id="talk")
    rig.drain()
    assert report(rig).resident == {}


def test_steps_grow_old_only_while_somebody_is_there() -> None:
    rig = Rig("fcfs")
    rig.clock.advance(50.0)
    assert report(rig).step_age_s == 0
    rig.add("a", 20, length=3)
    rig.clock.advance(7.0)
    assert report(rig).step_age_s == 7.0
    rig.loop.step()
    assert report(rig).step_age_s == 0
    rig.clock.advance(3.0)
    assert report(rig).step_age_s == 3.0
    rig.drain()
    rig.clock.advance(30.0)
    assert report(rig).step_age_s == 0


def test_an_engine_that_was_told_to_pause_has_not_hung() -> None:
    rig = Rig("fcfs")
    rig.add("a", 20, length=3)
    rig.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    rig.clock.advance(100.0)
    assert report(rig).step_age_s == 0
    rig.scheduler.set_pause_state(PauseState.UNPAUSED)
    rig.clock.advance(3.0)
    assert report(rig).step_age_s == 3.0


def test_the_mean_output_follows_those_that_ended() -> None:
    rig = Rig("fcfs")
    before = report(rig).output_tokens
    rig.add("a", 20, length=6)
    rig.drain()
    assert report(rig).output_tokens == pytest.approx(before + 0.05 * (6 - before))


def test_the_state_has_what_the_gauges_show() -> None:
    rig = Rig("alise")
    rig.add("a", 20, length=6)
    state: dict[str, Any] = rig.scheduler.vllm_ext_state()["load_report"]
    assert state == json.loads(json.dumps(state))
    assert state["prefill_tokens"] == 20
    assert state.keys() == {"prefill_tokens", "context_tokens", "queue_s", "step_s", "step_age_s"}


def test_an_answer_makes_so_many_look_ups_and_goes_on_where_the_last_one_stopped() -> None:
    """Three conversations are gone from the cache; each answer looks one of them up."""
    rig = Rig("fcfs")
    reporter: LoadReporter = rig.scheduler.load_reporter
    reporter.report()
    residency = reporter._residency
    assert isinstance(residency, Residency)
    for number in range(3):
        rig.add(f"r{number}", 40, length=1, conversation_id=f"talk {number}")
    rig.drain()
    rig.scheduler.reset_prefix_cache()
    assert [len(residency.held(lookups=1)) for _ in range(4)] == [2, 1, 0, 0]


def test_of_long_conversations_fewer_are_followed() -> None:
    """Each has three hashes of blocks; a next turn takes the place of the one before."""
    rig = Rig("fcfs")
    reporter: LoadReporter = rig.scheduler.load_reporter
    reporter._residency = Residency(rig.scheduler, most_hashes=7)
    for name in ("first", "second", "second", "third", "second"):
        rig.add(f"r{len(rig.loop.outcomes)}", 50, length=1, conversation_id=name)
        rig.drain()
    assert report(rig).resident.keys() == {session_key("second"), session_key("third")}
    assert reporter._residency._hashes == 6


def test_nothing_is_kept_of_conversations_that_were_given_up_even_if_nobody_asks() -> None:
    rig = Rig("fcfs")
    reporter: LoadReporter = rig.scheduler.load_reporter
    residency = reporter._residency = Residency(rig.scheduler, most=2)
    for number in range(6):
        rig.add(f"r{number}", 40, length=1, conversation_id=f"talk {number % 3}")
        rig.drain()
    assert len(residency._turns) == 2


def test_only_the_latest_conversations_are_followed() -> None:
    rig = Rig("fcfs")
    reporter: LoadReporter = rig.scheduler.load_reporter
    reporter._residency = Residency(rig.scheduler, most=2)
    for number in range(3):
        rig.add(f"r{number}", 40, length=1, conversation_id=f"talk {number}")
        rig.drain()
    assert report(rig).resident.keys() == {session_key("talk 1"), session_key("talk 2")}
