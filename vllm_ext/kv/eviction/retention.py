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
are.

Source: Pensieve, section 4.3.1: Cost / T, where leading chunks go first and are computed again in the middle of a
sequence; its text has the probability of a return after n turns in it as well. Rates learned by turns and time were
tried, and found within half a point of the hit rate of 1 / T. Without r and Cost what is left is the least recently
used tail: policy ``tail``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from vllm_ext.config.kv_tier import LEADING, RETENTION, TAIL
from vllm_ext.kv.conversations.conversation import Conversation, Turn
from vllm_ext.kv.conversations.returns import by_age, turn_class
from vllm_ext.kv.eviction.quotas import SaltQuotas
from vllm_ext.kv.eviction.tails import Tails
from vllm_ext.kv.eviction.worth import LINEAR_TOKENS, ClassCosts, class_of

Evicted = list[tuple[OffloadKey, ChunkStatus]]
_MOST_OWNERS = 4
"""Remembered for a chunk; of more, those whose lives end last. A prompt that all share would else be as many entries
as there are conversations, times its length."""


@dataclass(frozen=True)
class Chain:
    """A request's chunks in order, set as state of its context by the connector.

    Args:
        keys: By group of layers: the chunks, a list that grows as the request does.
        chunk_tokens: By group of layers: tokens of a chunk.
    """

    keys: Mapping[int, Sequence[OffloadKey]]
    chunk_tokens: Mapping[int, int]

    def place(self, key: OffloadKey, req_context: ReqContext) -> tuple[int, OffloadKey | None]:
        """Return the tokens up to a chunk's end, and the chunk that it follows; (1, None) if nobody knows."""
        end, group = req_context.get_offload_key_position(key), get_offload_group_idx(key)
        if end is None or group not in self.keys:
            return 1, None
        number = end // self.chunk_tokens[group] - 1
        return end, self.keys[group][number - 1] if number else None


@dataclass(frozen=True, slots=True)
class LastUse:
    """When chunks were used last that are copied after their request has left: state of the copy's context.

    A copy is no use: without it a chunk that nobody has wanted for minutes would seem to be wanted when it is copied.
    """

    times: Mapping[OffloadKey, float]
    """By chunk; clock time, s."""


@dataclass(slots=True)
class _Node:
    """A resident chunk."""

    chunk: ChunkStatus
    end: int
    """Tokens up to its end."""
    before: OffloadKey | None
    """The chunk that it follows; None: the first one."""
    used_s: float
    owners: tuple[Conversation, ...]
    """Conversations that used it, of which any keeps it; it counts for the salt of the last one, who used it last."""


def default_cost(end: int) -> float:
    """Return the relative cost of a chunk that ends after so many tokens, where no runtime model says it."""
    return 1.0 + end / LINEAR_TOKENS


