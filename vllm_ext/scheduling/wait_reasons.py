"""Why requests waited, for the request log and for traces.

Kept only where one of the two is on. A step costs a look-up for each request that was looked at and refused, and one
for each LoRA adapter in use; a request costs what is counted where it comes, joins, or is preempted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm_ext.contract.room import ADAPTERS, AdapterPlaces
from vllm_ext.scheduling.engine_state import adapter_of
from vllm_ext.scheduling.wait_record import WaitRecord

if TYPE_CHECKING:
    from vllm_ext.scheduling.tracked_requests import TrackedRequest, TrackedRequests

TRACE_HEADER = "vllm-ext-wait"
"""Among a request's trace headers, which vLLM hands to the front end with each output: what `WaitReasons.told` says."""
QUEUE = "queue"
"""Reason of steps in which nobody asked whether a request fits: better-ranked ones stood before it, its grammar was
being compiled, or its connector could not tell yet what KV it has."""


def _add(counts: dict[str, int], reason: str, steps: int = 1) -> None:
    if steps:
        counts[reason] = counts.get(reason, 0) + steps


class WaitReasons:
    """Keeps a `WaitRecord` of each request that is tracked. Step numbers are those of ``Counters.steps``.

    Attributes:
        looks: Whether a planner asks of waiting requests if they fit; vLLM itself does not say whom it left behind.
    """

    looks = False

    def __init__(self, tracked: TrackedRequests) -> None:
        """Start with nobody waiting."""
        self._tracked = tracked
        self._overtaking = Overtaking()
        self._lacked: dict[str, int] = {}
        """Steps in which the best of those who were looked at did not fit, by reason."""
        self._full_steps = 0
        """Steps that began with all places for adapters taken ..."""
        self._placed_steps: dict[int, int] = {}
        """... and of these, those in which an adapter had one."""

    def came(self, tracked: TrackedRequest, step: int, queued: int, ahead: int | None) -> None:
        """Note a new request.

        Args:
            tracked: The request.
            step: The last one that was scheduled.
            queued: How many wait.
            ahead: How many of these ranked before it; None: that is not known.
        """
        tracked.wait = WaitRecord(queued, ahead, adapter_of(tracked.request))
        self._overtaking.came(tracked.number)
        self._begin(tracked.wait, step)

    def preempted(self, tracked: TrackedRequest, reason: str, step: int) -> None:
        """Note that a request lost its place, and waits again."""
        if (wait := tracked.wait) is not None:
            _add(wait.preempted, reason)
            self._begin(wait, step)

    def refused(self, why: Mapping[str, str]) -> None:
        """Note who was looked at in the step at hand and does not join, and why."""
        for reason in islice(why.values(), 1):
            _add(self._lacked, reason)
        for req_id, reason in why.items():
            tracked = self._tracked.get(req_id)
            if tracked is not None and tracked.wait is not None:
                _add(tracked.wait.refused, reason)

    def places(self, adapters: AdapterPlaces) -> None:
        """Note which LoRA adapters have a place as a step begins; whose has none is not looked at."""
        if len(adapters.used) >= adapters.most:
            self._full_steps += 1
            for adapter in adapters.used:
                self._placed_steps[adapter] = self._placed_steps.get(adapter, 0) + 1

    def joined(self, tracked: TrackedRequest, step: int) -> None:
        """Note that the step of this number computes tokens of a request."""
        if (wait := tracked.wait) is None:
            return
        if wait.passed_by is None:
            wait.passed_by = self._overtaking.joined(tracked.number)
        self._end(wait, step - 1)

    def left(self, tracked: TrackedRequest, step: int) -> None:
        """Note that a request ended, perhaps while it waited, after this step."""
        if (wait := tracked.wait) is None:
            return
        if wait.passed_by is None:
            wait.passed_by = self._overtaking.gave_up(tracked.number)
        self._end(wait, step)

    def told(self, tracked: TrackedRequest) -> dict[str, Any] | None:
        """Return what is known of a request that does not wait, fit for JSON; None where nothing was kept.

        ``refused``, ``queue_lacked`` and ``reason`` are None where no planner looks.
        """
        if (wait := tracked.wait) is None:
            return None
        reason, share = None, None
        if self.looks and wait.steps:
            causes = {QUEUE: wait.steps - sum(wait.refused.values()), **wait.refused}
            reason = max(causes, key=causes.__getitem__)
            share = round(causes[reason] / wait.steps, 3)
        return {
            "wait_s": round(tracked.waited_s, 6),
            "steps": wait.steps,
            "queued": wait.queued,
            "ahead": wait.ahead,
            "passed_by": wait.passed_by,
            "refused": wait.refused if self.looks else None,
            "queue_lacked": wait.lacked if self.looks else None,
            "reason": reason,
            "reason_share": share,
            "preempted": wait.preempted,
        }

    def _begin(self, wait: WaitRecord, step: int) -> None:
        if wait.since is None:
            wait.since, wait.placeless, wait.lacked_before = step, self._placeless(wait.adapter), dict(self._lacked)

    def _end(self, wait: WaitRecord, last: int) -> None:
        if wait.since is not None:
            waited = max(0, last - wait.since)
            wait.steps += waited
            _add(wait.refused, ADAPTERS, self._placeless(wait.adapter) - wait.placeless)
            for reason, steps in self._lacked.items():
                # In the step in which it joins, another may have been refused.
                _add(wait.lacked, reason, min(steps - wait.lacked_before.get(reason, 0), waited))
            wait.since = None

    def _placeless(self, adapter: int) -> int:
        return self._full_steps - self._placed_steps.get(adapter, 0) if adapter else 0


class Overtaking:
    """Counts by how many that came later a request was overtaken before it first ran.

    Cost: a binary search, and moving the numbers of those who wait behind it.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []
        """Numbers of those that have not run, ascending as they come."""
        self._gave_up: list[int] = []
        """Those that ended without, as long as an earlier one waits."""
        self._last = 0

    def came(self, number: int) -> None:
        """Note a new request; numbers go up by one."""
        self._waiting.append(number)
        self._last = number

    def joined(self, number: int) -> int:
        """Note that a request runs for the first time; return how many later ones ran before."""
        place = bisect_left(self._waiting, number)
        del self._waiting[place]
        later = self._last - number - (len(self._waiting) - place)
        overtook = later - (len(self._gave_up) - bisect_left(self._gave_up, number))
        del self._gave_up[: bisect_left(self._gave_up, self._waiting[0] if self._waiting else self._last + 1)]
        return overtook

    def gave_up(self, number: int) -> int:
        """Note that a request ended before it ran; return how many later ones ran before."""
        overtook = self.joined(number)
        self._gave_up.insert(bisect_left(self._gave_up, number), number)
        return overtook
