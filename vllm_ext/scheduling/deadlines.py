"""When ranks are to be asked for again: a heap in which a later rank supersedes an earlier one."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from vllm_ext.scheduling.lazy_heap import COMPACT_ABOVE

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Deadlines:
    """Requests by the moment, a time or a step, at which their ranks end.

    Entries of superseded ranks stay behind until they surface, or outnumber the others.
    """

    def __init__(self, in_force: Callable[[Request, int], bool]) -> None:
        """Start empty.

        Args:
            in_force: Says whether the rank of such a number is the request's last one.
        """
        self._in_force = in_force
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, moment: float, number: int, request: Request, *, requests: int) -> None:
        """Note when a rank ends; infinite: never.

        Args:
            moment: At which it is to be asked for again.
            number: Of the rank.
            request: Whose.
            requests: How many there are, which bounds what is kept of superseded ranks.
        """
        if moment != math.inf:
            heapq.heappush(self._heap, (moment, number, request))
        if len(self._heap) > 2 * requests + COMPACT_ABOVE:
            self._heap = [entry for entry in self._heap if self._in_force(entry[2], entry[1])]
            heapq.heapify(self._heap)

    def due(self, moment: float) -> Iterator[Request]:
        """Take out, one by one, the requests whose ranks end by ``moment``, the longest overdue first."""
        while self._heap and self._heap[0][0] <= moment:
            _, number, request = heapq.heappop(self._heap)
            if self._in_force(request, number):
                yield request

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()
