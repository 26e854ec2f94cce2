"""Conversations, and which request belongs to which.

A client names its conversation (vLLM's ``session_id`` or our hint ``conversation_id``); a request that names none
belongs to the anonymous conversation whose last turn its prompt begins with, or goes on from without what the model
thought (`endings`), else to a new one. No name refers to an anonymous one. Nothing here decides whether KV may
be reused: chunks are found by the hashes of their tokens alone (invariant 5). A conversation says how valuable its
chunks are, how long they may stay, and which of them go together.
"""

from __future__ import annotations

import heapq
import math
import secrets
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_ext.hints import salt_tag
from vllm_ext.kv.conversations.endings import Ending, Endings
from vllm_ext.kv.conversations.returns import ReturnModel

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey

_MOST_KNOWN = 65536
"""Conversations remembered at most; those that hold nothing and were not used longest are forgotten."""
_LEAST_WATCHED = 64
"""Entries up to which nobody looks for those that hold no more."""


@dataclass(slots=True)
class StateCounts:
    """How many conversations are in a state, counted as they change: nobody looks through all of them."""

    running: int = 0
    """Have requests that did not end."""
    kept: int = 0
    """Have none, and chunks in the tier."""
    recall: Callable[[Conversation], None] = lambda _: None
    """Called with a forgotten conversation of which a chunk is stored after all."""


@dataclass(slots=True, eq=False)
class Conversation:
    """One conversation of one tenant. Times are of the scheduler's clock, in seconds."""

    number: int
    """Of its kind in this engine; later ones have greater numbers."""
    name: str | None
    """As the client named it; None: it did not."""
    salt_tag: str
    """Stands for the ``cache_salt`` of its requests, "" where they have none: see `ConversationBook.salt_tag`. The same
    name under another salt is another conversation."""
    turns: int = 0
    """Turns of it that ended; requests of one that run side by side, as samples of one prompt do, are one turn."""
    running: int = 0
    """Requests of it that did not."""
    last_used_s: float = 0.0
    ttl_s: float = math.inf
    """How long after its last use its chunks are dropped; it never rises."""
    watched_s: float = math.inf
    """When somebody looks whether its time is over."""
    keys: set[OffloadKey] = field(default_factory=set)
    """Chunks in the tier that it owns, alone or with others; changed by `own` and `disown` only."""
    forked: bool = False
    """Whether requests of its last turn ran side by side."""
    known: bool = True
    """Whether it is in its book still."""
    counts: StateCounts = field(default_factory=StateCounts)
    """Of its book."""

    def begin(self) -> None:
        """Note that a request of it came."""
        self.forked = self.running > 0
        if not self.running:
            self.counts.running += 1
            self.counts.kept -= bool(self.keys)
        self.running += 1

    def end(self) -> None:
        """Note that a request of it ended."""
        self.running -= 1
        if not self.running:
            self.turns += 1
            self.counts.running -= 1
            self.counts.kept += bool(self.keys)

    def own(self, key: OffloadKey) -> None:
        """Add a chunk."""
        if not self.keys and not self.running:
            self.counts.kept += 1
        self.keys.add(key)
        if not self.known:
            self.counts.recall(self)

    def disown(self, key: OffloadKey) -> None:
        """Take a chunk out."""
        self.keys.remove(key)
        if not self.keys and not self.running:
            self.counts.kept -= 1

    @property
    def expires_s(self) -> float:
        """When its chunks are dropped, if it is not used before."""
        return self.last_used_s + self.ttl_s


@dataclass(slots=True)
class Turn:
    """A request's place in a conversation, carried to the eviction policy as state of its context."""

    conversation: Conversation
    origin: tuple[str, str] = ("", "")
    """Its LoRA adapter, "" for none, and `Conversation.salt_tag`."""
    prompt_tokens: int = 0
    prompt_chunks: int = 0
    """Whole chunks in the prompt."""
    prompts_only: bool = False
    """Whether what it generates is kept only until it ends, for preemptions: next turns won't ask for it."""
    kept_tokens: float = math.inf
    """Tokens from the first one on that are worth keeping; all, until it ended."""


