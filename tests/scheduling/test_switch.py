"""What an administrator changes while a scheduler runs: from the next step on, all of it or nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.steering import SCRIPT, Rig, play, workload
from vllm_ext.contract import Rank
from vllm_ext.scheduling import switch


def rig(**changes: Any) -> Rig:
    """One seat, and the one who announces least goes first."""
    SCRIPT.rank = lambda view, now: Rank((float(view.num_prompt_tokens),))
    return Rig("scripted", **{"max_num_seqs": 1, "num_blocks": 40, **changes})


def order_of(made: Rig) -> list[str]:
    """Serve a long, a middling and a short prompt that come together; return them as they begin."""
    for name, prompt in (("long", 60), ("middling", 40), ("short", 20)):
        made.add(name, prompt, length=2)
    begun: list[str] = []
    while made.waiting or made.running:
        made.step()
        begun += [name for name in made.running if name not in begun]
    return begun


def test_by_arrival_no_policy_is_asked_and_back_again_all_are_ranked() -> None:
    made = rig()
    assert order_of(made) == ["short", "middling", "long"]
    made = rig()
    made.scheduler.switch.change({"order": "arrival"})
    SCRIPT.rank = lambda view, now: pytest.fail("a policy was asked")
    SCRIPT.select = lambda step, room: pytest.fail("a policy was asked")
    SCRIPT.split = lambda step: pytest.fail("a policy was asked")
    for name, prompt in (("first", 50), ("long", 60), ("short", 20)):
        made.add(name, prompt, length=6)
    made.step()
    made.step()
    assert made.running == ["first"]
    SCRIPT.reset()
    SCRIPT.rank = lambda view, now: Rank((float(view.num_prompt_tokens),))
    made.scheduler.switch.change({"order": "system"})
    while "first" in made.running:
        made.step()
    made.step()
    assert made.running == ["short"], "who came before the switch was ranked anew"
    assert made.state["fallbacks"] == 0
    assert made.state["switch"] == {"by_arrival": False, "changes": 2}
    made.drain()


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_by_arrival_it_serves_as_vllm_does(depth: int) -> None:
    limits = {"depth": depth, "num_blocks": 28, "max_num_seqs": 5}
    made = Rig("scripted", **limits)
    made.scheduler.switch.change({"order": "arrival"})
    assert play(made, workload()) == play(Rig(None, **limits), workload())


def test_a_step_has_no_more_tokens_than_were_set() -> None:
    made = rig(max_num_batched_tokens=64)
    made.scheduler.switch.change({"max_num_batched_tokens": 16})
    made.add("a", 40, length=2)
    assert dict(made.step().scheduled) == {"a": 16}
    made.scheduler.switch.change({"max_num_batched_tokens": None})
    assert dict(made.step().scheduled) == {"a": 24}
    made.drain()


def test_new_requests_are_scheduled_by_no_tighter_objective_than_the_bound() -> None:
    made = rig(options={"slo": {"least_tbt_ms": 10.0}})
    made.add("before", tbt_slo_ms=20.0)
    made.scheduler.switch.change({"least_tbt_ms": 100, "least_ttft_ms": 500})
    made.add("tight", tbt_slo_ms=20.0, ttft_slo_ms=900.0)
    made.add("none")
    slo = {name: made.scheduler.tracked[name].slo for name in ("before", "tight", "none")}
    assert slo["before"].tbt_s == 0.02
    assert (slo["tight"].tbt_s, slo["tight"].ttft_s, slo["tight"].e2e_s) == (0.1, 0.9, None)
    assert (slo["none"].tbt_s, slo["none"].ttft_s) == (None, None)


def test_a_change_of_something_else_leaves_the_servers_own_objectives_as_they_are() -> None:
    """Which may be tighter than what a client may ask for."""
    made = rig(options={"slo": {"least_tbt_ms": 50.0, "tbt_ms": 20.0}}, max_num_batched_tokens=64)
    for number, changed in enumerate(({}, {"max_num_batched_tokens": 32}, {"least_ttft_ms": 500})):
        made.scheduler.switch.change(changed)
        made.add(name := f"after {number}")
        assert made.scheduler.tracked[name].slo.tbt_s == 0.02


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"order": "random"}, "order='random': Input should be 'system' or 'arrival'"),
        ({"theta": 1}, "theta=1: Extra inputs are not permitted"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens=True: Input should be a valid integer"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens=3: must be from 4, a token for each seat, to 64"),
        ({"max_num_batched_tokens": 65}, "max_num_batched_tokens=65: must be from 4"),
        ({"least_tbt_ms": 5}, "least_tbt_ms=5: must be at least 10, slo.least_tbt_ms of the start"),
        ({"least_tbt_ms": float("inf")}, "least_tbt_ms=inf: Input should be a finite number"),
        ({"least_tbt_ms": "50"}, "least_tbt_ms='50': Input should be a valid number"),
        ({"least_tbt_ms": True}, "least_tbt_ms=True: Input should be a valid number"),
        ({"order": "x" * 5000}, "order='" + "x" * 199 + ": Input should be 'system' or 'arrival'"),
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_named_and_nothing_changes(wanted: dict[str, Any], problem: str) -> None:
    made = rig(max_num_seqs=4, max_num_batched_tokens=64, options={"slo": {"least_tbt_ms": 10.0}})
    before = made.scheduler.switch.settings
    (found,) = made.scheduler.switch.change({"least_ttft_ms": 700, **wanted}).values()
    assert found.startswith(problem)
    assert made.scheduler.switch.settings is before
    assert made.scheduler.max_num_scheduled_tokens == 64
    assert made.state["switch"]["changes"] == 0


def test_all_settings_are_answered_and_a_change_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[Any, ...]] = []
    monkeypatch.setattr(switch.logger, "warning", lambda *words: logged.append(words))
    made = rig(max_num_batched_tokens=64)
    settings = {"order": "arrival", "max_num_batched_tokens": 64, "least_ttft_ms": 0.0, "least_tbt_ms": 0.0,
                "least_jct_ms": 0.0}  # fmt: skip
    for _ in range(2):
        assert made.scheduler.switch.change({"order": "arrival"}) == settings
    assert logged == [("an administrator changed the policy: %s", {"order": "arrival"})]
    assert made.scheduler.switch.change({}) == settings
    assert made.scheduler.switch.change(None) == {**settings, "order": "system"}
    assert made.state["switch"] == {"by_arrival": False, "changes": 2}


def test_a_system_that_orders_by_arrival_takes_the_switch_too() -> None:
    made = Rig("fcfs", max_num_seqs=1)
    made.scheduler.switch.change({"order": "arrival"})
    assert order_of(made) == ["long", "middling", "short"]
    assert made.state["switch"]["by_arrival"]
