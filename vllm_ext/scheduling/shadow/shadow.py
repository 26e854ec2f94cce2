"""Shadow mode: what another system's order would make of the requests at hand, counted beside the one that serves.

Nothing here is read by the server. Whatever fails switches the shadow off, once and for good.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, cast

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from vllm_ext.contract import Ordering, RequestView, Server
from vllm_ext.scheduling.shadow.shadow_order import ShadowOrder
from vllm_ext.scheduling.shadow.virtual_queue import VirtualQueue, VirtualRequest
from vllm_ext.scheduling.shadow.waits_compared import WaitsCompared
from vllm_ext.scheduling.step import server_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ext.scheduling.tracked_requests import TrackedRequest, TrackedRequests

logger = init_logger("vllm.vllm_ext.shadow")

REPORT_S = 3600.0
"""Seconds between two lines in the log."""
_AT_ONCE = 3
"""Events that are replayed with each one that comes: more than one, so that the replay catches up."""
_IN_STATE = 100
"""Events that are replayed when the state is fetched, which happens while nobody comes, too."""
_MOST_PENDING = 20_000
"""Events that may wait to be replayed: of more the replay forgets all, and begins anew."""
_MEASURED_EVERY = 256
"""Requests after which the server is measured again."""

P = ParamSpec("P")


def _harmless(told: Callable[Concatenate[Shadow, P], None]) -> Callable[Concatenate[Shadow, P], None]:
    """Keep from the server whatever a method raises, and switch the shadow off then."""

    @functools.wraps(told)
    def guarded(shadow: Shadow, *args: P.args, **kwargs: P.kwargs) -> None:
        if shadow.failures:
            return
        try:
            told(shadow, *args, **kwargs)
        except Exception:
            shadow.failures += 1
            shadow._start_anew()
            logger.exception("shadow %s failed and is off until the server restarts; serving goes on", shadow.name)

    return cast("Callable[Concatenate[Shadow, P], None]", guarded)


class Shadow:
    """Replays the requests of a server in the order of another system, and compares waits.

    Attributes:
        name: Of the system.
        failures: 1 once it is off.
        compared: All requests so far.
        dropped: Requests that were forgotten as the replay lagged too far behind.
    """

    def __init__(
        self,
        name: str,
        ordering: Ordering,
        tracked: TrackedRequests,
        *,
        seats: int,
        measure: Callable[[], Server],
        cached_tokens: Callable[[Request], int],
        by_priority: bool,
    ) -> None:
        """Take what ranks are made of.

        Args:
            name: Of the system.
            ordering: Its order.
            tracked: What is known of the requests.
            seats: Most requests that the server runs at a time.
            measure: Measures what requests take their share of.
            cached_tokens: Looks up the tokens at a request's front that need no computing.
            by_priority: Whether requests go by priority before all else.
        """
        self.name, self._tracked = name, tracked
        self._seats, self._measure, self._cached_tokens = seats, measure, cached_tokens
        self.failures = self.dropped = self._overtakes = 0
        self.compared, self._lately = WaitsCompared(), WaitsCompared()
        self._since, self._stepped = math.inf, -math.inf
        self._arrivals = 0
        self._new_order: Callable[[], ShadowOrder] = lambda: ShadowOrder(ordering, self._view, by_priority=by_priority)
        self._order = self._new_order()
        self._start_anew()

    # --- what the server does ---------------------------------------------------------------------------------------

    @_harmless
    def arrived(self, request: Request, tracked: TrackedRequest) -> None:
        """Note a new request, unless it waits for more than its turn: for a grammar, or for its client to go on."""
        self._since = min(self._since, tracked.arrival_time)
        if request.resumable or request.status != RequestStatus.WAITING:
            return
        if not self._arrivals % _MEASURED_EVERY:
            self._server = self._measure()
        self._arrivals += 1
        if len(self._queue) >= _MOST_PENDING:
            self.dropped += len(self._known)
            self._start_anew()
        mine = copy.copy(tracked)
        found = VirtualRequest(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            priority=request.priority,
            arrived=tracked.arrival_time,
            tracked=mine,
            kv_tokens=request.num_prompt_tokens + round(tracked.prediction.distribution.moment(1) / 2),
            cached_tokens=min(self._cached_tokens(request), request.num_prompt_tokens - 1),
        )
        mine.request, mine.waiting_since = cast("Request", found), None
        self._known[request.request_id] = found
        self._queue.arrived(found)
        self._queue.advance(_AT_ONCE)

    @_harmless
    def started(self, req_id: str, now: float) -> None:
        """Note that the server schedules a request for the first time."""
        if (found := self._known.get(req_id)) is not None:
            self._queue.started(found, now)
            self._queue.advance(_AT_ONCE)

    @_harmless
    def left(self, req_id: str, now: float, *, ended: bool) -> None:
        """Note that a request left the server, by itself (``ended``) or because it was told to."""
        if (found := self._known.pop(req_id, None)) is not None:
            found.counts &= ended and found.started is not None
            self._queue.left(found, now, aborted=not ended)
            self._queue.advance(_AT_ONCE)
        if now - self._since >= REPORT_S:
            self.report()

    @_harmless
    def stepped(self, now: float, num_running: int) -> None:
        """Note that a step was scheduled, of so many requests."""
        self._stepped = now
        self._queue.stepped(now, seats_taken=num_running >= self._seats)

    @_harmless
    def corrected(self, tracked: TrackedRequest) -> None:
        """Take over a better prediction."""
        found = self._known.get(tracked.request.request_id)
        if found is not None and found.tracked is not None:
            self._tracked.follow(found.tracked, tracked.prediction)
            self._order.rerank(found)

    def loaded(self, req_id: str) -> None:
        """Note that a request waited for its KV: in another order it would have, too, so that its wait says nothing."""
        if (found := self._known.get(req_id)) is not None:
            found.counts = False

    # --- seen from outside ------------------------------------------------------------------------------------------

    @_harmless
    def report(self) -> None:
        """Log what was compared since the last report."""
        since_s = self._stepped - self._since
        if self._lately.requests:
            period = "hour" if since_s // REPORT_S == 1 else f"{since_s:.0f} s"
            logger.info("shadow %s, last %s: %s", self.name, period, self._lately)
        self._lately, self._since = WaitsCompared(), self._stepped

    def state(self) -> dict[str, Any]:
        """Return the totals, fit for JSON."""
        self.catch_up(_IN_STATE)
        compared = self.compared
        return {
            "system": self.name,
            "outcomes": dict(compared.outcomes),
            "waits_s": {"real": compared.real.total_s, "shadow": compared.shadow.total_s},
            "service_s": compared.service_s,
            "longest_s": {"real": self._lately.real.longest_s, "shadow": self._lately.shadow.longest_s},
            "overtakes": self._overtakes + self._order.overtakes,
            "dropped": self.dropped,
            "failures": self.failures,
        }

    # --- the replay -------------------------------------------------------------------------------------------------

    @_harmless
    def catch_up(self, most: float = math.inf) -> None:
        """Replay up to so many events, as far as all that matters is known."""
        self._queue.advance(most)

    def _start_anew(self) -> None:
        """Forget all requests; those that come from now on find an empty server."""
        self._known: dict[str, VirtualRequest] = {}
        self._overtakes += self._order.overtakes
        self._order = self._new_order()
        self._queue = VirtualQueue(self._order, self._judge, self._seats)

    def _view(self, request: VirtualRequest) -> RequestView:
        view, cached = self._tracked.view(cast("TrackedRequest", request.tracked)), request.cached_tokens
        missing_s = self._tracked.runtime.prefill_s(view.num_prompt_tokens - cached, cached)
        return view._replace(
            waiting_since=request.arrived,
            server=self._server,
            cached_tokens=cached,
            prefill_s=missing_s,
            predicted_remaining_s=view.predicted_remaining_s - view.prefill_s + missing_s,
        )

    def _judge(self, request: VirtualRequest) -> None:
        if request.started is not None and request.begins is not None:
            waits = request.started - request.arrived, request.begins - request.arrived
            for compared in (self.compared, self._lately):
                compared.add(*waits, request.service_s)


def shadow_beside(scheduler: Any, ordering: Ordering) -> Shadow:
    """Return the shadow of a scheduler; it reports for the last time when that shuts down."""
    probe, close = scheduler.prefixes.probe, scheduler.shutdown
    shadow = Shadow(
        str(scheduler.config.shadow),
        ordering,
        scheduler.tracked,
        seats=scheduler.max_num_active_reqs,
        measure=lambda: server_of(scheduler, scheduler.tracked.runtime),
        # Only where a look-up leaves no trace in vLLM's statistics.
        cached_tokens=lambda request: probe.cached(request)[0] * probe.block_size if probe.gallops else 0,
        by_priority=scheduler.scheduler_config.policy == "priority",
    )

    def shutdown() -> None:
        shadow.report()
        close()

    setattr(scheduler, "shutdown", shutdown)  # noqa: B010 - mypy: a method; of servers without a shadow it is vLLM's
    return shadow
