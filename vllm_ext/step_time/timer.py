"""Measures steps for the runtime model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from vllm_ext.step_time.runtime import StepFeatures

_SAMPLES_AT_FIRST = 20
_DECODE_STRIDE = 8
_PREFILL_STRIDE = 2
_REQUESTS_PER_SAMPLE = 32
_MAX_IN_FLIGHT = 16
_computed_tokens = attrgetter("num_computed_tokens")


class Scheduled(Protocol):
    """A step as vLLM scheduled it."""

    num_scheduled_tokens: Mapping[str, int]
    """By request id."""
    total_num_scheduled_tokens: int


class Running(Protocol):
    """A running request of vLLM's."""

    request_id: str
    num_computed_tokens: int


class StepSink(Protocol):
    """Who learns how long steps take: the runtime model, or a profiler."""

    def observe(self, features: StepFeatures, duration_s: float) -> None:
        """Take one measured step."""
        ...


class StepTimer:
    """Pairs a scheduled step with its output and tells its sink how long it took.

    A step takes from the output of the step before it to its own, which is what a reader of tokens sees: what an engine
    does between two, such as sending them, is in it. After a pause, in which nobody runs, it takes from the moment it
    was scheduled. After the first 20 samples one step in 8 is measured, one in 2 of those with prefill, and fewer of
    large batches: learning must not cost more than what it is good for.
    """

    def __init__(self, sink: StepSink, *others: StepSink) -> None:
        self.sink = sink
        self._others = others
        self._in_flight: dict[int, tuple[float, StepFeatures]] = {}
        self._last_end = float("-inf")
        self._goes_on = False
        self.counts_between = True
        """Whether what lies between two steps counts; not where a caller of the engine has its turn there."""
        self._skipped = 0
        self._samples_at_full_rate = _SAMPLES_AT_FIRST

    def measure_every_step(self) -> None:
        """Leave no step out from now on, and count nothing between two: there the caller of an engine has its turn."""
        self._samples_at_full_rate = sys.maxsize
        self.counts_between = False

    def scheduled(self, output: Scheduled, running: Sequence[Running], now: float) -> None:
        """Note a step that was just scheduled, unless it is empty or not to be sampled."""
        num_requests = len(output.num_scheduled_tokens)
        prefills = output.total_num_scheduled_tokens > num_requests
        if not num_requests or self._skips(num_requests, prefills):
            # An output that never came back may have had the same address.
            self._in_flight.pop(id(output), None)
            return
        if len(self._in_flight) >= _MAX_IN_FLIGHT:  # outputs that never came: a failed step
            self._in_flight.clear()
        follows = self._goes_on and self.counts_between
        self._in_flight[id(output)] = (self._last_end if follows else now, self._features(output, running))

    def goes_on(self, running: bool) -> None:
        """Note whether somebody still runs after a step's output: then the next step follows at once."""
        self._goes_on = running

    def finished(self, output: Scheduled, now: float) -> None:
        """Note the output of a step."""
        noted = self._in_flight.pop(id(output), None)
        if noted is not None:
            started, features = noted
            duration_s = now - max(started, self._last_end)
            self.sink.observe(features, duration_s)
            for other in self._others:
                other.observe(features, duration_s)
        self._last_end = now

    def _skips(self, num_requests: int, prefills: bool) -> bool:
        if self._samples_at_full_rate > 0:
            self._samples_at_full_rate -= 1
            return False
        stride = _PREFILL_STRIDE if prefills else _DECODE_STRIDE
        self._skipped += 1
        if self._skipped < max(stride, num_requests // _REQUESTS_PER_SAMPLE):
            return True
        self._skipped = 0
        return False

    @staticmethod
    def _features(output: Scheduled, running: Sequence[Running]) -> StepFeatures:
        """Describe a step. vLLM has counted its tokens as computed: ``num_computed_tokens`` is that of its end."""
        scheduled = output.num_scheduled_tokens
        if len(running) > len(scheduled):  # a budget may let running requests sit a step out
            running = [request for request in running if request.request_id in scheduled]
        context = sum(map(_computed_tokens, running))
        if output.total_num_scheduled_tokens == len(scheduled):
            return StepFeatures(len(scheduled), 0, context)
        decodes, pairs = 0, 0.0
        for request in running:
            chunk = scheduled.get(request.request_id, 0)
            if chunk == 1:
                decodes += 1
            elif chunk:
                pairs += chunk * (request.num_computed_tokens - chunk / 2)
        return StepFeatures(decodes, output.total_num_scheduled_tokens - decodes, context, pairs)
