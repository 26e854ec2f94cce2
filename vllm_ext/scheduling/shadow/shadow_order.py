"""The requests that wait in a shadow's replay, in the order of its system."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from vllm_ext.contract import Ordering, Rank, RequestView, check_rank
from vllm_ext.scheduling.aged_turns import AgedTurns
from vllm_ext.scheduling.waiting_table import WaitingTable

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ext.scheduling.shadow.virtual_queue import VirtualRequest


class ShadowOrder:
    """The waiting queue that the system would have, over requests of the replay.

    Attributes:
        overtakes: Requests that went before an older one.
    """

    def __init__(self, ordering: Ordering, view: Callable[[VirtualRequest], RequestView], *, by_priority: bool) -> None:
        """Start empty.

        Args:
            ordering: Ranks requests.
            view: Makes what it looks at.
            by_priority: Whether requests go by priority before all else.
        """
        self._ordering, self._view, self._by_priority = ordering, view, by_priority
        self.overtakes = 0
        self._now = 0.0
        turns = AgedTurns.of(ordering.age_limit, self._placed)
        rank, ties = cast("Any", self._rank), lambda request: request.tracked.ties
        self._table = WaitingTable(rank, cast("Any", ties), ordering.ageing, None, turns)

    def __len__(self) -> int:
        return len(self._table)

    def add(self, request: VirtualRequest, now: float) -> None:
        """Have a request wait from clock time ``now`` (s) on."""
        self._now = now
        self._table.add_request(cast("Request", request))

    def remove(self, request: VirtualRequest) -> None:
        """Take out a request, if it waits."""
        self._table.remove_requests([cast("Request", request)])

    def rerank(self, request: VirtualRequest) -> None:
        """Ask for the rank of a request again, if it waits."""
        self._table.rerank(cast("Request", request))

    def first(self, now: float) -> VirtualRequest:
        """Return the best one at clock time ``now`` (s)."""
        self._now = now
        self._table.begin_step(now)
        return cast("VirtualRequest", self._table.peek_request())

    def pop(self) -> VirtualRequest:
        """Take out the one that `first` returned."""
        oldest, first = self._table.oldest(), self._table.pop_request()
        self.overtakes += first is not oldest
        return cast("VirtualRequest", first)

    def _rank(self, request: VirtualRequest) -> Rank:
        rank = self._ordering.rank(self._view(request), self._now)
        check_rank(rank)
        return self._placed(rank, request.priority)

    def _placed(self, rank: Rank, priority: int) -> Rank:
        return rank._replace(key=(priority, *rank.key)) if self._by_priority else rank
