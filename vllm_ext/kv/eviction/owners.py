"""Whose a chunk is: the conversations that used it, of which any keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import Any

    from vllm.v1.kv_offload.base import OffloadKey

    from vllm_ext.kv.conversations.conversation import Conversation
    from vllm_ext.kv.eviction.quotas import SaltQuotas

_MOST_OWNERS = 4
"""Remembered for a chunk; of more, those whose lives end last. A prompt that all share would else be as many entries
as there are conversations, times its length."""


class Owned(Protocol):
    """A chunk in the tier."""

    conversation: Conversation | None
    """Whoever used it last; it counts for its salt."""
    others: tuple[Conversation, ...]
    """Its other owners, the one that used it last at the end."""


class Owners:
    """Books of owners. Cost of a change: that of the owners of one chunk.

    Args:
        quotas: Told how many chunks are which salt's.
    """

    def __init__(self, quotas: SaltQuotas[Any]) -> None:
        self._quotas = quotas

    def enter(self, key: OffloadKey, chunk: Owned) -> None:
        """Book a chunk that has come with its owners."""
        if chunk.conversation is not None:
            self._quotas.add(chunk.conversation.salt_tag, 1)
        for owner in _all(chunk):
            owner.own(key)

    def leave(self, key: OffloadKey, chunk: Owned) -> None:
        """Book a chunk out that goes; it keeps its owners, in case that it comes back."""
        for owner in _all(chunk):
            owner.disown(key)
        if chunk.conversation is not None:
            self._quotas.add(chunk.conversation.salt_tag, -1)

    def use(self, key: OffloadKey, chunk: Owned, conversation: Conversation) -> None:
        """Make a conversation that uses a chunk one of its owners."""
        others = [owner for owner in _all(chunk) if owner is not conversation]
        if len(others) == _MOST_OWNERS:
            first_to_end = min(others, key=lambda c: (c.running > 0, c.expires_s, c.last_used_s))
            others.remove(first_to_end)
            first_to_end.disown(key)
        self._pass_on(chunk, conversation, others)
        conversation.own(key)

    def let_go(self, key: OffloadKey, chunk: Owned, conversation: Conversation) -> bool:
        """Take a conversation out of the owners of a chunk; False, and nothing, if there is no other."""
        others = [owner for owner in _all(chunk) if owner is not conversation]
        if not others:
            return False
        conversation.disown(key)
        self._pass_on(chunk, others.pop(), others)
        return True

    def _pass_on(self, chunk: Owned, last: Conversation, others: list[Conversation]) -> None:
        before = chunk.conversation
        if before is None or before.salt_tag != last.salt_tag:
            self._quotas.add(last.salt_tag, 1)
            if before is not None:
                self._quotas.add(before.salt_tag, -1)
        chunk.conversation, chunk.others = last, tuple(others)


def _all(chunk: Owned) -> tuple[Conversation, ...]:
    return chunk.others if chunk.conversation is None else (*chunk.others, chunk.conversation)
