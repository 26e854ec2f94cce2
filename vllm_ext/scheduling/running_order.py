"""Keeps vLLM's list of running requests in the order of the policy; ranks are asked for again when they expire."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from vllm_ext.scheduling.engine_state import tokens_left
from vllm_ext.scheduling.lazy_heap import LazyHeap

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ext.contract import Rank
    from vllm_ext.scheduling.engine_state import EngineState

Key = tuple[float, ...]

_MAX_DUE = 16
"""Bound on ranks that are asked for again in a step; the rest follows in the next ones."""
_LOOKED_AT = 8
"""Possible victims that are ranked again at a time."""
_FRESH_STEPS = 8
"""Steps within which they are not ranked again."""


class _Ranked(NamedTuple):
    number: int
    step: int
    until_tokens: float


class RunningOrder:
    """Ranks of running requests.

    vLLM serves ``running`` from the front and, out of KV memory, preempts from its back: keeping the list sorted by
    rank is all it takes to choose both.
    """

    def __init__(
        self,
        engine: EngineState,
        rank: Callable[[Request], tuple[Key, Rank]],
        *,
        free_blocks: Callable[[], int],
        objective: Callable[[Request], float | None],
        stall_free: bool = False,
    ) -> None:
        """Start empty.

        Args:
            engine: Whose list is ordered.
            rank: Asks for the rank of a running request; its key with ties included, and the rank.
            free_blocks: KV blocks that are free now.
            objective: The TBT objective of a request, in seconds; None if it has none.
            stall_free: Serve decodes before prefill chunks even when KV memory is about to run out, so that a
                prefilling request is the first to leave, whatever its rank.
        """
        self._engine = engine
        self._rank = rank
        self._free_blocks = free_blocks
        self._objective = objective
        self._stall_free = stall_free
        self.changes = 0
        """Counts who joined or left."""
        self.keys: dict[Request, Key] = {}
        self._ranked: dict[Request, _Ranked] = {}
        self._counter = 0
        self._numbers: set[int] = set()
        """Of ranks that hold."""
        self._by_time: LazyHeap[tuple[float, int, Request]] = LazyHeap(self._numbers.__contains__)
        self._by_step: LazyHeap[tuple[float, int, Request]] = LazyHeap(self._numbers.__contains__)
        self._stale: deque[Request] = deque()
        self._displaced = False
        self.tbt_s: dict[Request, float] = {}
        """TBT objectives of those who have one, in seconds."""

    def forget(self, request: Request) -> None:
        """Drop a request that left the running list."""
        if self.keys.pop(request, None) is not None:
            self.changes += 1
            self._numbers.discard(self._ranked.pop(request).number)
        self.tbt_s.pop(request, None)
        if not self.keys:  # nothing to keep alive finished requests for
            for structure in (self._by_time, self._by_step, self._stale):
                structure.clear()

    def rerank(self, request: Request) -> None:
        """Ask for the rank of a running request again; one that does not run is passed over."""
        if request in self.keys:
            self._push(request)

    def _push(self, request: Request) -> None:
        self.keys[request], rank = self._rank(request)
        self._counter += 1
        self._numbers.add(self._counter)
        if (old := self._ranked.get(request)) is not None:
            self._numbers.discard(old.number)
        self._ranked[request] = _Ranked(self._counter, self._engine.current_step, rank.until_tokens)
        if rank.until_s != math.inf:
            self._by_time.push((rank.until_s, self._counter, request))
        if rank.until_tokens != math.inf:
            self._by_step.push(self._awaited(request))

    def rerank_all(self) -> None:
        """Ask for all ranks again, some in each of the next steps: what they were made of changed."""
        self._stale = deque(self.keys)

    def update(self, now: float) -> None:
        """Rank newcomers and those whose rank expired by clock time ``now`` (s), and sort the list."""
        running = self._engine.running
        if len(self.keys) != len(running):
            self._reconcile()
        for request in self._due(now):
            self.rerank(request)
        try:
            self._sort()
        except KeyError:  # one left and another joined unseen (a streaming session): as many, but not the same
            self._reconcile()
            self._sort()

    def _due(self, now: float) -> list[Request]:
        due, ranked = self._by_time.pop_until(now, _MAX_DUE), self._ranked
        while (most := _MAX_DUE - len(due)) > 0:
            looked_at = self._by_step.pop_until(self._engine.current_step, most)
            early = [item for item in looked_at if item[2].num_output_tokens < ranked[item[2]].until_tokens]
            for item in [self._awaited(request) for _, _, request in early]:
                self._by_step.push(item)  # it was slower than it might have been
            due += [item for item in looked_at if item not in early]
            if len(looked_at) < most:
                break
        requests = [request for _, _, request in due]
        while self._stale and len(requests) < _MAX_DUE:
            request = self._stale.popleft()
            if request in self.keys:
                requests.append(request)
        return requests

    def _awaited(self, request: Request) -> tuple[float, int, Request]:
        """Return when to look at a request again: it may have generated as many tokens as its rank holds for."""
        number, _, until_tokens = self._ranked[request]
        steps = max(1.0, (until_tokens - request.num_output_tokens) // (1 + self._engine.num_spec_tokens))
        return (self._engine.current_step + steps, number, request)

    def spare_batch(self) -> None:
        """Let a step that is short of blocks cost those who need one, and not all who run.

        Where a connector loads beside steps under way, vLLM preempts nobody whose steps are not through. The first
        request that finds no block and all behind it in the list sit such a step out; the next one can preempt the
        last of them. So who needs no block goes first here, and the worst-ranked stays last. Slots for drafts are not
        counted: with them such a step may go unnoticed.
        """
        engine, running = self._engine, self._engine.running
        free = self._free_blocks()
        if not engine.defer_block_free or free >= len(running):
            return
        size = engine.block_size
        needs = {r: tokens_left(r) > -r.num_computed_tokens % size for r in running}
        if sum(needs.values()) > free:
            running[:-1] = sorted(running[:-1], key=needs.__getitem__)
            self._displaced = True

    def _sort(self) -> None:
        keys, engine = self.keys, self._engine
        self._displaced = False
        # A decode may not wait behind the rest of a long prompt, however short its output. But when KV memory is about
        # to run out the back of the list is who leaves, and that must be the worst-ranked.
        if engine._inflight_prefills and (self._stall_free or self._free_blocks() > len(engine.running)):
            engine.running.sort(key=lambda request: (request.is_prefill_chunk, keys[request]))
        else:
            engine.running.sort(key=keys.__getitem__)

    def _reconcile(self) -> None:
        running = self._engine.running
        members = set(running)
        for request in [r for r in self.keys if r not in members]:
            self.forget(request)
        for request in running:
            if request not in self.keys:
                self._push(request)
                self.changes += 1
                tbt_s = self._objective(request)
                if tbt_s is not None:
                    self.tbt_s[request] = tbt_s

    def worst_first(self) -> Iterator[tuple[Request, Key]]:
        """Yield running requests with their keys, worst rank first.

        A few at a time are ranked again before they are named, unless that was done in the last steps: a victim must
        not be chosen by what it had left long ago. Those behind them stand where their last ranks put them.
        """
        engine, keys = self._engine, self.keys
        running = engine.running
        if engine._inflight_prefills:
            running = sorted(running, key=keys.__getitem__)
        for last in range(len(running), 0, -_LOOKED_AT):
            looked_at = running[max(0, last - _LOOKED_AT) : last]
            for request in looked_at:
                if engine.current_step - self._ranked[request].step >= _FRESH_STEPS:
                    self.rerank(request)
            looked_at.sort(key=keys.__getitem__, reverse=True)
            yield from ((request, keys[request]) for request in looked_at)

    def best(self) -> Request | None:
        """Return the running request of best rank."""
        running = self._engine.running
        if not running or not (self._displaced or self._engine._inflight_prefills):
            return running[0] if running else None
        known = filter(self.keys.__contains__, running)  # vLLM may ask while some of this step have joined
        return min(known, key=self.keys.__getitem__, default=None)
