"""Asks the policies about one step: how many tokens, who joins and leaves, whose KV is copied ahead."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_ext.contract import NO_PLAN, RequestView, Room, Split, StepPlan, Victim
from vllm_ext.kv.connector.cached_prefixes import CachedPrefixes
from vllm_ext.scheduling.encoder_room import EncoderRoom, has_encoder
from vllm_ext.scheduling.engine_state import EngineState
from vllm_ext.scheduling.step import LOOK_AHEAD, EngineStep, could_join, server_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np
    from vllm.v1.request import Request

    from vllm_ext.contract import Admission, Budget, GatePolicy, Ordering
    from vllm_ext.scheduling.kv_swapper import KvSwapper
    from vllm_ext.scheduling.running_order import RunningOrder
    from vllm_ext.scheduling.tracked_requests import TrackedRequests
    from vllm_ext.scheduling.waiting_table import WaitingTable

_LOOKED_AFTER_STEPS = 64
_ASKED_BESIDE = 4
"""Requests of a step that a connector is asked for although nothing is left for them."""
_CHANGED = 1.25
"""Times by which the price of a step must have changed since ranks were made of it."""


class Planner:
    """Makes the plan of each step, budget first, then admission, which gets what the budget leaves.

    Attributes:
        memo: What policies noted for later steps.
        why: Why those who were looked at in the last step do not run, by request id.
        swapper: Where there is a KV tier: whose KV is copied ahead, and what preemptions cost.
    """

    def __init__(
        self,
        engine: EngineState,
        system: str,
        *,
        ordering: Ordering,
        admission: Admission,
        gates: Sequence[GatePolicy],
        budget: Budget,
        tracked: TrackedRequests,
        queue: WaitingTable,
        order: RunningOrder,
        prefixes: CachedPrefixes,
        rng: np.random.Generator,
    ) -> None:
        """Take vLLM's scheduler, the system's name and policies, and what is known beside vLLM.

        Raises:
            ValueError: the system can't work with this engine.
        """
        if admission.preempts and not prefixes.probe.full_attention:
            raise ValueError(
                f"{system} with preemption counts KV blocks, which is exact for full attention only; this model has "
                "sliding-window, Mamba or hybrid KV: add --no-ext-preemption"
            )
        self._engine, self._tracked, self._ordering = engine, tracked, ordering
        self._admission, self._gates, self._budget = admission, gates, budget
        self._queue, self._order, self._prefixes, self._rng = queue, order, prefixes, rng
        self.memo: dict[str, Any] = {}
        self.why: dict[str, str] = {}
        self.swapper: KvSwapper | None = None
        self._head: tuple[int, str | None] = (-1, None)
        """Who was first as who waits last changed, and when that was."""
        self._has_encoder = has_encoder(engine)
        self._free_to_vllm = admission.is_vllms and not gates and queue.shares is None
        self._asks_always = not budget.is_vllms
        self._priced_at = self._step_price()
        self._ranked_at = ordering.prices(*self._priced_at)
        self._tracked.server = server_of(self._engine, self._tracked.runtime)

    @property
    def looks(self) -> bool:
        """Whether waiting requests are asked if they fit, so that `why` says something; else vLLM decides."""
        return not self._free_to_vllm

    def plan(self, now: float, num_waiting: int) -> StepPlan:
        """Return the plan for a step at clock time ``now`` (s), while so many wait.

        Raises:
            Exception: whatever a policy raises; nothing has been changed then.
        """
        self._follow_prices()
        if not self._asks_always and not num_waiting:
            self.why = {}
            return NO_PLAN
        self._prefixes.seen = {}
        try:
            return self._plan(now, num_waiting)
        finally:
            self._prefixes.seen = None

    def _plan(self, now: float, num_waiting: int) -> StepPlan:
        engine, told = self._engine, self._told() if self._queue.passed_over else []
        step = EngineStep(
            engine,
            now,
            num_waiting,
            tracked=self._tracked,
            queue=self._queue,
            order=self._order,
            rng=self._rng,
            memo=self.memo,
            victim=self._victim,
            prefixes=self._prefixes,
        )
        split = self._budget.split(step)
        self.why = {}
        if not num_waiting:
            return StepPlan(split=split)
        step.split_by(split)
        room = step.room()
        if self._free_to_vllm and not split.apart:
            self._queue.begin_look()
            plan = StepPlan(split=split)
        else:
            if self._gates:
                room.gates = tuple([policy.gate(step) for policy in self._gates])
            if self._has_encoder:
                room.gates = (*room.gates, EncoderRoom(engine, step.unfinished_prompts, self._prefixes))
            self._admission.select(step, room)
            ask = self._ask_again(step, room, told) if told else ()
            split = _without_waste(split, step, room)
            plan = StepPlan(split=split, admit=tuple(room.admit), preempt=tuple(room.preempt), ask=ask)
            for request in step.untold:
                self._queue.part(request)
            self.why = room.why or self._head_lacks(step, room)
        if self.swapper is not None:
            self.swapper.look_ahead(step, room)
        return plan

    def _told(self) -> list[Request]:
        """Ask about some of those that stand apart as undecided, and return who could join by now."""
        told = [
            request
            for request in self._queue.undecided(LOOK_AHEAD)
            if could_join(request) and self._prefixes.can_tell(request, anew=True)
        ]
        self._queue.changes += len(told)  # who competes is not the same: a gate's refusal stands no longer
        return told

    def _ask_again(self, step: EngineStep, room: Room, told: Sequence[Request]) -> tuple[str, ...]:
        """Take those that stood apart as undecided into what the others left; return who is asked for beside that.

        vLLM may pass over them again: room that was kept for them would be lost to the others. They pass nobody who
        was refused. Of those for whom nothing is left a few are offered all the same, if they rank before somebody who
        joins: or they would wait as long as there are others.
        """
        refused = min(self._keys(room.why), default=(math.inf,))
        last = max(self._keys(room.admit), default=())
        ask: list[str] = []
        for candidate in step.candidates(told):
            if candidate.key > refused:
                continue
            if room.fits(candidate):
                room.take(candidate)
            elif len(ask) < _ASKED_BESIDE and candidate.key < last:
                ask.append(candidate.req_id)
        return tuple(ask)

    def _keys(self, req_ids: Iterable[str]) -> Iterator[tuple[float, ...]]:
        known = (self._engine.requests.get(req_id) for req_id in req_ids)
        return (self._queue.key(request) for request in known if request is not None and request in self._queue)

    def _head_lacks(self, step: EngineStep, room: Room) -> dict[str, str]:
        """Return what the head of the queue waits for where nobody needed to be looked at."""
        lacks = None if room.admit else room.lacks
        if lacks is None:
            return {}
        if self._head[0] != self._queue.changes:
            self._head = (self._queue.changes, next((candidate.req_id for candidate in step.waiting()), None))
        return {} if self._head[1] is None else {self._head[1]: lacks}

    def _victim(self, request: RequestView, blocks: int) -> Victim:
        if self.swapper is not None:
            victim = self.swapper.priced(request, blocks)
        else:
            victim = Victim(request, (), blocks, request.recompute_s, request.recompute_s)
        place = self._engine.place
        return victim if place is None else place.priced(victim)

    def _follow_prices(self) -> None:
        """Have requests ranked again once steps take much longer than when that was done, or less, if it matters."""
        if self._engine.current_step % _LOOKED_AFTER_STEPS:
            return
        prices = self._step_price()
        if not _differ(prices, self._priced_at):
            return
        self._priced_at = prices
        self._tracked.server = server_of(self._engine, self._tracked.runtime)
        ranked_at = self._ordering.prices(*prices)
        if _differ(ranked_at, self._ranked_at):
            self._ranked_at = ranked_at
            self._queue.prices_changed()
            self._order.rerank_all()

    def _step_price(self) -> tuple[float, float]:
        runtime = self._tracked.runtime
        return runtime.decode_s(100, 1000), runtime.prefill_s(1000)


def _without_waste(split: Split, step: EngineStep, room: Room) -> Split:
    """Return a split whose cap on running prompts leaves no more than those who join can use."""
    if split.chunk is None:
        return split
    if not room.admit:
        return replace(split, chunk=None)
    return replace(split, chunk=split.chunk + max(0, room.tokens) // max(1, step.num_prefilling))


def _differ(prices: Sequence[float], others: Sequence[float]) -> bool:
    return any(not then / _CHANGED <= now <= then * _CHANGED for now, then in zip(prices, others, strict=True))
