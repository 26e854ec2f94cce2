"""Whose a chunk is: the conversations that used it, of which any keeps it, and whether a pin does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import Any

    from vllm.v1.kv_offload.base import OffloadKey

    from vllm_ext.kv.keeping.conversations import Conversation
    from vllm_ext.kv.keeping.quotas import SaltQuotas

_MOST_OWNERS = 4
"""Remembered for a chunk; of more, those whose lives end last. A prompt that all share would else be as many entries
as there are conversations, times its length."""


class Owned(Protocol):
    """A chunk in the tier."""

    conversation: Conversation | None
    """Whoever used it last; it counts for its salt."""
    others: tuple[Conversation, ...]
    """Its other owners, the one that used it last at the end."""
    pinned: bool
    """Whether it stays, whatever it is worth."""


class Owners:
    """Books of owners and pins. Cost of a change: that of the owners of one chunk, but for whole conversations.

    Args:
        chunks: Those in the tier.
        quotas: Told how many of them are which salt's.

    Attributes:
        most_pinned: Most chunks that may be pinned.
        pinned: Chunks that are.
    """

    def __init__(self, chunks: Mapping[OffloadKey, Owned], quotas: SaltQuotas[Any]) -> None:
        self.most_pinned = self.pinned = 0
        self._chunks = chunks
        self._quotas = quotas

    def enter(self, key: OffloadKey, chunk: Owned) -> None:
        """Book a chunk that has come with its owners."""
        if chunk.conversation is not None:
            self._quotas.add(chunk.conversation.salt_tag, 1)
        for owner in _all(chunk):
            self._join(key, chunk, owner)

    def leave(self, key: OffloadKey, chunk: Owned) -> None:
        """Book a chunk out that goes; it keeps its owners, in case that it comes back."""
        for owner in _all(chunk):
            owner.disown(key)
        if chunk.conversation is not None:
            self._quotas.add(chunk.conversation.salt_tag, -1)
        self._unpin(chunk)

    def use(self, key: OffloadKey, chunk: Owned, conversation: Conversation) -> None:
        """Make a conversation that uses a chunk one of its owners."""
        others = [owner for owner in _all(chunk) if owner is not conversation]
        if len(others) == _MOST_OWNERS:
            first_to_end = min(others, key=lambda c: (c.pinned, c.running > 0, c.expires_s, c.last_used_s))
            others.remove(first_to_end)
            first_to_end.disown(key)
        self._pass_on(chunk, conversation, others)
        self._join(key, chunk, conversation)

    def let_go(self, key: OffloadKey, chunk: Owned, conversation: Conversation) -> bool:
        """Take a conversation out of the owners of a chunk; False, and nothing, if there is no other."""
        others = [owner for owner in _all(chunk) if owner is not conversation]
        if not others:
            return False
        conversation.disown(key)
        self._pass_on(chunk, others.pop(), others)
        return True

    def pin(self, conversation: Conversation) -> bool:
        """Pin all chunks of a conversation; False, and none, if there is no room for as many pins."""
        found = [chunk for key in conversation.keys if not (chunk := self._chunks[key]).pinned]
        if not self.most_pinned or self.pinned + len(found) > self.most_pinned:
            return False
        for chunk in found:
            self._pin(chunk)
        return True

    def unpin(self, conversation: Conversation) -> list[OffloadKey]:
        """Take a conversation's pins away, but where another pinned one owns the chunk; return the chunks let go."""
        freed = []
        for key in conversation.keys:
            chunk = self._chunks[key]
            if chunk.pinned and not any(c.pinned for c in _all(chunk) if c is not conversation):
                self._unpin(chunk)
                freed.append(key)
        return freed

    def _pass_on(self, chunk: Owned, last: Conversation, others: list[Conversation]) -> None:
        before = chunk.conversation
        if before is None or before.salt_tag != last.salt_tag:
            self._quotas.add(last.salt_tag, 1)
            if before is not None:
                self._quotas.add(before.salt_tag, -1)
        chunk.conversation, chunk.others = last, tuple(others)

    def _join(self, key: OffloadKey, chunk: Owned, owner: Conversation) -> None:
        """Give a chunk to an owner; one that is pinned pins it, as far as there is room: what it had stays pinned."""
        owner.own(key)
        if owner.pinned and not chunk.pinned and self.pinned < self.most_pinned:
            self._pin(chunk)

    def _pin(self, chunk: Owned) -> None:
        chunk.pinned = True
        self.pinned += 1

    def _unpin(self, chunk: Owned) -> None:
        self.pinned -= chunk.pinned
        chunk.pinned = False


def _all(chunk: Owned) -> tuple[Conversation, ...]:
    return chunk.others if chunk.conversation is None else (*chunk.others, chunk.conversation)
