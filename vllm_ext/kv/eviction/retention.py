"""Evicts what is cheapest to compute again and was not asked for longest: Pensieve's retention value.

Chunks form trees: each follows the chunk that its prefix ends with. Only a chunk that nothing resident follows may go,
since vLLM finds a prefix only up to its first missing chunk; so conversations shrink from their tails, and a prompt
that many share stays while any of them does. Among those tails the one with the least value goes:

    V = Cost(l) * r(n, T)     Cost(l): time to compute the chunk again with l tokens before it
                              T: time since a request last used the chunk
                              r: rate at which conversations of n turns come back after such a time: 1 / T; or the
                                 share that comes back after n turns, over T

Values change with time, and at different rates, so they can't be kept in order. But tails of about the same l and n
have about the same Cost and one r, and among those the order is that of last use. So tails are kept in
classes, oldest first; an eviction compares the oldest of each class: some eighty, however many conversations there
are, and however many chunks it takes.

Source: Pensieve, section 4.3.1: Cost / T, where leading chunks go first and are computed again in the middle of a
sequence; its text has the probability of a return after n turns in it as well. Rates learned by turns and time were
tried, and found within half a point of the hit rate of 1 / T. Without r and Cost what is left is the least recently
used tail: policy ``tail``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from vllm_ext.config.kv_tier import LEADING, RETENTION, TAIL
from vllm_ext.kv.conversations.conversation import Conversation, Turn
from vllm_ext.kv.conversations.returns import by_age, turn_class
from vllm_ext.kv.eviction.owners import Owners
from vllm_ext.kv.eviction.quotas import SaltQuotas
from vllm_ext.kv.eviction.tails import Tails
from vllm_ext.kv.eviction.worth import LINEAR_TOKENS, ClassCosts, class_of

Evicted = list[tuple[OffloadKey, ChunkStatus]]
_Entry = tuple[int, OffloadKey]
"""A chunk with the tokens up to its end: of those used at the same time the first one in its sequence goes first."""


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


@dataclass(frozen=True, slots=True)
class LastUse:
    """When chunks were used last that are copied after their request has left: state of the copy's context.

    A copy is no use: without it a chunk that nobody has wanted for minutes would seem to be wanted when it is copied.
    """

    times: Mapping[OffloadKey, float]
    """By chunk; clock time, s."""


@dataclass(slots=True)
class _Node:
    chunk: ChunkStatus
    link: Link
    used_s: float
    conversation: Conversation | None
    others: tuple[Conversation, ...] = ()


def default_cost(end: int) -> float:
    """Return the relative cost of a chunk that ends after so many tokens, where no runtime model says it."""
    return 1.0 + end / LINEAR_TOKENS


class RetentionCachePolicy(CachePolicy):
    """The least retention value goes first.

    Attributes:
        clock: Returns the time, in seconds.
        cost: Cost of computing a chunk again, by the tokens up to its end; in any unit.
        return_rate: At which rate conversations come back, by class of turns and time since the last one.
        quotas: Of each ``cache_salt``.
        owners: Whose the chunks are.
    """

    def __init__(self, cache_capacity: int) -> None:
        """Take vLLM's argument: the number of chunks."""
        super().__init__(cache_capacity)
        self.clock: Callable[[], float] = time.monotonic
        self._costs = ClassCosts(default_cost)
        self.return_rate: Callable[[int, float], float] = by_age
        self._nodes: dict[OffloadKey, _Node] = {}
        self._followers: dict[OffloadKey, set[OffloadKey]] = {}
        """By chunk, resident or not: the resident chunks that follow it."""
        self._tails: Tails[tuple[int, int], _Entry] = Tails(self._used_s)
        self.quotas: SaltQuotas[_Entry] = SaltQuotas(self._used_s, self._salt_tag)
        self.owners = Owners(self.quotas)
        self._announced: tuple[dict[OffloadKey, Link], Conversation | None, Mapping[OffloadKey, float]] = ({}, None, {})

    @property
    def cost(self) -> Callable[[int], float]:
        """What a chunk costs to compute again."""
        return self._costs.cost

    @cost.setter
    def cost(self, cost: Callable[[int], float]) -> None:
        self._costs = ClassCosts(cost)

    def announce(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note where chunks stand, whose they are and when they were used, that will be inserted now.

        `insert` is not told.
        """
        chain, turn = req_context.get_state(Chain), req_context.get_state(Turn)
        known = ((key, chain.link(key, req_context)) for key in keys) if chain is not None else ()
        links = {key: link for key, link in known if link is not None}
        self._announced = (links, None if turn is None else turn.conversation, _times(req_context))

    # --- vLLM's interface -------------------------------------------------------------------------------------------

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return a chunk; None if it is not there."""
        node = self._nodes.get(key)
        return None if node is None else node.chunk

    def insert(self, key: OffloadKey, chunk: ChunkStatus, *_: Any) -> None:
        """Add a chunk that is being stored."""
        (links, conversation, times), now = self._announced, self.clock()
        self._add(key, _Node(chunk, links.get(key) or Link(1, None), times.get(key, now), conversation))

    def remove(self, key: OffloadKey) -> None:
        """Forget a chunk; those that follow it can't be found any more, and go next."""
        before = self._forget(key).link.before
        if before is not None:
            self._push(before)
        for follower in self._followers.get(key, ()):
            self._nodes[follower].used_s = -math.inf
            self._push(follower)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note that a request used chunks, or when one had that is gone: they belong to its conversation now."""
        now, turn, times = self.clock(), req_context.get_state(Turn), _times(req_context)
        kept_tokens = math.inf if turn is None else turn.kept_tokens
        for key in keys:
            if (node := self._nodes.get(key)) is not None and node.link.end <= kept_tokens:
                node.used_s = max(node.used_s, times.get(key, now))
                if turn is not None and node.conversation is not turn.conversation:
                    self.owners.use(key, node, turn.conversation)
                self._push(key)

    def mark_evictable(self, key: OffloadKey) -> None:
        """No copy uses a chunk any more."""
        self._push(key)

    def clear(self) -> None:
        """Forget everything."""
        for key, node in self._nodes.items():
            self.owners.leave(key, node)
        self._nodes.clear()
        self._followers.clear()
        self._tails.clear()
        self.quotas.clear()

    def evict(self, n: int, protected: set[OffloadKey]) -> Evicted | None:
        """Evict exactly so many chunks, or none."""
        return self._evict(self._tails.take(self._value_at(self.clock())), n, protected)

    # --- beyond vLLM's interface ------------------------------------------------------------------------------------

    def evict_of(self, ends: Tails[int, _Entry] | None, n: int, protected: set[OffloadKey]) -> Evicted | None:
        """Evict exactly so many chunks of some salts, the least recently used tails first, or none.

        Args:
            ends: What `Quotas` has of these salts.
        """
        return None if ends is None else self._evict(ends.take(_by_age), n, protected)

    def take(self, conversation: Conversation) -> Evicted:
        """Forget the chunks of a conversation but those that others own, that copies use, or that others' follow."""
        taken: Evicted = []
        for key in sorted(conversation.keys, key=lambda key: self._nodes[key].link.end, reverse=True):
            node = self._nodes[key]
            if self.owners.let_go(key, node, conversation):
                self._push(key)
            elif node.chunk.ref_cnt == 0 and not self._must_follow(key):
                self._forget(key)
                taken.append((key, node.chunk))
                if node.link.before is not None:
                    self._push(node.link.before)
            else:
                node.used_s = -math.inf
                self._push(key)
        return taken

    def let_go(self, branch: OffloadKey, conversation: Conversation) -> None:
        """Let those chunks go first, from one on, that only one conversation owns, and that it won't ask for again."""
        branches = [branch]
        while branches:
            key = branches.pop()
            branches += self._followers.get(key, ())
            node = self._nodes.get(key)
            if node is not None and node.conversation is conversation and not node.others:
                node.used_s = -math.inf
                self._push(key)

    # --- tails ------------------------------------------------------------------------------------------------------

    def _evict(self, least: Generator[_Entry, None, None], n: int, protected: set[OffloadKey]) -> Evicted | None:
        chosen: list[tuple[OffloadKey, _Node]] = []
        aside: list[OffloadKey] = []
        while len(chosen) < n and (entry := next(least, None)) is not None:
            _, key = entry
            if key in protected:
                aside.append(key)
                continue
            node = self._forget(key)
            chosen.append((key, node))
            if node.link.before is not None:
                self._push(node.link.before)
        least.close()  # nothing takes part any more that is pushed from here on
        enough = len(chosen) == n
        if not enough:
            for key, node in reversed(chosen):
                self._add(key, node)
            aside += [key for key, _ in chosen]
        for key in aside:
            self._push(key)
        return [(key, node.chunk) for key, node in chosen] if enough else None

    def _used_s(self, entry: _Entry) -> float | None:
        """Return when a tail was used; None if the chunk is no tail, or may not go."""
        _, key = entry
        node = self._nodes.get(key)
        if node is None or node.chunk.ref_cnt or self._must_follow(key):
            return None
        return node.used_s

    def _salt_tag(self, entry: _Entry) -> str:
        conversation = self._nodes[entry[1]].conversation
        return "" if conversation is None else conversation.salt_tag

    def _must_follow(self, key: OffloadKey) -> bool:
        """Whether resident chunks that follow a chunk would be lost with it."""
        return bool(self._followers.get(key))

    def _push(self, key: OffloadKey) -> None:
        node = self._nodes.get(key)
        if node is None:
            return
        conversation = node.conversation
        turns = 0 if conversation is None else turn_class(conversation.turns)
        entry = node.link.end, key
        self._tails.push((class_of(node.link.end), turns), entry, len(self._nodes))
        if conversation is not None:
            self.quotas.push(conversation.salt_tag, entry)

    def _value_at(self, now: float) -> Callable[[tuple[int, int], float], float]:
        """Return what the tails of a class are worth that were used at a time."""
        of, rate = self._costs.of, self.return_rate
        return lambda number, used_s: of(number[0]) * rate(number[1], now - used_s)

    def _add(self, key: OffloadKey, node: _Node) -> None:
        self._nodes[key] = node
        if node.link.before is not None:
            self._followers.setdefault(node.link.before, set()).add(key)
        self.owners.enter(key, node)

    def _forget(self, key: OffloadKey) -> _Node:
        node = self._nodes.pop(key)
        self.owners.leave(key, node)
        before = node.link.before
        if before is not None and (followers := self._followers.get(before)) is not None:
            followers.discard(key)
            if not followers:
                del self._followers[before]
        return node


class TailCachePolicy(RetentionCachePolicy):
    """The tail that was not used longest goes first, whatever it costs to compute again."""

    def _value_at(self, now: float) -> Callable[[tuple[int, int], float], float]:  # noqa: ARG002 - as above
        return _by_age


class LeadingCachePolicy(RetentionCachePolicy):
    """Any chunk of least retention value goes: the leading one of a conversation, which is the cheapest to lose.

    Only where gaps are crossed; what many share stays since it is used more often (Pensieve, section 4.3.1).
    """

    def remove(self, key: OffloadKey) -> None:
        """Forget a chunk; those that follow it are found without it."""
        self._forget(key)

    def _must_follow(self, key: OffloadKey) -> bool:  # noqa: ARG002 - as above
        return False


def _times(req_context: ReqContext) -> Mapping[OffloadKey, float]:
    last = req_context.get_state(LastUse)
    return {} if last is None else last.times


def _by_age(_: Any, used_s: float) -> float:
    return used_s


for _name, _policy in ((RETENTION, RetentionCachePolicy), (TAIL, TailCachePolicy), (LEADING, LeadingCachePolicy)):
    CachePolicyFactory.register_cache_policy(_name, __name__, _policy.__name__)