class RetentionCachePolicy(CachePolicy):
    """The least retention value goes first.

    Attributes:
        clock: Returns the time, in seconds.
        costs: Of computing a chunk again, in any unit.
        return_rate: At which rate conversations come back, by class of turns and time since the last one.
        quotas: Of each ``cache_salt``.
    """

    def __init__(self, cache_capacity: int) -> None:
        """Take vLLM's argument: the number of chunks."""
        super().__init__(cache_capacity)
        self.clock: Callable[[], float] = time.monotonic
        self.costs = ClassCosts(default_cost)
        self.return_rate: Callable[[int, float], float] = by_age
        self._nodes: dict[OffloadKey, _Node] = {}
        self._followers: dict[OffloadKey, set[OffloadKey]] = {}
        """By chunk, resident or not: the resident chunks that follow it."""
        self._tails = Tails(self._used_s)
        self.quotas = SaltQuotas(self._used_s, lambda key: self._nodes[key].owners[-1].salt_tag)
        self._storing = ReqContext(req_id="")

    def announce(self, req_context: ReqContext) -> None:
        """Note whose chunks will be inserted now: `insert` is not told."""
        self._storing = req_context

    # --- vLLM's interface -------------------------------------------------------------------------------------------

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return a chunk; None if it is not there."""
        node = self._nodes.get(key)
        return None if node is None else node.chunk

    def insert(self, key: OffloadKey, chunk: ChunkStatus, *_: Any) -> None:
        """Add a chunk that is being stored."""
        chain, turn = self._storing.get_state(Chain), self._storing.get_state(Turn)
        end, before = (1, None) if chain is None else chain.place(key, self._storing)
        used_s = _times(self._storing).get(key, self.clock())
        self._add(key, _Node(chunk, end, before, used_s, () if turn is None else (turn.conversation,)))

    def remove(self, key: OffloadKey) -> None:
        """Forget a chunk; those that follow it can't be found any more, and go next."""
        self._forget(key)
        for follower in self._followers.get(key, ()):
            self._go_first(follower)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note that a request used chunks, or when one had that is gone: they belong to its conversation now."""
        now, turn, times = self.clock(), req_context.get_state(Turn), _times(req_context)
        kept_tokens = math.inf if turn is None else turn.kept_tokens
        for key in keys:
            if (node := self._nodes.get(key)) is not None and node.end <= kept_tokens:
                node.used_s = max(node.used_s, times.get(key, now))
                if turn is not None and node.owners[-1:] != (turn.conversation,):
                    self._used_by(key, node, turn.conversation)
                self._push(key)

    def mark_evictable(self, key: OffloadKey) -> None:
        """No copy uses a chunk any more."""
        self._push(key)

    def clear(self) -> None:
        """Forget everything."""
        for key, node in self._nodes.items():
            self._book(key, node.owners, ())
        self._nodes.clear()
        self._followers.clear()
        self._tails.clear()
        self.quotas.ends_of_new.clear()

    def evict(self, n: int, protected: set[OffloadKey]) -> Evicted | None:
        """Evict exactly so many chunks, or none."""
        return self._evict(self._tails.take(self._value_at(self.clock())), n, protected)

    # --- beyond vLLM's interface ------------------------------------------------------------------------------------

    def evict_of(self, ends: Tails | None, n: int, protected: set[OffloadKey]) -> Evicted | None:
        """Evict exactly so many chunks of some salts, the least recently used tails first, or none.

        Args:
            ends: What `SaltQuotas` has of these salts.
        """
        return None if ends is None else self._evict(ends.take(_by_age), n, protected)

    def take(self, conversation: Conversation) -> Evicted:
        """Forget the chunks of a conversation but those that others own, that copies use, or that others' follow."""
        taken: Evicted = []
        for key in sorted(conversation.keys, key=lambda key: self._nodes[key].end, reverse=True):
            node = self._nodes[key]
            if len(node.owners) > 1:
                self._change_owners(key, node, tuple(owner for owner in node.owners if owner is not conversation))
                self._push(key)
            elif node.chunk.ref_cnt == 0 and not self._must_follow(key):
                self._forget(key)
                taken.append((key, node.chunk))
            else:
                self._go_first(key)
        return taken

    def let_go(self, branch: OffloadKey, conversation: Conversation) -> None:
        """Let those chunks go first, from one on, that only one conversation owns, and that it won't ask for again."""
        branches = [branch]
        while branches:
            key = branches.pop()
            branches += self._followers.get(key, ())
            node = self._nodes.get(key)
            if node is not None and node.owners == (conversation,):
                self._go_first(key)

    # --- tails ------------------------------------------------------------------------------------------------------

    def _evict(self, least: Iterator[OffloadKey], n: int, protected: set[OffloadKey]) -> Evicted | None:
        chosen: list[tuple[OffloadKey, _Node]] = []
        aside: list[OffloadKey] = []
        while len(chosen) < n and (key := next(least, None)) is not None:
            if key in protected:
                aside.append(key)
            else:
                chosen.append((key, self._forget(key)))
        enough = len(chosen) == n
        if not enough:
            for key, node in reversed(chosen):
                self._add(key, node)
            aside += [key for key, _ in chosen]
        for key in aside:
            self._push(key)
        return [(key, node.chunk) for key, node in chosen] if enough else None

    def _used_s(self, key: OffloadKey) -> float | None:
        """Return when a tail was used; None if the chunk is no tail, or may not go."""
        node = self._nodes.get(key)
        return None if node is None or node.chunk.ref_cnt or self._must_follow(key) else node.used_s

    def _must_follow(self, key: OffloadKey) -> bool:
        """Whether resident chunks that follow a chunk would be lost with it."""
        return key in self._followers

    def _go_first(self, key: OffloadKey) -> None:
        self._nodes[key].used_s = -math.inf
        self._push(key)

    def _push(self, key: OffloadKey) -> None:
        node = self._nodes[key]
        turns = turn_class(node.owners[-1].turns) if node.owners else 0
        self._tails.push((class_of(node.end), turns), key, node.end, len(self._nodes))
        if node.owners:
            self.quotas.push(node.owners[-1].salt_tag, key, node.end)

    def _value_at(self, now: float) -> Callable[[tuple[int, int], float], float]:
        """Return what the tails of a class are worth that were used at a time."""
        of, rate = self.costs.of, self.return_rate
        return lambda number, used_s: of(number[0]) * rate(number[1], now - used_s)

    def _add(self, key: OffloadKey, node: _Node) -> None:
        self._nodes[key] = node
        if node.before is not None:
            self._followers.setdefault(node.before, set()).add(key)
        self._book(key, (), node.owners)

    def _forget(self, key: OffloadKey) -> _Node:
        """Forget a chunk, and let the one that it follows be a tail; return it with its owners, should it come back."""
        node = self._nodes.pop(key)
        self._book(key, node.owners, ())
        if node.before is not None:
            followers = self._followers[node.before]
            followers.discard(key)
            if not followers:
                del self._followers[node.before]
            if node.before in self._nodes:
                self._push(node.before)
        return node

    def _used_by(self, key: OffloadKey, node: _Node, conversation: Conversation) -> None:
        others = [owner for owner in node.owners if owner is not conversation]
        if len(others) == _MOST_OWNERS:
            others.remove(min(others, key=lambda c: (c.running > 0, c.expires_s, c.last_used_s)))
        self._change_owners(key, node, (*others, conversation))

    def _change_owners(self, key: OffloadKey, node: _Node, owners: tuple[Conversation, ...]) -> None:
        self._book(key, node.owners, owners)
        node.owners = owners

    def _book(self, key: OffloadKey, before: tuple[Conversation, ...], owners: tuple[Conversation, ...]) -> None:
        """Tell the owners of a chunk, and the quotas, that it is no more those', but these'."""
        for owner in before:
            owner.disown(key)
        for owner in owners:
            owner.own(key)
        for owner in owners[-1:]:  # first, since a salt without chunks is forgotten
            self.quotas.add(owner.salt_tag, 1)
        for owner in before[-1:]:
            self.quotas.add(owner.salt_tag, -1)


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