class ConversationBook:
    """All conversations that are known.

    Args:
        ttl_s: How long after its last use a conversation's chunks are dropped, unless its client wants that earlier.
    """

    def __init__(self, ttl_s: float = math.inf) -> None:
        self.returns = ReturnModel()
        self.counts = StateCounts(recall=self._recall)
        self._ttl_s = ttl_s
        self._salt_key = secrets.token_bytes(16)
        self._known: OrderedDict[int, Conversation] = OrderedDict()
        """By number, those last that were used last, or hold chunks."""
        self._named: dict[str, dict[str, Conversation]] = {}
        """By name and tag of the salt."""
        self._ascending: list[int] = []
        """Their numbers, for listings that go on where they stopped."""
        self._endings: Endings[Conversation] = Endings()
        """Of the anonymous ones."""
        self._expiry: list[tuple[float, int, Conversation]] = []
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._known)

    def salt_tag(self, salt: str | None) -> str:
        """Return what stands for a ``cache_salt`` in this engine."""
        return salt_tag(salt, self._salt_key)

    def find(self, name: str) -> Mapping[str, Conversation]:
        """Return the conversations of a name, by `salt_tag`; anonymous ones have none."""
        return self._named.get(name, {})

    def get(self, number: int) -> Conversation | None:
        """Return the conversation of a number, if it is known."""
        return self._known.get(number)

    def after(self, number: int) -> Iterator[Conversation]:
        """Yield the conversations with greater numbers, in their order. Cost: that of those that are taken."""
        first = bisect_right(self._ascending, number)
        return (self._known[self._ascending[place]] for place in range(first, len(self._ascending)))

    def enter(
        self,
        name: str | None,
        salt_tag: str,
        keys: Sequence[OffloadKey],
        now: float,
        *,
        ttl_s: float | None = None,
        tokens: Sequence[int] | None = None,
    ) -> Conversation:
        """Return the conversation of a new request.

        Args:
            name: As the client calls it; None: the anonymous one whose last turn the prompt begins with, or a new one.
            salt_tag: Of the request's salt.
            keys: Chunks of the prompt, in order.
            now: Clock time, s.
            ttl_s: How long after its last use the client wants its chunks dropped, if that is earlier than was said
                before; None leaves that as it is.
            tokens: Of the prompt; None: they are not known.
        """
        known = self._endings.find(salt_tag, keys, tokens or ()) if name is None else self.find(name).get(salt_tag)
        conversation = known or self._add(name, salt_tag)
        if conversation.turns and not conversation.running:
            self.returns.returned(conversation.turns)
        conversation.begin()
        conversation.last_used_s = now
        if ttl_s is not None:
            conversation.ttl_s = min(conversation.ttl_s, ttl_s)
        self._known.move_to_end(conversation.number)
        self._forget_some()
        return conversation

    def leave(
        self, conversation: Conversation, keys: Sequence[OffloadKey], now: float, left: Ending | None = None
    ) -> None:
        """Note that a request of a conversation ended.

        Args:
            conversation: Whose it was.
            keys: All its chunks, in order.
            now: Clock time, s.
            left: How its next turn is known, if the template leaves out what was thought.
        """
        conversation.end()
        conversation.last_used_s = now
        if not conversation.running:
            self.returns.ended(conversation.turns)
        if keys and conversation.name is None:
            self._endings.add(conversation, keys[-1], left)
        self._watch(conversation)

    def expired(self, now: float, most: int) -> Iterator[Conversation]:
        """Yield, once, conversations whose chunks are to be dropped since nobody used them for long enough.

        Args:
            now: Clock time, s.
            most: Conversations looked at; a client may let thousands end at one moment.
        """
        for _ in range(most):
            if not self._expiry or self._expiry[0][0] > now:
                return
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
            if len(self._expiry) > 2 * len(self._known) + _LEAST_WATCHED:
                self._expiry = [entry for entry in self._expiry if entry[0] == entry[2].watched_s]
                heapq.heapify(self._expiry)

    def _add(self, name: str | None, salt_tag: str) -> Conversation:
        self._numbers += 1
        made = Conversation(self._numbers, name, salt_tag, ttl_s=self._ttl_s, counts=self.counts)
        self._know(made)
        return made

    def _recall(self, forgotten: Conversation) -> None:
        """Know a conversation again; its name may be another one's by now."""
        self._numbers += 1
        forgotten.number, forgotten.known = self._numbers, True
        if forgotten.name is not None and forgotten.salt_tag in self.find(forgotten.name):
            forgotten.name = None
        self._know(forgotten)
        self._watch(forgotten)

    def _know(self, conversation: Conversation) -> None:
        self._known[conversation.number] = conversation
        self._ascending.append(conversation.number)
        if conversation.name is not None:
            self._named.setdefault(conversation.name, {})[conversation.salt_tag] = conversation

    def _forget_some(self) -> None:
        """Forget the conversations that were not used longest, up to a few at a time."""
        for _ in range(4):
            if len(self._known) <= _MOST_KNOWN:
                return
            number, oldest = next(iter(self._known.items()))
            if oldest.running or oldest.keys:
                self._known.move_to_end(number)
            else:
                self._forget(oldest)

    def _forget(self, conversation: Conversation) -> None:
        del self._known[conversation.number]
        conversation.known, conversation.watched_s = False, math.inf
        del self._ascending[bisect_left(self._ascending, conversation.number)]
        self._endings.forget(conversation)
        if conversation.name is not None:
            of_name = self._named[conversation.name]
            del of_name[conversation.salt_tag]
            if not of_name:
                del self._named[conversation.name]
