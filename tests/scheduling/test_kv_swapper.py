"""Whoever is preempted where there is a KV tier: the residency policy is asked, and told when its wait ends."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.preempting import PREEMPTING
from tests.support.steering import Rig
from vllm_ext.scheduling.kv_swapper import KvSwapper
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.run import simulate
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.workloads.spec import WorkloadSpec


@pytest.mark.parametrize(
    ("system", "dispositions"), [("pensieve", {"keep"}), ("alise+pensieve", {"keep", "swap", "recompute"})]
)
def test_the_policy_is_asked_also_where_nothing_else_is_steered(
    system: str, dispositions: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pensieve alone had nobody to ask: its row is vLLM's own order, admission and budget."""
    counted: dict[str, int] = {}
    original = KvSwapper.preempting

    def preempting(self: KvSwapper, request: Any) -> None:
        original(self, request)
        counted.update(self._observer.counters.dispositions)

    monkeypatch.setattr(KvSwapper, "preempting", preempting)
    data = simulate(
        SimulationSpec(
            engine=EngineSpec(
                system=system, num_blocks=220, max_model_len=2048, max_num_seqs=64, options={"kv_tier": {"gib": 1.0}}
            ),
            hardware=HardwareSpec(model="llama-3.1-8b", device="h100"),
            workload=WorkloadSpec(
                source="sharegpt-like", num_requests=40, rate_per_s=50.0, cap_prompt_tokens=300, cap_output_tokens=400
            ),
        )
    )
    assert counted.keys() <= dispositions
    assert counted.keys() != {"keep"} or system == "pensieve"
    assert sum(counted.values()) == data.counters["preemptions"] > 0


def swapper_of(rig: Rig, *, measured: bool = True) -> KvSwapper:
    """What would decide about the KV of who is preempted, if there were a tier."""
    scheduler = rig.scheduler
    link = SimpleNamespace(known=measured)
    prices = SimpleNamespace(
        store_s=lambda tokens: 1.0, load_s=lambda tokens: 1.0, kept_tokens=lambda tokens: tokens, out=link, back=link
    )
    tier = SimpleNamespace(prices=prices, missing_tokens=lambda req_id, tokens: tokens)
    swapper = KvSwapper(
        scheduler,
        tier,  # type: ignore[arg-type]
        scheduler.policies.residency,
        tracked=scheduler.tracked,
        prefixes=scheduler.prefixes,
        observer=scheduler.observer,
        clock=rig.clock,
    )
    swapper.queue, swapper.order = scheduler.ranked, scheduler.running_order
    swapper.rank = lambda view: scheduler.policies.ordering.rank(view, rig.clock())
    return swapper


def test_a_wait_ends_with_the_requests_own_promotion() -> None:
    """ALISE, equation 7: the promotion of its own queue, not of the lowest one."""
    rig = Rig(
        PREEMPTING,
        scheduling_policy="priority",
        max_num_seqs=1,
        options={"ordering": {"num_levels": 6, "base_level_s": 0.5, "age_limit_s": 20.0}},
    )
    swapper, table = swapper_of(rig), rig.scheduler.tracked
    rig.add("runs", 10, osl=300, length=300)
    rig.step(2)
    tracked = table["runs"]
    view = table.view(tracked)
    level = rig.scheduler.policies.ordering.level(view)
    for number in range(64):
        rig.add(f"ahead{number}", 10, osl=300, length=300, priority=-1)
    promoted_s = (level + 1) * 20.0 - tracked.waited_s
    assert swapper._wait_s(tracked, view) == pytest.approx(promoted_s)
    assert promoted_s < 6 * 20.0
    assert not math.isinf(promoted_s)


@pytest.mark.parametrize("system", ["alise", "auto"])
def test_who_comes_back_before_all_others_waits_for_none_of_them(system: str) -> None:
    """The wait was that of a newcomer, behind everybody: its KV was copied, or given up, for a wait of no time."""
    rig = Rig(system, max_num_seqs=2)
    swapper, table = swapper_of(rig), rig.scheduler.tracked
    for name in ("runs", "leaves"):
        rig.add(name, 10, osl=300, length=300)
        rig.step(2)
    for number in range(8):
        rig.add(f"waits{number}", 10, osl=3, length=3)
    tracked = table["leaves"]
    until_free_s = table.view(table["runs"]).predicted_remaining_s
    assert swapper._wait_s(tracked, table.view(tracked)) == pytest.approx(until_free_s)
    rig.scheduler.requests["waits0"].num_preemptions = 1
    rig.scheduler.ranked.rerank(rig.scheduler.requests["waits0"])
    longer_s = swapper._wait_s(tracked, table.view(tracked)) - until_free_s
    assert longer_s == 0, "of those who left, the older comes back first"


@pytest.mark.parametrize(("measured", "copy_s"), [(False, 0.0), (True, 1.0)])
def test_copies_are_taken_to_pay_until_one_was_measured(measured: bool, copy_s: float) -> None:
    """A guess of a slow link made every preempted request compute again, so that no copy ever told better."""
    rig = Rig("alise")
    rig.add("runs", 10, osl=300, length=300)
    rig.step(2)
    swapper, table = swapper_of(rig, measured=measured), rig.scheduler.tracked
    cost = swapper._cost(table["runs"], table.view(table["runs"]))
    assert (cost.out_s, cost.back_s) == (copy_s, copy_s)
