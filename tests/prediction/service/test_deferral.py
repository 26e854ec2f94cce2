"""Questions put off while there are seats to spare: asked once, in time, before the request is told to have ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext.prediction.prompt_text import PromptText
from vllm_ext.prediction.service import attach
from vllm_ext.prediction.service.attach import Attached, Deferral
from vllm_ext.prediction.service.request_text import RequestTexts


class Service:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def ask(self, *arguments: Any) -> None:
        self.calls.append(("ask", *arguments))

    def finished(self, *arguments: Any) -> None:
        self.calls.append(("finished", *arguments))

    def gone(self, *arguments: Any) -> None:
        self.calls.append(("gone", *arguments))


def front_end(unfinished: int, seats: int = 4) -> tuple[Attached, Service]:
    service: Any = Service()
    made = Attached(service, RequestTexts(PromptText()), "m")
    made.defer = Deferral(asyncio.get_running_loop(), lambda: unfinished, seats)
    return made, service


def ended(made: Attached, req_id: str, tokens: int, reason: str = "stop") -> None:
    state: Any = SimpleNamespace(request_id=req_id, detokenizer=SimpleNamespace(num_output_tokens=lambda: tokens))
    made.ended(state, reason)


@pytest.mark.parametrize(("unfinished", "at_once"), [(1, False), (2, False), (3, True), (9, True)])
async def test_a_question_waits_while_half_of_the_seats_are_free(
    unfinished: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "_DEFER_S", 0.01)
    made, service = front_end(unfinished)
    made.asked("r", "a question", [1, 2], 9, None, None)
    assert bool(service.calls) == at_once
    while not service.calls:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.03)
    assert service.calls == [("ask", "r", "a question", 9, "m", 2)]


async def test_a_request_that_ends_first_is_asked_for_before_it_is_told_to_have_ended() -> None:
    """Else it would not be learned."""
    made, service = front_end(1)
    made.asked("r", "a question", [1], 9, "adapter", None)
    ended(made, "r", 3)
    assert service.calls == [("ask", "r", "a question", 9, "adapter", 1), ("finished", "r", 3)]
    made.asked("s", "another", [1], 9, None, None)
    ended(made, "s", 3, reason="abort")
    assert service.calls[2:] == [("ask", "s", "another", 9, "m", 1), ("gone", "s")]


async def test_a_put_off_question_is_asked_once() -> None:
    made, service = front_end(1)
    made.asked("r", "a question", [1], 9, None, None)
    assert made.defer is not None
    made.defer.now("r")
    made.defer.now("r")
    ended(made, "r", 3)
    assert [call[0] for call in service.calls] == ["ask", "finished"]


async def test_without_seats_to_ask_about_it_is_asked_at_once() -> None:
    made, service = front_end(1)
    made.defer = None
    made.asked("r", "a question", [1], 9, None, None)
    assert len(service.calls) == 1
