"""A share of admissions for those who have waited longest, for each client by itself."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from tests.support.steering import Loras, Rig, unwatched
from vllm_ext.contract import AgeLimit, Rank
from vllm_ext.scheduling.aged_turns import AgedTurns
from vllm_ext.simulation.engine.harness import make_request

LIMIT = {"ordering": {"age_limit_s": 2.0}}


def turns(share: float = 0.25) -> AgedTurns:
    return AgedTurns(AgeLimit(2.0, share), lambda _: Rank((-1.0,)))


def flooded(system: str = "alise", *, options: dict[str, Any] | None = None, **limits: Any) -> Rig:
    """One seat, three long requests, and short ones of which there are always some."""
    rig = unwatched(system, options=options or LIMIT, max_num_seqs=1, **limits)
    for number in range(3):
        rig.add(f"long-{number}", 10, length=40, osl=400)
    return rig


def admitted(rig: Rig, steps: int, **hints: Any) -> list[str]:
    """Keep the queue full of short requests; return who joined, in order."""
    order: list[str] = []
    for step in range(steps):
        while len(rig.waiting) < 6:
            rig.add(f"short-{step}-{len(rig.waiting)}", 10, length=2, osl=2, **hints)
        rig.step(seconds=0.05)
        order += [name for name in rig.running if name not in order]
    return order


def test_one_admission_in_four_goes_to_the_oldest_beyond_the_limit() -> None:
    order = admitted(flooded(), 400)
    at = [order.index(f"long-{number}") for number in range(3)]
    assert at[1] - at[0] == at[2] - at[1] == 4


def test_without_a_limit_the_flood_goes_on() -> None:
    assert not any("long" in name for name in admitted(flooded(options={"ordering": {"age_limit_s": 1e9}}), 400))


def test_the_share_can_be_chosen() -> None:
    order = admitted(flooded(options={"ordering": {"age_limit_s": 2.0, "aged_share": 0.5}}), 400)
    at = [order.index(f"long-{number}") for number in range(3)]
    assert at[1] - at[0] == at[2] - at[1] == 2


def test_it_goes_before_those_who_press() -> None:
    order = admitted(flooded("auto"), 400, ttft_slo_ms=4000.0)
    assert sum("long" in name for name in order) == 3


def test_one_that_does_not_fit_is_not_passed_when_its_turn_has_come() -> None:
    """All that is free is kept for it, until it fits."""
    rig = unwatched("alise", options=LIMIT, max_num_seqs=4, num_blocks=40)
    for number in range(3):
        rig.add(f"short-{number}", 10, length=8, osl=8)
    rig.step()
    rig.add("large", 480, length=2, osl=400)
    order = admitted(rig, 300)
    assert "large" in order


def test_a_turn_is_of_a_client_where_clients_take_turns() -> None:
    rig = unwatched("fair+alise", options=LIMIT, max_num_seqs=1)
    rig.add("long", 10, length=4, osl=400, tag="a")
    order: list[str] = []
    for step in range(300):
        for tag in "ab":
            while sum(f"-{tag}-" in name for name in rig.waiting) < 3:
                rig.add(f"short-{tag}-{step}-{len(rig.waiting)}", 10, length=2, osl=2, tag=tag)
        rig.step(seconds=0.05)
        order += [name for name in rig.running if name not in order]
    after = order[order.index("long") - 8 : order.index("long")]
    assert sum("-a-" in name for name in after) in (3, 4, 5), "others of its client, not of the other one"


def test_one_without_a_place_for_its_adapter_has_no_turn() -> None:
    """It would hold up all others."""
    rig = unwatched("alise", options=LIMIT, max_num_seqs=2)
    rig.scheduler.lora_config = Loras(1)
    _add_with_adapter(rig, "resident", 1, length=300)
    rig.step()
    _add_with_adapter(rig, "placeless", 2, length=4)
    order = admitted(rig, 200)
    assert "placeless" not in order
    assert len(order) > 20


def _add_with_adapter(rig: Rig, name: str, adapter: int, *, length: int, **hints: float) -> None:
    rig.lengths[name] = length
    request = make_request(name, 10, max_tokens=400, arrival_time=rig.clock(), extra_args={"osl": 400, **hints})
    request.lora_request = LoRARequest(f"adapter-{adapter}", adapter, "somewhere")
    rig.loop.add(request)


@pytest.mark.parametrize("priority", [1, 0])
def test_a_turn_is_none_before_those_of_higher_priority(priority: int) -> None:
    rig = unwatched("alise", options=LIMIT, max_num_seqs=1, scheduling_policy="priority")
    rig.add("long", 10, length=4, osl=400, priority=priority)
    order = admitted(rig, 200)
    assert ("long" in order) == (priority == 0)


def test_a_turn_is_kept_while_others_have_the_only_place_for_an_adapter() -> None:
    """The place is free whenever nobody runs: who takes it must not take the turn with it."""
    rig = unwatched("accelgen", options=LIMIT, max_num_seqs=1)
    rig.scheduler.lora_config = Loras(1)

    _add_with_adapter(rig, "first", 1, length=4, ttft_slo_ms=6e4)
    rig.step()
    _add_with_adapter(rig, "late", 2, length=4, ttft_slo_ms=1.0)
    for step in range(400):
        while len(rig.waiting) < 4:
            _add_with_adapter(rig, f"{step}-{len(rig.waiting)}", 1, length=4, ttft_slo_ms=6e4)
        rig.step(seconds=0.05)
        if "late" in rig.running:
            return
    raise AssertionError("it never joined")


def test_a_crowd_of_low_priority_takes_no_turn_from_those_above() -> None:
    rig = unwatched("accelgen", options=LIMIT, max_num_seqs=2, scheduling_policy="priority")
    for number in range(4):
        rig.add(f"short-{number}", 10, length=2, ttft_slo_ms=5000.0)
    for number in range(80):
        rig.add(f"low-{number:02}", 10, length=2, priority=5)
    rig.step()
    rig.add("lost", 100, length=2, ttft_slo_ms=1.0)
    for step in range(200):
        while sum(name.startswith("short") for name in rig.waiting) < 6:
            rig.add(f"short-{step}-{len(rig.waiting)}", 10, length=2, ttft_slo_ms=5000.0)
        rig.step(seconds=0.05)
        assert not any(name.startswith("low") for name in rig.running)
        if "lost" in rig.running:
            return
    raise AssertionError("it never joined")


def test_aged_long_prompts_of_one_client_leave_a_gap_for_that_of_another() -> None:
    """Side by side they kept it out: one of them was always computed, and no turn of theirs is its own."""
    options = {"admission": {"long_prompt_tokens": 50}, "ordering": {"age_limit_s": 1.0}, "sharing": {"by": "tag"}}
    rig = unwatched("fair+accelgen", options=options, max_num_seqs=16, max_num_batched_tokens=64, num_blocks=400)
    for number in range(20):
        rig.add(f"long-{number:02}", 400, length=2, tag="many")
    rig.step(seconds=2.0)
    for step in range(80):
        for number in range(3):
            rig.add(f"short-{step}-{number}", 10, length=2, tag="many")
        if step == 20:
            rig.add("one", 400, length=2, tag="few")
        rig.step(seconds=0.05)
        if "one" in rig.running:
            assert sum(name.startswith("long") for name in rig.waiting) > 10
            return
    raise AssertionError("it never joined")


def test_nothing_is_owed_while_nobody_waits_long() -> None:
    counted = turns()
    for _ in range(20):
        counted.admitted("", aged=False, by_turn=False)
    assert counted.due() == {}
    for _ in range(4):
        counted.admitted("", aged=True, by_turn=False)
    assert counted.due() == {"": 1}
    counted.admitted("", aged=False, by_turn=False)
    assert counted.due() == {}


def test_turns_that_nobody_could_take_do_not_add_up_without_bound() -> None:
    counted = turns()
    for _ in range(1000):
        counted.admitted("a", aged=True, by_turn=False)
    assert counted.due() == {"a": 8}
    counted.forget("a")
    assert counted.due() == {}


def test_a_rank_of_its_own_is_given_back_when_a_turn_passes_to_another() -> None:
    rig = flooded()
    admitted(rig, 60)
    table = rig.scheduler.ranked
    due: list[Request] = list(table._due)
    assert all(table.rank(request).key == (-1.0,) for request in due)
    assert [r for r in table._entries if table.rank(r).key == (-1.0,)] == due
