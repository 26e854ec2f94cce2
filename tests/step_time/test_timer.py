"""What the step timer says a step consisted of and how long it took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext.step_time.runtime import StepFeatures
from vllm_ext.step_time.timer import StepTimer


class Sink:
    def __init__(self) -> None:
        self.steps: list[tuple[StepFeatures, float]] = []

    def observe(self, features: StepFeatures, duration_s: float) -> None:
        self.steps.append((features, duration_s))


def step(**tokens: int) -> Any:
    """A scheduled step of so many tokens per request."""
    return SimpleNamespace(num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()))


def running(**computed: int) -> list[Any]:
    """Running requests and their computed tokens, those of the step included, as vLLM has them by then."""
    return [SimpleNamespace(request_id=name, num_computed_tokens=tokens) for name, tokens in computed.items()]


def timed(output: Any, requests: list[Any]) -> tuple[StepFeatures, float]:
    sink = Sink()
    timer = StepTimer(sink)
    timer.scheduled(output, requests, 10.0)
    timer.finished(output, 10.25)
    ((features, duration_s),) = sink.steps
    return features, duration_s


def test_a_decode_step_is_its_requests_and_their_contexts() -> None:
    assert timed(step(a=1, b=1), running(a=100, b=51)) == (StepFeatures(2, 0, 151), 0.25)


def test_a_request_of_several_tokens_is_a_prefill_and_no_decode() -> None:
    """A chunk of 40 that ends at 100: its middle has 80 tokens before it."""
    features, _ = timed(step(a=1, b=40), running(a=30, b=100))
    assert features == StepFeatures(1, 40, 130, 40 * 80.0)


def test_a_step_of_prefills_has_no_decodes() -> None:
    features, _ = timed(step(a=16, b=40), running(a=16, b=40))
    assert features == StepFeatures(0, 56, 56, 16 * 8.0 + 40 * 20.0)


def test_a_single_last_token_of_a_prompt_counts_as_a_decode() -> None:
    features, _ = timed(step(a=1, b=1), running(a=30, b=513))
    assert features == StepFeatures(2, 0, 543)


@pytest.mark.parametrize("tokens", [1, 40])
def test_requests_that_sit_the_step_out_do_not_count(tokens: int) -> None:
    features, _ = timed(step(a=tokens), running(a=100, idle=70_000))
    assert features.num_context_tokens == 100
    assert features.num_decodes + features.num_prefill_tokens == tokens


def test_a_step_scheduled_while_another_runs_takes_from_the_end_of_that_one() -> None:
    sink = Sink()
    timer = StepTimer(sink)
    first, second = step(a=1), step(a=1)
    timer.scheduled(first, running(a=10), 1.0)
    timer.scheduled(second, running(a=11), 1.1)
    timer.finished(first, 2.0)
    timer.finished(second, 2.5)
    assert [duration_s for _, duration_s in sink.steps] == [1.0, 0.5]


def test_an_idle_engine_s_pause_belongs_to_no_step() -> None:
    sink = Sink()
    timer = StepTimer(sink)
    for start in (1.0, 100.0):
        timer.scheduled(output := step(a=1), running(a=10), start)
        timer.finished(output, start + 0.5)
    assert [duration_s for _, duration_s in sink.steps] == [0.5, 0.5]


@pytest.mark.parametrize(("goes_on", "taken"), [(True, 0.75), (False, 0.5)])
def test_what_an_engine_does_between_two_steps_belongs_to_the_second_if_somebody_still_runs(
    goes_on: bool, taken: float
) -> None:
    sink = Sink()
    timer = StepTimer(sink)
    for start in (1.0, 1.75):
        timer.scheduled(output := step(a=1), running(a=10), start)
        timer.finished(output, start + 0.5)
        timer.goes_on(goes_on)
    assert [duration_s for _, duration_s in sink.steps] == [0.5, taken]


def test_a_profile_does_not_count_what_it_does_itself_between_two_steps() -> None:
    sink = Sink()
    timer = StepTimer(sink)
    timer.measure_every_step()
    for start in (1.0, 1.75):
        timer.scheduled(output := step(a=1), running(a=10), start)
        timer.finished(output, start + 0.5)
        timer.goes_on(True)
    assert [duration_s for _, duration_s in sink.steps] == [0.5, 0.5]


def test_one_decode_step_in_eight_is_measured_after_the_first_twenty() -> None:
    sink = Sink()
    timer = StepTimer(sink)
    for number in range(20 + 80):
        timer.scheduled(output := step(a=1), running(a=10), float(number))
        timer.finished(output, number + 0.5)
    assert len(sink.steps) == 20 + 10
    timer.measure_every_step()
    for number in range(100, 110):
        timer.scheduled(output := step(a=1), running(a=10), float(number))
        timer.finished(output, number + 0.5)
    assert len(sink.steps) == 20 + 10 + 10


def test_a_step_that_never_came_back_is_not_taken_for_a_later_one_at_its_address() -> None:
    """A failed step's output is dropped; the next may lie where it lay, and may be one that is not measured."""
    sink = Sink()
    timer = StepTimer(sink)
    for number in range(19):
        timer.scheduled(output := step(a=1), running(a=10), float(number))
        timer.finished(output, number + 0.5)
    output = step(a=40)
    timer.scheduled(output, running(a=40), 50.0)  # the 20th, and its output never comes
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"a": 1}, 1
    timer.scheduled(output, running(a=10), 60.0)
    timer.finished(output, 60.5)
    assert [features.num_prefill_tokens for features, _ in sink.steps] == [0] * 19


def test_an_empty_step_is_no_step() -> None:
    sink = Sink()
    timer = StepTimer(sink)
    timer.scheduled(output := step(), running(a=10), 1.0)
    timer.finished(output, 2.0)
    assert sink.steps == []
