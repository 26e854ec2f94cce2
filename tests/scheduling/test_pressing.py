"""`auto` on vLLM's scheduler: as `alise` without objectives, and who leaves and comes back for those that press."""

from __future__ import annotations

import random

import pytest

from tests.support.steering import Rig


def decisions(system: str, depth: int, seed: int) -> tuple[list[object], int]:
    """What is scheduled, step by step, in little KV memory, of prompts that are not cut; and the preemptions."""
    rng = random.Random(seed)
    rig = Rig(system, depth=depth, max_num_seqs=6, num_blocks=27, max_num_batched_tokens=2048)
    found: list[object] = []
    for number in range(60):
        length = rng.choice((1, 3, 60, 110))
        rig.add(f"r{number}", rng.randint(3, 200), length=length, osl=rng.choice((None, length)), max_tokens=120)
        found += [rig.step(seconds=0.05) for _ in range(rng.randint(1, 9))]
    while rig.loop.has_work:
        found.append(rig.step(seconds=0.05))
    return found, sum(rig.state["preemptions"].values())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_without_objectives_every_step_is_that_of_alise(depth: int, seed: int) -> None:
    ours, preemptions = decisions("auto", depth, seed)
    assert ours == decisions("alise", depth, seed)[0]
    assert preemptions > 3, "or nothing is shown of who leaves and comes back"


def crowded(**options: object) -> Rig:
    """Two seats: a long answer has one, a younger one the other, and a short one waits."""
    rig = Rig("auto", max_num_seqs=2, num_blocks=200, max_num_batched_tokens=2048, options=options)
    rig.add("much", 30, length=300, osl=300)
    rig.step(20, seconds=0.05)
    rig.add("little", 30, length=300, osl=300)
    rig.step(20, seconds=0.05)
    rig.add("cheap", 3, length=2, osl=2)
    rig.step(2, seconds=0.05)
    assert rig.running == ["much", "little"]
    return rig


def test_one_who_presses_takes_the_seat_of_who_computed_least_and_that_one_comes_back_first() -> None:
    rig = crowded()
    rig.add("chat", 10, length=4, osl=4, ttft_slo_ms=2000.0)
    rig.step(seconds=0.05)
    assert sorted(rig.running) == ["chat", "much"]
    assert rig.waiting == ["little", "cheap"]
    rig.step(6, seconds=0.05)
    assert sorted(rig.running) == ["little", "much"]
    assert rig.state["preemptions"]["policy"] == 1
    rig.drain(seconds=0.05)


@pytest.mark.parametrize(
    ("chat", "options"),
    [
        ({"ttft_slo_ms": 60_000.0}, {}),
        ({"tbt_slo_ms": 100.0}, {}),
        ({"ttft_slo_ms": 2000.0}, {"slo": {"jct_ms": 60_000.0}}),
        ({"ttft_slo_ms": 2000.0}, {"admission": {"preempt": False}}),
    ],
    ids=["does not press yet", "gaps only", "others have objectives", "switched off"],
)
def test_nobody_leaves_without_need(chat: dict[str, float], options: dict[str, object]) -> None:
    rig = crowded(**options)
    rig.add("chat", 10, length=4, osl=4, **chat)  # type: ignore[arg-type]
    rig.step(4, seconds=0.05)
    assert sorted(rig.running) == ["little", "much"]


def test_those_who_press_hold_the_others_up_for_the_age_limit_at_most() -> None:
    """A stream of objectives that take both seats all the time."""
    for limit_s, started in ((3.0, True), (1e6, False)):
        rig = Rig("auto", max_num_seqs=2, num_blocks=200, options={"ordering": {"age_limit_s": limit_s}})
        rig.add("chat", 10, length=6, osl=6, ttft_slo_ms=4000.0)
        rig.step(seconds=0.05)
        rig.add("other", 3, length=2, osl=2)
        for number in range(200):
            while len(rig.waiting) - ("other" in rig.waiting) < 4:
                rig.add(f"chat{number}.{len(rig.waiting)}", 10, length=6, osl=6, ttft_slo_ms=4000.0)
            rig.step(seconds=0.05)
            if "other" not in rig.waiting:
                break
        assert ("other" not in rig.waiting) == started
        waited_s = rig.clock() - 100.05
        assert not started or 3.0 <= waited_s < 3.0 + 3 * 7 * 0.05, "the fourth seat that is free"
