"""Makes the reports of a scheduler."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from vllm_ext.kv.connector.cached_prefixes import PrefixProbe
from vllm_ext.scheduling.load_report.report import LoadReport, Prices, session_key
from vllm_ext.scheduling.load_report.residency import Residency

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_ext.kv.connector.prices import TransferPrices
    from vllm_ext.scheduling.tracked_requests import TrackedRequests

_WEIGHT = 0.05
"""Of each request in the mean output of those that ended lately."""
_PROFILED_STEPS = 10_000
"""For which a profile stands."""
_MOST_PROBED = 512
"""Waiting requests that are looked up in the prefix cache; the others are taken to be like them."""
_MOST_WALKED = 16
"""The same, where a look-up walks through the whole prompt."""


class LoadReporter:
    """Tells how loaded a scheduler is, and follows conversations from the first report on that is asked for.

    Args:
        scheduler: Ours; its conversations are those of `TrackedRequests`.
        tracked: Its requests.
        clock: The time in seconds.
    """

    def __init__(self, scheduler: Scheduler, tracked: TrackedRequests, clock: Callable[[], float]) -> None:
        self._scheduler, self._tracked, self._clock = scheduler, tracked, clock
        self._probe = PrefixProbe(scheduler)
        self._residency: Residency | None = None
        self._started, self._number = uuid.uuid4().hex[:12], 0
        self._output_tokens = 256.0
        self._stepped_s = clock()

    def stepped(self, *, goes_on: bool) -> None:
        """Note that a step ended; ``goes_on``: somebody is there for whom the next one can be."""
        self._stepped_s = self._clock() if goes_on else float("inf")

    def came(self) -> None:
        """Note that a request came: a step should end from now on."""
        self._stepped_s = min(self._stepped_s, self._clock())

    def leaves(self, request: Request) -> None:
        """Note a request that ends, before its blocks are given back."""
        tokens = max(1, request.num_output_tokens)
        self._output_tokens += _WEIGHT * (tokens - self._output_tokens)
        if self._residency is None or not request.num_computed_tokens:
            return
        tracked = self._tracked.get(request.request_id)
        session = None if tracked is None else tracked.hints.conversation_id
        if session is not None:
            self._residency.follow(session_key(session), request)

    def report(self, *, resident: bool = True) -> LoadReport:
        """Return the state at this moment.

        Args:
            resident: Whether to say whose KV is there; it is followed from the first time on.
        """
        scheduler, self._number = self._scheduler, self._number + 1
        running, waiting = scheduler.get_request_counts()
        # Who has ended may keep blocks for a connector, and who loads has them: those are in use.
        others = (one for one in scheduler.requests.values() if one.status is not RequestStatus.RUNNING)
        waits = [one for one in others if not one.is_finished()]
        queue = [one for one in waits if not one.num_computed_tokens]
        begun = sum(max(0, one.num_prompt_tokens - one.num_computed_tokens) for one in scheduler.running)
        begun += sum(one.num_tokens - one.num_computed_tokens for one in waits if one.num_computed_tokens)
        pool = scheduler.kv_cache_manager.block_pool
        used = max(0, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())  # one stands for no block
        if resident and self._residency is None:
            self._residency = Residency(scheduler)
        return LoadReport(
            number=self._number, started=self._started, running=running, waiting=waiting,
            seats=scheduler.max_num_running_reqs, prefill_tokens=begun + self._uncached_tokens(queue),
            context_tokens=self._tokens(used) + sum(one.num_tokens for one in queue),
            pool_tokens=self._tokens(pool.num_gpu_blocks),
            output_tokens=self._output_tokens, prices=self._prices(),
            step_age_s=self._step_age_s() if running + waiting else 0.0,
            resident=self._residency.held() if resident and self._residency is not None else {},
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return what the gauges show, fit for JSON."""
        report = self.report(resident=False)
        return {
            "prefill_tokens": report.prefill_tokens,
            "context_tokens": report.context_tokens,
            "queue_s": report.queue_s,
            "step_s": report.step_s,
            "step_age_s": report.step_age_s,
        }

    def _tokens(self, blocks: int) -> int:
        """Return the tokens for which so many blocks are; a token takes one of each group of layers."""
        groups = max(1, len(self._scheduler.kv_cache_config.kv_cache_groups))
        return blocks * int(self._scheduler.block_size) // groups

    def _step_age_s(self) -> float:
        now = self._clock()
        if self._scheduler._pause_state is not PauseState.UNPAUSED:  # as it was told, and none is to be expected
            self._stepped_s = now
        return max(0.0, now - self._stepped_s)

    def _uncached_tokens(self, requests: Iterable[Request]) -> int:
        """Return the tokens of waiting requests that the device does not have."""
        size, tokens, uncached = self._probe.block_size, 0, 0
        waiting = iter(requests)
        most = _MOST_PROBED if self._probe.gallops else _MOST_WALKED
        for one in itertools.islice(waiting, most):
            tokens += one.num_tokens
            uncached += max(1, one.num_tokens - self._probe.cached(one)[0] * size)
        others = sum(one.num_tokens for one in waiting)
        return uncached + (others * uncached // tokens if others else 0)

    def _prices(self) -> Prices:
        runtime = self._tracked.runtime
        price = runtime.coefficients
        tier = getattr(self._scheduler, "tier", None)
        transfer: TransferPrices | None = None if tier is None else tier.prices
        return Prices(
            base_s=price.base_s, prefill_token_s=price.prefill_token_s, decode_s=price.decode_s,
            context_token_s=price.context_token_s,
            steps=runtime.num_observations + (0 if runtime.given is None else _PROFILED_STEPS),
            host_token_s=0.0 if transfer is None else transfer.load_s(transfer.chunk_tokens) / transfer.chunk_tokens,
        )  # fmt: skip
