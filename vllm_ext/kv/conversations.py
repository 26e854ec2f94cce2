"""Conversations, and which request belongs to which.

A client names its conversation (vLLM's ``session_id`` or our hint ``conversation_id``); a request that names none
belongs to the conversation whose last turn its prompt begins with, else to a new one. Nothing here decides whether KV
may be reused: chunks are found by the hashes of their tokens alone (invariant 5). A conversation says how valuable its
chunks are, how long they may stay, and which of them go together when an administrator looks.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_ext.kv.returns import ReturnModel

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey

_MOST_KNOWN = 65536
"""Conversations remembered at most; those that hold nothing and were not used longest are forgotten."""


@dataclass(slots=True, eq=False)
class Conversation:
    """One conversation of one tenant. Times are of the scheduler's clock, in seconds."""

    name: str
    """As the client named it; made up where it did not."""
    salt: str
    """``cache_salt`` of its requests: the same name under another salt is another conversation."""
    named: bool = True
    turns: int = 0
    """Requests of it that ended."""
    running: int = 0
    """Requests of it that did not."""
    last_used_s: float = 0.0
    pinned: bool = False
    """Whether its chunks stay, however little they are worth."""
    ttl_s: float = math.inf
    """How long after its last use its chunks are dropped."""
    watched_s: float = math.inf
    """When somebody looks whether its time is over."""
    keys: set[OffloadKey] = field(default_factory=set)
    """Chunks in the tier that it was the last to use."""
    tail: OffloadKey | None = None
    """The last chunk of its last turn, whether it is still there or not."""

    @property
    def expires_s(self) -> float:
        """When its chunks are dropped, if it is not used before."""
        return self.last_used_s + self.ttl_s


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's place in a conversation, carried to the eviction policy as state of its context."""

    conversation: Conversation


class ConversationBook:
    """All conversations that are known.

    Args:
        ttl_s: How long after its last use a conversation's chunks are dropped, unless its client says so.
    """

    def __init__(self, ttl_s: float = math.inf) -> None:
        self.returns = ReturnModel()
        self._ttl_s = ttl_s
        self._known: OrderedDict[tuple[str, str], Conversation] = OrderedDict()
        self._by_tail: dict[OffloadKey, Conversation] = {}
        self._expiry: list[tuple[float, int, Conversation]] = []
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Conversation]:
        """Yield the conversations, the one used last at the end."""
        return iter(self._known.values())

    def find(self, name: str, salt: str | None = None) -> list[Conversation]:
        """Return the conversations of a name, of one salt or of all."""
        return [c for c in self._known.values() if c.name == name and salt in (None, c.salt)]

    def enter(
        self,
        name: str | None,
        salt: str,
        keys: Sequence[OffloadKey],
        now: float,
        *,
        ttl_s: float | None = None,
    ) -> Conversation:
        """Return the conversation of a new request.

        Args:
            name: As the client calls it; None: the one whose last turn the prompt begins with, or a new one.
            salt: Of the request.
            keys: Chunks of the prompt, in order.
            now: Clock time, s.
            ttl_s: How long after its last use the client wants its chunks dropped; None leaves that as it is.
        """
        conversation = self._named(name, salt) if name is not None else self._inferred(salt, keys)
        if conversation.turns and not conversation.running:
            self.returns.returned(conversation.turns, now - conversation.last_used_s)
        conversation.running += 1
        conversation.last_used_s = now
        if ttl_s is not None:
            conversation.ttl_s = ttl_s
        self._known.move_to_end((salt, conversation.name))
        self._forget_some()
        return conversation

    def leave(self, conversation: Conversation, keys: Sequence[OffloadKey], now: float) -> None:
        """Note that a request of a conversation ended.

        Args:
            keys: All its chunks, in order.
        """
        conversation.running -= 1
        conversation.turns += 1
        conversation.last_used_s = now
        self.returns.ended(conversation.turns)
        if keys:
            self._forget_tail(conversation)
            conversation.tail = keys[-1]
            self._by_tail[keys[-1]] = conversation
        self._watch(conversation)

    def expired(self, now: float) -> Iterator[Conversation]:
        """Yield, once, conversations whose chunks are to be dropped since nobody used them for long enough."""
        while self._expiry and self._expiry[0][0] <= now:
            looked_s, _, conversation = heapq.heappop(self._expiry)
            if looked_s != conversation.watched_s:
                continue  # it was to be dropped earlier since
            conversation.watched_s = math.inf
            if conversation.running:
                continue  # it is watched again when it ends
            if conversation.expires_s <= now:
                yield conversation
            else:
                self._watch(conversation)

    def _watch(self, conversation: Conversation) -> None:
        if conversation.expires_s < conversation.watched_s:
            conversation.watched_s = conversation.expires_s
            self._numbers += 1
            heapq.heappush(self._expiry, (conversation.expires_s, self._numbers, conversation))

    def _named(self, name: str, salt: str) -> Conversation:
        known = self._known.get((salt, name))
        return self._add(name, salt, named=True) if known is None else known

    def _inferred(self, salt: str, keys: Sequence[OffloadKey]) -> Conversation:
        """Return the conversation whose last turn the chunks contain; the longest, where there are several."""
        for key in reversed(keys):
            found = self._by_tail.get(key)
            if found is not None and not found.named and found.salt == salt:
                return found
        self._numbers += 1
        return self._add(f"unnamed-{self._numbers}", salt, named=False)

    def _add(self, name: str, salt: str, *, named: bool) -> Conversation:
        made = Conversation(name, salt, named=named, ttl_s=self._ttl_s)
        self._known[salt, name] = made
        return made

    def _forget_some(self) -> None:
        """Forget the conversations that were not used longest, up to a few at a time."""
        for _ in range(4):
            if len(self._known) <= _MOST_KNOWN:
                return
            place, oldest = next(iter(self._known.items()))
            if oldest.running or oldest.keys:
                self._known.move_to_end(place)
            else:
                del self._known[place]
                self._forget_tail(oldest)

    def _forget_tail(self, conversation: Conversation) -> None:
        if conversation.tail is not None and self._by_tail.get(conversation.tail) is conversation:
            del self._by_tail[conversation.tail]
