"""Judges requests by their objectives where their tokens leave for the client.

One `SloOutcome` stands for a client's request, one `Sequence` for each of its n samples. A sequence stands in for one
method of vLLM's state of it, ``make_request_output``, through which everything of that sequence passes: tokens, its
end, and its abort. Requests without objectives have none, and cost nothing per token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_ext.contract.objective import NO_SLO, resolve
from vllm_ext.hints import REPORT_KEY, SLO_KEYS, from_extra_args
from vllm_ext.hooks.guard import Guard
from vllm_ext.slo import usage_report
from vllm_ext.slo.outcome import SequenceTimes, SloOutcome

if TYPE_CHECKING:
    from vllm_ext.config.slo import SloClass, SloConfig
    from vllm_ext.slo.metrics import SloMetrics

guarded = Guard(
    logging.getLogger("vllm.vllm_ext.slo"),
    "objectives of a request can't be judged; it is served, but vllm_ext:slo_* miss it",
)
_METHOD = "make_request_output"
_OUTCOME = "_vllm_ext_judged"
Clock = Callable[[], float]


class Sequence:
    """Stands in for ``make_request_output`` of one sequence's state, until the sequence ends."""

    __slots__ = ("_arrived", "_clock", "_first", "_held", "_last", "_make", "_outcome", "_state", "max_gap_s", "tokens")
    _held: bool | None

    def __init__(self, outcome: SloOutcome, state: Any, arrived: float, clock: Clock, *, holds_back: bool) -> None:
        """Replace the method on ``state``; the class is left alone.

        Args:
            outcome: The request it belongs to.
            state: vLLM's state of the sequence.
            arrived: Time of arrival by ``clock``.
            clock: Monotonic, in seconds.
            holds_back: Whether tokens may be kept for a later output, as with a streaming interval.
        """
        self._outcome = outcome
        self._state = state
        self._make = getattr(state, _METHOD)
        self._arrived = arrived
        self._clock = clock
        self._held = False if holds_back else None
        """Whether tokens are held back; None where they never are."""
        self._first: float | None = None
        self._last = 0.0
        self.max_gap_s: float | None = None
        self.tokens = 0
        setattr(state, _METHOD, self)

    def __call__(self, new_token_ids: Any, pooling_output: Any, finish_reason: Any, *args: Any, **kwargs: Any) -> Any:
        """Make vLLM's output, and note when it reached the client and how many tokens came with it."""
        output = self._make(new_token_ids, pooling_output, finish_reason, *args, **kwargs)
        if new_token_ids:
            self.tokens += len(new_token_ids)
        if self._held is None:
            if new_token_ids:
                self._sent(self._clock())
        elif new_token_ids or self._held:
            self._held = output is None
            if output is not None:
                self._sent(self._clock())
        if finish_reason is not None:
            self._end(str(finish_reason))
        return output

    def _sent(self, now: float) -> None:
        if self._first is None:
            self._first = now
        elif self.max_gap_s is None or now - self._last > self.max_gap_s:
            self.max_gap_s = now - self._last
        self._last = now

    def _end(self, reason: str) -> None:
        delattr(self._state, _METHOD)  # else the state would hold itself
        now = self._clock()
        first = now if self._first is None else self._first
        times = SequenceTimes(first - self._arrived, self.max_gap_s, now - self._arrived, self.tokens)
        guarded(self._outcome.ended, times, reason)


class Account:
    """Judges the requests of one engine's front end."""

    def __init__(
        self, config: SloConfig, metrics: SloMetrics, *, clock: Clock = time.monotonic, wall: Clock = time.time
    ) -> None:
        """Take the objectives and where to count.

        Args:
            config: Defaults and classes.
            metrics: Counts requests that had objectives.
            clock: Monotonic, in seconds; it measures.
            wall: The clock of vLLM's arrival times.
        """
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._wall = wall
        self._all_have = _has_objectives(config)
        keys = {*SLO_KEYS, REPORT_KEY}
        if any(map(_has_objectives, config.classes.values())):
            keys.add("tag")
        self._keys = frozenset(keys)
        """What a request must bring to be looked at, where not all have objectives."""

    def begin(self, request: Any, state: Any) -> None:
        """Judge a new sequence if it has objectives or a report was asked for.

        Args:
            request: vLLM's ``EngineCoreRequest``.
            state: The front end's ``RequestState`` of it.
        """
        params = request.sampling_params
        if params is None or request.resumable:  # pooling generates nothing; a streaming session has no one arrival
            return
        extra: Mapping[str, Any] | None = params.extra_args
        if not self._all_have and (not extra or self._keys.isdisjoint(extra)):
            return
        parent = state.parent_req
        outcome: SloOutcome | None = getattr(parent, _OUTCOME, None)
        if outcome is None:
            hints = from_extra_args(extra)
            slo = resolve(hints, state.prompt_len, self._config)
            if slo == NO_SLO and not hints.slo_report:
                return
            outcome = SloOutcome(self.count, slo, self._metrics.tier(hints.tag), 1 if parent is None else parent.n)
            if parent is not None:
                setattr(parent, _OUTCOME, outcome)
            if hints.slo_report:
                usage_report.expect(outcome)
        waited_s = max(self._wall() - request.arrival_time, 0.0)
        streamed = state.output_kind.name != "FINAL_ONLY"
        holds_back = streamed and state.stream_interval > 1
        Sequence(outcome, state, self._clock() - waited_s, self._clock, holds_back=holds_back)

    def count(self, outcome: SloOutcome) -> None:
        """Count a request that ended, unless only a report of it was wanted."""
        if outcome.slo == NO_SLO:
            return
        outcomes, overall = outcome.outcomes()
        self._metrics.count(outcome.tier, outcomes, overall, outcome.tokens)


def attach(engine: Any, account: Account) -> None:
    """Let an engine's output processor show its new requests to the account.

    The method is replaced on this one object: other engines of the process, which may have other options or none, are
    left alone, and so is the class.

    Args:
        engine: vLLM's ``AsyncLLM`` or ``LLMEngine``.
        account: Where the requests are judged.
    """
    processor = engine.output_processor
    original = processor.add_request

    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        is_new = request.request_id not in processor.request_states  # else more input of a streaming session
        original(request, *args, **kwargs)
        if is_new:
            guarded(account.begin, request, processor.request_states[request.request_id])

    processor.add_request = add_request


def _has_objectives(config: SloClass) -> bool:
    return any((config.ttft_ms, config.ttft_bucket_ms, config.tbt_ms, config.jct_ms))
