"""What becomes of the KV of a preempted request, worked by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_ext.config import ConfigError
from vllm_ext.policies.residency.estimated_wait import EstimatedWait
from vllm_ext.policies.residency.fate import Fate, Parting
from vllm_ext.policies.residency.recompute import Recompute
from vllm_ext.scheduling.views import RequestView


def victim(recompute_s: float) -> RequestView:
    return RequestView("victim", 0.0, 100, recompute_s=recompute_s)


@pytest.mark.parametrize(
    ("wait_s", "reuse_s", "recompute_s", "fate"),
    [
        (1.0, 2.0, 9.0, Fate.KEEP),  # back before its blocks are taken
        (2.0, 2.0, 9.0, Fate.SWAP),  # 0.3 + 0.2 s of copies against 9 s
        (2.0, 2.0, 0.51, Fate.SWAP),
        (2.0, 2.0, 0.5, Fate.RECOMPUTE),
    ],
)
def test_the_cheapest_way_is_chosen(wait_s: float, reuse_s: float, recompute_s: float, fate: Fate) -> None:
    parting = Parting(wait_s=wait_s, reuse_s=reuse_s, out_s=0.3, back_s=0.2)
    assert EstimatedWait().on_preempt(victim(recompute_s), parting) is fate


def test_a_copy_hidden_behind_computation_costs_nothing() -> None:
    parting = Parting(wait_s=2.0, out_s=0.3, back_s=0.2)
    assert EstimatedWait(exposed=0.0).on_preempt(victim(0.21), parting) is Fate.SWAP
    assert EstimatedWait(exposed=0.0).on_preempt(victim(0.2), parting) is Fate.RECOMPUTE


def test_strategies_that_do_not_weigh_costs() -> None:
    dear, soon = Parting(wait_s=2.0, out_s=9.0, back_s=9.0), Parting(wait_s=1.0, reuse_s=2.0)
    assert EstimatedWait(choose="swap").on_preempt(victim(0.1), dear) is Fate.SWAP
    assert EstimatedWait(choose="swap").on_preempt(victim(0.1), soon) is Fate.KEEP
    assert EstimatedWait(choose="recompute").on_preempt(victim(9.0), soon) is Fate.RECOMPUTE


def test_without_a_tier_everything_is_recomputed() -> None:
    assert EstimatedWait().on_preempt(victim(1e6), Parting(wait_s=0.0)) is Fate.RECOMPUTE


def test_vllms_own_rule_leaves_it_to_the_tier() -> None:
    assert Recompute().on_preempt(victim(1e-9), Parting(wait_s=9.0, out_s=9.0, back_s=9.0)) is Fate.SWAP


class Step:
    """A step whose requests rank by their numbers: w1 before r2."""

    def __init__(self, waiting: dict[str, int], running: dict[str, int], free: int) -> None:
        self._waiting, self._running = waiting, running
        self.num_waiting, self.num_running, self.num_free_blocks = len(waiting), len(running), free
        self.looked_at = 0

    def waiting(self) -> Iterator[RequestView]:
        for name in sorted(self._waiting, key=_place):
            yield RequestView(name, 0.0, 1, num_blocks=self._waiting[name])

    def running_worst_first(self) -> Iterator[RequestView]:
        for name in sorted(self._running, key=_place, reverse=True):
            self.looked_at += 1
            yield RequestView(name, 0.0, 1, num_blocks=self._running[name])

    def goes_before(self, first: RequestView, second: RequestView) -> bool:
        return _place(first.req_id) < _place(second.req_id)


def _place(name: str) -> int:
    return int(name[1:])


@pytest.mark.parametrize(
    ("waiting", "free", "leaving"),
    [
        ({"w1": 3}, 3, ()),  # there is room
        ({"w1": 3}, 2, ("r9",)),
        ({"w1": 9}, 2, ("r9", "r8")),  # 4 blocks each
        ({"w1": 3, "w2": 4}, 2, ("r9", "r8")),
        ({"w8": 3}, 0, ("r9",)),  # r8 is older, and stays
        ({"w10": 3}, 0, ()),  # everybody who runs goes before it
        ({"w1": 30}, 0, ("r9", "r8", "r7", "r6")),  # no more than four at a time
        ({}, 0, ()),
    ],
)
def test_who_will_be_pushed_out_is_seen_before(waiting: dict[str, int], free: int, leaving: tuple[str, ...]) -> None:
    running = dict.fromkeys(("r3", "r4", "r5", "r6", "r7", "r8", "r9"), 4)
    step = Step(waiting, running, free)
    assert EstimatedWait().leaving_soon(step) == leaving  # type: ignore[arg-type]
    assert step.looked_at <= 1 + len(leaving)


@pytest.mark.parametrize("policy", [EstimatedWait(ahead=False), EstimatedWait(choose="recompute"), Recompute()])
def test_nobody_is_copied_ahead_where_that_is_not_wanted(policy: EstimatedWait | Recompute) -> None:
    assert policy.leaving_soon(Step({"w1": 9}, {"r2": 4}, 0)) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("choose", "guess"),
        ("exposed", 1.1),
        ("exposed", -0.1),
        ("every_steps", 0),
        ("max_leaving", 0),
        ("tier_bits", 4),
    ],
)
def test_bad_parameters_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"residency.{field}="):
        EstimatedWait(**{field: value})  # type: ignore[arg-type]
