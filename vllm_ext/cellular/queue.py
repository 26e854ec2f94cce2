"""Ready nodes of one cell in the order of service, as arrays: the cost of a task does not depend on how many wait."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_FIRST_CAPACITY = 256


class ReadyQueue:
    """Nodes by increasing key, first in first out among equal keys. The front is where nodes come and go."""

    def __init__(self) -> None:
        self._keys = np.empty(_FIRST_CAPACITY)
        self._nodes = np.empty(_FIRST_CAPACITY, np.int64)
        self._head = self._tail = _FIRST_CAPACITY // 2

    def __len__(self) -> int:
        return self._tail - self._head

    @property
    def nodes(self) -> Ints:
        """All nodes in order; a view, valid until the next change."""
        return self._nodes[self._head : self._tail]

    @property
    def keys(self) -> NDArray[np.float64]:
        """Their keys; a view, too."""
        return self._keys[self._head : self._tail]

    def push(self, nodes: Ints, keys: NDArray[np.float64]) -> None:
        """Add nodes behind those of equal key."""
        count = len(nodes)
        if not count:
            return
        if len(self) and keys.min() < self._keys[self._tail - 1]:
            self._merge(nodes, keys)
            return
        if self._tail + count > len(self._nodes):
            self._make_room(0, count)
        if count > 1:
            ordered = np.argsort(keys, kind="stable")
            nodes, keys = nodes[ordered], keys[ordered]
        self._nodes[self._tail : self._tail + count] = nodes
        self._keys[self._tail : self._tail + count] = keys
        self._tail += count

    def push_one(self, node: int, key: float) -> None:
        """Add a node behind those of equal key."""
        if self._tail == len(self._nodes) or (len(self) and key < self._keys[self._tail - 1]):
            self.push(np.array([node]), np.array([key]))
            return
        self._nodes[self._tail], self._keys[self._tail] = node, key
        self._tail += 1

    def first(self, limit: int, allowed: Callable[[Ints], NDArray[np.bool_]]) -> Ints:
        """Return places, from 0 on, of the first nodes that are allowed, at most ``limit``."""
        found: list[Ints] = []
        start, count, width = 0, 0, 2 * limit
        while start < len(self) and count < limit:
            places = np.flatnonzero(allowed(self.nodes[start : start + width]))[: limit - count] + start
            found.append(places)
            count += len(places)
            start += width
            width *= 2
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def drop(self, places: Ints) -> None:
        """Remove the nodes at these places, which are in order."""
        if not len(places):
            return
        end = int(places[-1]) + 1
        if end == len(places):
            self._head += end
            return
        stays = np.ones(end, bool)
        stays[places] = False
        begin = self._head + len(places)
        for values in (self._nodes, self._keys):
            values[begin : self._head + end] = values[self._head : self._head + end][stays]
        self._head = begin

    def remove(self, nodes: Ints, keys: NDArray[np.float64]) -> None:
        """Remove those of these nodes, with the keys they were added with, that are here."""
        if not len(nodes) or not len(self):
            return
        places = np.minimum(np.searchsorted(self.keys, keys), len(self) - 1)
        here = self.nodes[places] == nodes
        if not here.all():  # equal keys, or gone
            others = np.flatnonzero(np.isin(self.nodes, nodes[~here]))
            places = np.concatenate((places[here], others))
        self.drop(np.unique(places))

    def _merge(self, nodes: Ints, keys: NDArray[np.float64]) -> None:
        """Insert in the middle: what lies before moves towards the head, what lies behind stays."""
        count = len(nodes)
        if self._head < count:
            self._make_room(count, 0)
        ordered = np.argsort(keys, kind="stable")
        nodes, keys = nodes[ordered], keys[ordered]
        places = np.searchsorted(self.keys, keys, side="right")
        end = int(places[-1])
        for values, new in ((self._nodes, nodes), (self._keys, keys)):
            values[self._head - count : self._head + end] = np.insert(
                values[self._head : self._head + end], places, new
            )
        self._head -= count

    def _make_room(self, before: int, behind: int) -> None:
        capacity = max(2 * (len(self) + before + behind), _FIRST_CAPACITY)
        head = (capacity - len(self)) // 2 + (before - behind) // 4
        for name in ("_nodes", "_keys"):
            old = getattr(self, name)
            new = np.empty(capacity, old.dtype)
            new[head : head + len(self)] = old[self._head : self._tail]
            setattr(self, name, new)
        self._head, self._tail = head, head + len(self)
