"""Which ready nodes of a cell go first: by arrival, as published, or by the latest start that meets objectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ext.cellular.queue import ReadyQueue
from vllm_ext.cellular.tables import GraphTable

Floats = NDArray[np.float64]
_LATE = 1e12
"""Added to the key of a request that cannot meet its objective any more, in seconds."""


class Order(Protocol):
    """An order of service within a cell."""

    @property
    def looks_at_work(self) -> bool:
        """Whether remaining work has to be told."""

    def keys(self, numbers: Floats, deadline_s: Floats, remaining_s: Floats) -> Floats:
        """Return keys of subgraphs that become ready as the ``numbers``-th; the smallest goes first."""

    def refresh(self, queue: ReadyQueue, table: GraphTable, now: float) -> None:
        """Bring a queue up to date before a series of tasks is formed from it."""


@dataclass(frozen=True)
class ArrivalOrder:
    """First come, first served.

    Source: BatchMaker, Algorithm 1, line 26.
    """

    looks_at_work: bool = False

    def keys(self, numbers: Floats, deadline_s: Floats, remaining_s: Floats) -> Floats:  # noqa: ARG002 - see Order
        """Return the numbers."""
        return numbers

    def refresh(self, queue: ReadyQueue, table: GraphTable, now: float) -> None:
        """Nothing changes with time."""


@dataclass(frozen=True)
class SlackOrder:
    """Least slack first; who cannot meet its objective any more goes after all who can.

    The key is the latest start: deadline less remaining work. It does not change while a subgraph waits, so the late
    are a prefix of the queue. Requests that have begun are not set back: their work would be lost to nobody's gain.

    Source: ours.
    """

    looks_at_work: bool = True

    def keys(self, numbers: Floats, deadline_s: Floats, remaining_s: Floats) -> Floats:  # noqa: ARG002 - see Order
        """Return the latest starts, in seconds."""
        return deadline_s - remaining_s

    def refresh(self, queue: ReadyQueue, table: GraphTable, now: float) -> None:
        """Set back who is late and has not begun."""
        late = int(np.searchsorted(queue.keys, now))
        if not late:
            return
        nodes: NDArray[np.int64] = queue.nodes[:late]
        begun = (table.steps[nodes] > 0) | (table.steps[table.request[nodes]] > 0)  # its first node is executed first
        places = np.flatnonzero(~begun & (table.running[table.subgraph[nodes]] == 0))
        moved = nodes[places].copy()
        keys = queue.keys[places] + _LATE
        queue.drop(places)
        table.key[table.subgraph[moved]] = keys
        queue.push(moved, keys)


ORDERS: Mapping[str, Callable[[], Order]] = {"arrival": ArrivalOrder, "slack": SlackOrder}
"""The orders by the names that options use."""
