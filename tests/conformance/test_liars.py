"""What a client gains by what it says, and what others lose by it, where more is asked for than can be served.

Two clients of one length law ask for 1.15 times what eight seats serve; one tells the truth, the other what a test
says. All parameters are those that ship but the age limit, which is shortened as the overload is: it lasts 100 s.

Objectives are taken at their word, and whoever presses goes first: from clients that ask for more than they need only
turns protect the others (`fair+auto`).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from tests.support.steering import unwatched
from vllm_ext.simulation.engine.harness import make_request

STEP_S, SEATS, LOAD = 0.05, 8, 1.15
AGE_LIMIT_S = 10.0
MEAN_TOKENS = 22.0
"""Of exp(N(2.7, 0.9)), cut at 150."""

Said = Callable[[int], dict[str, Any]]
"""What a client says of a request whose output will have so many tokens."""


class Waits(NamedTuple):
    """Mean seconds from arrival to admission."""

    other: float
    """Of the client that says what a test says."""
    honest: float


def truth(length: int) -> dict[str, Any]:
    return {"osl": length}


def nothing(length: int) -> dict[str, Any]:
    return {}


LIES: dict[str, Said] = {
    "nothing": nothing,
    "one token": lambda _: {"osl": 1},
    "half": lambda length: {"osl": max(1, length // 2)},
    "a priority": lambda _: {"priority": -1},
    "a gap": lambda _: {"tbt_slo_ms": 100.0},
    "a first token": lambda _: {"ttft_slo_ms": 4000.0},
    "an end": lambda _: {"jct_slo_ms": 6000.0},
}
PLAYED = (
    *(("alise", lie) for lie in ("nothing", "one token", "half")),
    *(("auto", lie) for lie in ("a priority", "a gap")),
    *(("fair+auto", lie) for lie in ("a first token", "an end")),
)


@functools.cache
def waits(system: str, said: Said, *, new_names: bool = False, seconds: float = 100.0) -> Waits:
    rig = unwatched(
        system,
        options={"ordering": {"age_limit_s": AGE_LIMIT_S}, "prediction": {"hints": "weighed"}},
        num_blocks=2000,
        max_num_seqs=SEATS,
    )
    rng, ends = random.Random(1), rig.clock() + seconds
    arrives, arrived = rig.clock(), {}
    while rig.clock() < ends:
        while arrives <= rig.clock():
            length = max(1, min(150, int(rng.lognormvariate(2.7, 0.9))))
            honest, number = rng.random() < 0.5, len(arrived)
            name = f"{'honest' if honest else 'other'}-{number}"
            hints = truth(length) if honest else said(length)
            tag = "honest" if honest else f"other-{number if new_names else ''}"
            rig.lengths[name], arrived[name] = length, arrives
            priority = hints.get("priority", 0)
            extra = {"tag": tag, **{key: value for key, value in hints.items() if key != "priority"}}
            rig.loop.add(
                make_request(name, 32, max_tokens=150, arrival_time=rig.clock(), priority=priority, extra_args=extra)
            )
            arrives += rng.expovariate(LOAD * SEATS / (MEAN_TOKENS * STEP_S))
        rig.loop.step()
        rig.clock.advance(STEP_S)
    waited = {record["req_id"]: record["queue_s"] for record in rig.state["records"]}
    for name, at in arrived.items():
        if name not in waited:
            started = rig.scheduler.tracked[name].first_scheduled
            waited[name] = (rig.clock() if started is None else started) - at
    return Waits(*(fmean(s for name, s in waited.items() if name.startswith(who)) for who in ("other", "honest")))


@pytest.mark.parametrize(("system", "lie"), PLAYED)
def test_no_lie_doubles_the_wait_of_who_tells_the_truth(system: str, lie: str) -> None:
    assert waits(system, LIES[lie]).honest <= 2 * waits(system, truth).honest


def test_a_new_name_for_each_lie_does_not_either() -> None:
    """It takes a while until newcomers are not believed any more."""
    names = waits("alise", LIES["one token"], new_names=True, seconds=200.0)
    assert names.honest <= 2 * waits("alise", truth, seconds=200.0).honest


def test_the_truth_is_better_than_silence() -> None:
    """For two clients of which the other one tells it."""
    assert waits("alise", truth, seconds=200.0).other < waits("alise", nothing, seconds=200.0).other
