"""Evicts what is cheapest to compute again and was not asked for longest: Pensieve's retention value.

Chunks form trees: each follows the chunk that its prefix ends with. Only a chunk that nothing resident follows may go,
since vLLM finds a prefix only up to its first missing chunk; so conversations shrink from their tails, and a prompt
that many share stays while any of them does. Among those tails the one with the least value goes:

    V = Cost(l) / T        Cost(l): time to compute the chunk again with l tokens before it
                           T: time since a request last used the chunk

Values change with time, and at different rates, so they can't be kept in order. But tails of about the same l have
about the same cost, and among those the order is that of last use. So tails are kept in classes of l, two to an octave,
oldest first; an eviction compares the oldest of each class: some twenty, however many conversations there are.

Source: Pensieve, section 4.3.1, where leading chunks go first and are computed again in the middle of a sequence.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from vllm_ext.config_kv import RETENTION

_CLASSES_PER_OCTAVE = 2
_LEAST_AGE_S = 1e-6
_LEAST_ENTRIES = 64
_LINEAR_TOKENS = 8192.0
"""Context at which attention costs as much as everything else, where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Link:
    """Where a chunk stands in its prefix."""

    end: int
    """Tokens up to the chunk's end."""
    before: OffloadKey | None
    """The chunk that it follows; None: the first one."""


@dataclass(frozen=True)
class Chain:
    """A request's chunks in order, set as state of its context by the connector.

    Args:
        keys: By group of layers: the chunks, a list that grows as the request does.
        chunk_tokens: By group of layers: tokens of a chunk.
    """

    keys: Mapping[int, Sequence[OffloadKey]]
    chunk_tokens: Mapping[int, int]

    def link(self, key: OffloadKey, req_context: ReqContext) -> Link | None:
        """Return a chunk's place; None if the request does not know it."""
        end, group = req_context.get_offload_key_position(key), get_offload_group_idx(key)
        if end is None or group not in self.keys:
            return None
        number = end // self.chunk_tokens[group] - 1
        return Link(end, self.keys[group][number - 1] if number else None)


@dataclass(slots=True)
class _Node:
    chunk: ChunkStatus
    link: Link
    used_s: float


def default_cost(end: int) -> float:
    """Return the relative cost of a chunk that ends after so many tokens, where no runtime model says it."""
    return 1.0 + end / _LINEAR_TOKENS


class RetentionCachePolicy(CachePolicy):
    """The least retention value goes first.

    Attributes:
        clock: Returns the time, in seconds.
        cost: Cost of computing a chunk again, by the tokens up to its end; in any unit.
    """

    def __init__(self, cache_capacity: int) -> None:
        """Take vLLM's argument: the number of chunks."""
        super().__init__(cache_capacity)
        self.clock: Callable[[], float] = time.monotonic
        self.cost: Callable[[int], float] = default_cost
        self._nodes: dict[OffloadKey, _Node] = {}
        self._followers: dict[OffloadKey, set[OffloadKey]] = {}
        """By chunk, resident or not: the resident chunks that follow it."""
        self._tails: dict[int, list[tuple[float, OffloadKey]]] = {}
        """By class: when a tail was used, and which; entries that hold no more are passed over."""
        self._links: dict[OffloadKey, Link] = {}

    def announce(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note where chunks stand that will be inserted now, which `insert` is not told."""
        chain = req_context.get_state(Chain)
        known = ((key, chain.link(key, req_context)) for key in keys) if chain is not None else ()
        self._links = {key: link for key, link in known if link is not None}

    # --- vLLM's interface -------------------------------------------------------------------------------------------

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return a chunk; None if it is not there."""
        node = self._nodes.get(key)
        return None if node is None else node.chunk

    def insert(self, key: OffloadKey, chunk: ChunkStatus, *_: Any) -> None:
        """Add a chunk that is being stored."""
        self._add(key, _Node(chunk, self._links.get(key) or Link(1, None), self.clock()))

    def remove(self, key: OffloadKey) -> None:
        """Forget a chunk; those that follow it can't be found any more, and go next."""
        self._forget(key)
        for follower in self._followers.get(key, ()):
            self._nodes[follower].used_s = -math.inf
            self._push(follower)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note that a request used chunks."""
        now = self.clock()
        for key in keys:
            if (node := self._nodes.get(key)) is not None:
                node.used_s = now
                self._push(key)

    def mark_evictable(self, key: OffloadKey) -> None:
        """No copy uses a chunk any more."""
        self._push(key)

    def clear(self) -> None:
        """Forget everything."""
        self._nodes.clear()
        self._followers.clear()
        self._tails.clear()

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict exactly so many chunks, or none."""
        now = self.clock()
        chosen: list[tuple[OffloadKey, _Node]] = []
        aside: list[OffloadKey] = []
        while len(chosen) < n and (key := self._least(now)) is not None:
            if key in protected:
                aside.append(key)
                continue
            node = self._forget(key)
            chosen.append((key, node))
            if node.link.before is not None:
                self._push(node.link.before)
        enough = len(chosen) == n
        if not enough:
            for key, node in reversed(chosen):
                self._add(key, node)
            aside += [key for key, _ in chosen]
        for key in aside:
            self._push(key)
        return [(key, node.chunk) for key, node in chosen] if enough else None

    # --- tails ------------------------------------------------------------------------------------------------------

    def _is_tail(self, key: OffloadKey) -> bool:
        node = self._nodes.get(key)
        return node is not None and node.chunk.ref_cnt == 0 and not self._followers.get(key)

    def _push(self, key: OffloadKey) -> None:
        if self._is_tail(key):
            node = self._nodes[key]
            number = _class_of(node.link.end)
            heap = self._tails.setdefault(number, [])
            heapq.heappush(heap, (node.used_s, key))
            if len(heap) > 2 * len(self._nodes) + _LEAST_ENTRIES:
                heap[:] = sorted({entry for entry in heap if self._holds(entry)})

    def _least(self, now: float) -> OffloadKey | None:
        """Take the tail of least value out of its class; None if there is none."""
        best: tuple[float, int] | None = None
        for number, used_s in self._oldest():
            value = self.cost(_middle_of(number)) / max(now - used_s, _LEAST_AGE_S)
            if best is None or value < best[0]:
                best = value, number
        return None if best is None else heapq.heappop(self._tails[best[1]])[1]

    def _oldest(self) -> Iterator[tuple[int, float]]:
        """Yield each class that has a tail, and when its oldest was used."""
        for number in list(self._tails):
            heap = self._tails[number]
            while heap and not self._holds(heap[0]):
                heapq.heappop(heap)
            if heap:
                yield number, heap[0][0]
            else:
                del self._tails[number]

    def _holds(self, entry: tuple[float, OffloadKey]) -> bool:
        used_s, key = entry
        return self._is_tail(key) and self._nodes[key].used_s == used_s

    def _add(self, key: OffloadKey, node: _Node) -> None:
        self._nodes[key] = node
        if node.link.before is not None:
            self._followers.setdefault(node.link.before, set()).add(key)

    def _forget(self, key: OffloadKey) -> _Node:
        node = self._nodes.pop(key)
        before = node.link.before
        if before is not None and (followers := self._followers.get(before)) is not None:
            followers.discard(key)
            if not followers:
                del self._followers[before]
        return node


def _class_of(end: int) -> int:
    return int(_CLASSES_PER_OCTAVE * math.log2(max(end, 1)))


def _middle_of(number: int) -> int:
    return int(2 ** ((number + 0.5) / _CLASSES_PER_OCTAVE))


CachePolicyFactory.register_cache_policy(RETENTION, __name__, RetentionCachePolicy.__name__)
