"""Blocks of who leaves come back when the steps under way are through: what a step that needs them before costs."""

from __future__ import annotations

from tests.support.steering import Rig


def _rig() -> Rig:
    """Four requests in all of 8 usable blocks; the one that needs another first has computed most, and is first."""
    rig = Rig(
        "fcfs-tuned",
        depth=2,
        num_blocks=9,
        max_model_len=128,
        max_num_batched_tokens=128,
        max_num_seqs=4,
        enable_prefix_caching=False,
        options={"admission": {"kv_reserve": 0.0}},
    )
    rig.scheduler.defer_block_free = True  # as where a connector loads beside steps under way
    for name, prompt in (("needs", 30), ("has", 25), ("has too", 22), ("leaves", 18)):
        rig.add(name, prompt, length=40)
    rig.step()
    return rig


def _until_somebody_leaves(rig: Rig) -> list[set[str]]:
    """Return who was scheduled in each step."""
    found = []
    while not rig.waiting:
        decision = rig.step()
        assert decision is not None
        found.append(set(dict(decision.scheduled)))
    return found


def test_who_needs_no_block_is_served_in_a_step_that_is_short_of_them() -> None:
    """vLLM's loop ended at the first that found none: a step for nobody, at each preemption of a server with a tier."""
    rig = _rig()
    *_, short, next_one = _until_somebody_leaves(rig)
    assert short == {"has", "has too"}
    assert next_one == {"needs", "has", "has too"}
    assert rig.waiting == ["leaves"]
    assert rig.scheduler.running_order.best().request_id == "needs", "whatever the order of the list"
    rig.drain()


def test_the_order_stays_that_of_ranks_where_blocks_come_back_at_once() -> None:
    rig = _rig()
    rig.scheduler.defer_block_free = False
    *_, last = _until_somebody_leaves(rig)
    assert last == {"needs", "has", "has too"}
    assert rig.running[0] == "needs"
    rig.drain()
