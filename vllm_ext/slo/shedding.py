"""Decides in the front end whether a new request is refused, as its TTFT objective can't be met by the forecast.

Each API server asks the engine cores for the state of their queues once per ``metrics_interval_s``, and only while
requests come. In between it adds what it let pass itself; what other API servers let pass it learns with the next
state. Doubts are decided for the client: without a recent state, with nobody waiting, and while the pace of the queue
is unknown and its prompts are short, nothing is refused.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_ext.contract.objective import resolve
from vllm_ext.hints import from_extra_args
from vllm_ext.metrics.frontend import UTILITY
from vllm_ext.slo.queue_state import QueueState

if TYPE_CHECKING:
    from vllm_ext.config.slo import SloConfig
    from vllm_ext.slo.metrics import SloMetrics

logger = init_logger("vllm.vllm_ext.slo")

ATTRIBUTE = "_vllm_ext_shedder"
"""Where an engine's front end keeps it."""
LONGEST_RETRY_S = 600
_NO_RECORDS = 2**62
"""Asks the scheduler for its state without records of finished requests."""
_IDLE_S = 30.0
"""Polling ends when no request came for so long; the next one starts it again."""
_STALE_INTERVALS = 5
"""A state older than this says nothing: the engine is in one long step, or gone."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a request was not let pass."""

    forecast_s: float
    """Time to first token that it would have."""
    objective_s: float
    retry_after_s: int
    """Whole seconds after which, if nobody else came, it would be let pass."""

    def __str__(self) -> str:
        return (
            f"The first token is expected after {self.forecast_s:.3g} s, which is beyond this request's objective of "
            f"{self.objective_s:.3g} s. Please try again in {self.retry_after_s} s or on a different instance."
        )


class _Seen:
    """The last state of one engine's queue."""

    def __init__(self, queue: QueueState, at: float, sent: int, sent_tokens: int) -> None:
        self.queue = queue
        self.at = at
        self.sent = sent
        self.sent_tokens = sent_tokens
        """Totals of what had been let pass when the state was asked for."""


class Shedder:
    """The forecasts of one engine's queues, as one front end knows them."""

    def __init__(
        self,
        engine: Any,
        config: SloConfig,
        interval_s: float,
        metrics: SloMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the engine and the options; nothing is fetched yet.

        Args:
            engine: vLLM's ``AsyncLLM``; held weakly, as it holds us.
            config: Objectives and ``shed_margin``.
            interval_s: Seconds between two readings of the queues; greater than 0.
            metrics: Counts refusals.
            clock: Monotonic, in seconds.
        """
        self._engine = weakref.ref(engine)
        self._config = config
        self._interval_s = interval_s
        self._metrics = metrics
        self._clock = clock
        self._seen: dict[Any, _Seen] = {}
        self._sent = 0
        self._sent_tokens = 0
        self._last_asked = -math.inf
        self._poller: asyncio.Task[None] | None = None
        self._failed = False

    def refusal(self, extra: Mapping[str, Any] | None, num_prompt_tokens: int, num_sequences: int) -> Refusal | None:
        """Return why a request is refused, or None and count it as sent; needs a running event loop.

        Args:
            extra: ``SamplingParams.extra_args`` of the request.
            num_prompt_tokens: Length of its prompt.
            num_sequences: Samples it asks for.

        Raises:
            HintError: A hint is malformed.
        """
        now = self._last_asked = self._clock()
        if self._poller is None or self._poller.done():
            self._poller = asyncio.get_running_loop().create_task(self._run())
        hints = from_extra_args(extra)
        objective_s = resolve(hints, num_prompt_tokens, self._config).ttft_s
        if objective_s is not None:
            forecast_s = self._forecast_s(num_prompt_tokens, now)
            allowed_s = self._config.shed_margin * objective_s
            if forecast_s is not None and forecast_s > allowed_s:
                self._metrics.shed(self._metrics.tier(hints.tag))
                retry_s = min(max(math.ceil(forecast_s - allowed_s), 1), LONGEST_RETRY_S)
                return Refusal(forecast_s=forecast_s, objective_s=objective_s, retry_after_s=retry_s)
        self._sent += num_sequences
        self._sent_tokens += num_prompt_tokens * num_sequences
        return None

    def _forecast_s(self, num_prompt_tokens: int, now: float) -> float | None:
        """Return the TTFT of a request at the best of the engines, in seconds; None if one may start it at once."""
        best: float | None = None
        count = len(self._seen)
        for seen in self._seen.values():
            if now - seen.at > _STALE_INTERVALS * self._interval_s:
                return None
            # Which engine a request went to is the load balancer's affair; it spreads them.
            sent, tokens = (self._sent - seen.sent) / count, (self._sent_tokens - seen.sent_tokens) / count
            forecast_s = seen.queue.ttft_s(num_prompt_tokens, now - seen.at, sent, tokens)
            if forecast_s is None:
                return None
            best = forecast_s if best is None else min(best, forecast_s)
        return best

    async def _run(self) -> None:
        """Fetch once per interval while requests come; a failure is logged once, and then nothing is refused."""
        while self._clock() - self._last_asked < _IDLE_S:
            engine = self._engine()
            if engine is None:
                return
            try:
                await self.fetch(engine)
            except EngineDeadError:
                return
            except Exception:
                self._seen.clear()
                if not self._failed:
                    self._failed = True
                    logger.exception("the scheduler's queue can't be read; until then no request is refused")
            del engine
            await asyncio.sleep(self._interval_s)
        self._seen.clear()

    async def fetch(self, engine: Any) -> None:
        """Read the queues of all engine cores once."""
        client = engine.engine_core
        for identity in client.core_engines:
            sent, sent_tokens = self._sent, self._sent_tokens  # what is sent from here on, the state may not show
            state = await client._call_utility_async(UTILITY, _NO_RECORDS, engine=identity)
            queue = QueueState.parse(state)
            if queue is None:
                self._seen.pop(identity, None)
            else:
                self._seen[identity] = _Seen(queue, self._clock(), sent, sent_tokens)
        for identity in self._seen.keys() - set(client.core_engines):
            del self._seen[identity]
