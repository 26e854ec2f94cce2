"""Measures steps for the runtime model."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from vllm_ext.prediction.runtime import StepFeatures

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_REQUESTS_PER_SAMPLE = 32
_MAX_IN_FLIGHT = 16
_computed_tokens = attrgetter("num_computed_tokens")


class StepSink(Protocol):
    """Who learns how long steps take: the runtime model, or a profiler."""

    def observe(self, features: StepFeatures, duration_s: float) -> None:
        """Take one measured step."""
        ...


class StepTimer:
    """Pairs a scheduled step with its output and tells its sink how long it took.

    A step takes from the moment it was scheduled, or from the end of the step before it where several are in flight
    (async scheduling), to its output. Large batches are sampled, one step in ``requests / 32``.
    """

    def __init__(self, sink: StepSink) -> None:
        self.sink = sink
        self._in_flight: dict[int, tuple[float, StepFeatures]] = {}
        self._last_end = float("-inf")
        self._until_sample = 0

    def scheduled(self, output: SchedulerOutput, running: list[Request], now: float) -> None:
        """Note a step that was just scheduled, unless it is empty or not to be sampled."""
        num_requests = len(output.num_scheduled_tokens)
        self._until_sample -= 1
        if not num_requests or self._until_sample > 0:
            return
        self._until_sample = num_requests // _REQUESTS_PER_SAMPLE
        if len(self._in_flight) >= _MAX_IN_FLIGHT:  # outputs that never came: a failed step
            self._in_flight.clear()
        prefill = max(0, output.total_num_scheduled_tokens - num_requests)
        pairs = self._prefill_context(output, running) if prefill else 0.0
        context = sum(map(_computed_tokens, running))
        self._in_flight[id(output)] = (now, StepFeatures(num_requests, prefill, context, pairs))

    def finished(self, output: SchedulerOutput, now: float) -> None:
        """Note the output of a step."""
        noted = self._in_flight.pop(id(output), None)
        if noted is not None:
            started, features = noted
            self.sink.observe(features, now - max(started, self._last_end))
        self._last_end = now

    @staticmethod
    def _prefill_context(output: SchedulerOutput, running: list[Request]) -> float:
        scheduled = output.num_scheduled_tokens
        pairs = 0.0
        for request in running:
            chunk = scheduled.get(request.request_id, 0)
            if chunk > 1:
                pairs += chunk * (request.num_computed_tokens - chunk / 2)
        return pairs
