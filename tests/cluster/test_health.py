"""Whether an engine serves, by what it answers; time is a number that the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from vllm_ext.cluster.health import AGE, FAILED, ILL, REPORT, Health


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def health(ask: Callable[[], Awaitable[dict[str, Any]]], clock: Clock) -> Health:
    return Health(ask, report_s=0.01, hang_s=10.0, clock=clock)


async def test_the_last_report_is_told() -> None:
    numbers = iter(range(1, 10))

    async def ask() -> dict[str, Any]:
        return {"number": next(numbers)}

    found = health(ask, Clock())
    assert found.stats() == {}
    await found.look()
    await found.look()
    assert found.stats() == {REPORT: {"number": 2}, AGE: 0.0, FAILED: 0}
    assert found.why_ill() == ""


async def test_an_engine_that_fails_is_ill_until_it_answers() -> None:
    answers: list[Any] = [RuntimeError("EngineCore died"), {"number": 1}]

    async def ask() -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    found = health(ask, Clock())
    await found.look()
    assert found.stats() == {ILL: "the engine does not answer: EngineCore died"}
    await found.look()
    assert found.stats()[REPORT] == {"number": 1}


async def test_a_step_that_does_not_end_is_a_hang_after_a_time_and_not_before() -> None:
    clock, forever = Clock(), asyncio.Event()

    async def ask() -> dict[str, Any]:
        await forever.wait()
        return {}

    found = health(ask, clock)
    asking = asyncio.create_task(found.look())
    await asyncio.sleep(0.01)
    clock.now += 10.0
    assert found.why_ill() == ""
    clock.now += 0.5
    assert found.why_ill().startswith("no step ended for 10 s")
    assert ILL in found.stats()
    forever.set()
    await asking
    assert found.why_ill() == ""


@pytest.mark.parametrize(("age_s", "ill"), [(0.0, False), (9.0, False), (11.0, True)])
async def test_an_engine_that_answers_and_schedules_nobody_has_hung_too(age_s: float, ill: bool) -> None:
    async def ask() -> dict[str, Any]:
        return {"step_age_s": age_s}

    found = health(ask, Clock())
    await found.look()
    assert bool(found.why_ill()) is ill


async def test_an_engine_that_does_not_answer_in_time_is_in_a_long_step_and_not_dead() -> None:
    """Whoever asks gives up after half a minute; a step may be allowed to take longer."""
    clock = Clock()
    answers: list[Any] = [{"number": 1}]

    async def ask() -> dict[str, Any]:
        if answers:
            return dict(answers.pop())
        try:
            raise TimeoutError
        except TimeoutError as error:
            raise RuntimeError("an engine core did not answer within 30 s") from error

    found = health(ask, clock)
    await found.look()
    clock.now += 5.0
    await found.look()
    clock.now += 6.0
    await found.look()
    assert found.stats() == {REPORT: {"number": 1}, AGE: 11.0, FAILED: 0}, "as old as the question"
    clock.now += 5.0
    assert found.why_ill().startswith("no step ended for 11 s")
    answers.append({"number": 2})
    await found.look()
    assert found.stats()[REPORT] == {"number": 2}


async def test_a_second_look_waits_for_the_first_and_does_not_forget_since_when_it_waits() -> None:
    clock, forever, asked = Clock(), asyncio.Event(), 0

    async def ask() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        await forever.wait()
        return {}

    found = health(ask, clock)
    first = asyncio.create_task(found.look())
    await asyncio.sleep(0.01)
    clock.now += 11.0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(found.look(), 0.01)
    assert asked == 1
    assert found.why_ill().startswith("no step ended for 11 s")
    forever.set()
    await first
    assert found.why_ill() == ""


async def test_it_asks_again_and_again() -> None:
    asked, clock = 0, Clock()

    async def ask() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        clock.now += 1.0
        if asked == 2:
            raise OSError
        return {"number": asked}

    found = health(ask, clock)
    following = asyncio.create_task(found.follow())
    while asked < 4:
        await asyncio.sleep(0.005)
    following.cancel()
    assert found.stats()[REPORT]["number"] >= 3


async def test_it_does_not_ask_while_others_do() -> None:
    asked, clock = 0, Clock()

    async def ask() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {"number": asked}

    found = health(ask, clock)
    await found.look()
    following = asyncio.create_task(found.follow())
    await asyncio.sleep(0.1)
    following.cancel()
    assert asked == 1


def test_failures_in_a_row_are_counted_until_one_is_served() -> None:
    found = health(lambda: asyncio.sleep(0, {}), Clock())
    for failed in (True, True):
        found.ended(failed=failed)
    assert found.failed == 2
    found.ended(failed=False)
    assert found.failed == 0
