"""Keeps vLLM's list of running requests in the order of the policy, a few ranks at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ext.scheduling.scheduler import SteeredScheduler

Key = tuple[float, ...]

REFRESH_STEPS = 16
"""Steps within which every running request is ranked again: the cost per step stays a fraction of vLLM's own."""


class RunningOrder:
    """Ranks of running requests, refreshed in turn.

    vLLM serves ``running`` from the front and, out of KV memory, preempts from its back: keeping the list sorted by
    rank is all it takes to choose both.
    """

    def __init__(
        self,
        scheduler: SteeredScheduler,
        rank: Callable[[Request], Key],
        *,
        stall_free: bool = False,
        refresh_steps: int = REFRESH_STEPS,
    ) -> None:
        """Start empty.

        Args:
            scheduler: Whose list is ordered.
            rank: Computes the key of a running request, ties included.
            stall_free: Serve decodes before prefill chunks even when KV memory is about to run out, so that a
                prefilling request is the first to leave, whatever its rank.
            refresh_steps: Steps within which every request is ranked again; 0: ranks never change.
        """
        self._scheduler = scheduler
        self._rank = rank
        self._stall_free = stall_free
        self._refresh_steps = refresh_steps
        self.changes = 0
        """Counts who joined or left."""
        self.keys: dict[Request, Key] = {}
        self._tbt_s: dict[Request, float] = {}  # TBT objectives of those who have one
        self._rounds: deque[Request] = deque()

    def forget(self, request: Request) -> None:
        """Drop a request that left the running list."""
        if self.keys.pop(request, None) is not None:
            self.changes += 1
        self._tbt_s.pop(request, None)

    def tbt_s(self, default_s: float) -> float:
        """Return the smallest TBT objective of the running requests, where one that names none has ``default_s``."""
        named = self._tbt_s.values()
        return min(named) if len(named) == len(self.keys) > 0 else min((default_s, *named))

    def rerank(self, request: Request) -> None:
        """Compute the rank of a running request again."""
        self.keys[request] = self._rank(request)

    def update(self) -> None:
        """Rank newcomers and a few others, and sort the list."""
        running = self._scheduler.running
        if len(self.keys) != len(running):
            self._reconcile()
        refresh = 1 + len(running) // self._refresh_steps if self._refresh_steps else 0
        for _ in range(min(refresh, len(self._rounds))):
            request = self._rounds.popleft()
            if request in self.keys:
                self._rounds.append(request)
                self.rerank(request)
        try:
            self._sort()
        except KeyError:  # one left and another joined unseen (a streaming session): as many, but not the same
            self._reconcile()
            self._sort()

    def _sort(self) -> None:
        keys, scheduler = self.keys, self._scheduler
        # A decode may not wait behind the rest of a long prompt, however short its output. But when KV memory is about
        # to run out the back of the list is who leaves, and that must be the worst-ranked.
        if scheduler._inflight_prefills and (
            self._stall_free or scheduler.kv_space.free_blocks() > len(scheduler.running)
        ):
            scheduler.running.sort(key=lambda request: (request.is_prefill_chunk, keys[request]))
        else:
            scheduler.running.sort(key=keys.__getitem__)

    def _reconcile(self) -> None:
        running = self._scheduler.running
        members = set(running)
        for request in [r for r in self.keys if r not in members]:
            self.forget(request)
        for request in running:
            if request not in self.keys:
                self.rerank(request)
                self.changes += 1
                self._rounds.append(request)
                tbt_s = self._scheduler.ledger[request.request_id].slo.tbt_s
                if tbt_s is not None:
                    self._tbt_s[request] = tbt_s
        if len(self._rounds) > 2 * len(running) + 64:
            self._rounds = deque(dict.fromkeys(r for r in self._rounds if r in members))

    def worst_first(self) -> Iterator[Request]:
        """Yield running requests, worst rank first."""
        if self._scheduler._inflight_prefills:
            return iter(sorted(self._scheduler.running, key=self.keys.__getitem__, reverse=True))
        running: list[Request] = self._scheduler.running[::-1]
        return iter(running)

    def best(self) -> Request | None:
        """Return the running request of best rank."""
        running = self._scheduler.running
        if not running:
            return None
        return min(running, key=self.keys.__getitem__) if self._scheduler._inflight_prefills else running[0]
