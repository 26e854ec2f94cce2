"""What an administrator may ask of a tier, and tell it: one engine's answers.

Called between two steps, in the engine's process. Salts are secrets of tenants: an answer never shows one, but a tag
that tells two of them apart, and that means nothing outside this process.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_ext.kv.retention import RetentionCachePolicy

if TYPE_CHECKING:
    from vllm_ext.kv.conversations import Conversation
    from vllm_ext.kv.keeper import Keeper
    from vllm_ext.kv.statistics import TierAccount

SORTS: dict[str, Callable[[Conversation], Any]] = {
    "last_used": lambda c: -c.last_used_s,
    "chunks": lambda c: -len(c.keys),
    "turns": lambda c: -c.turns,
    "name": lambda c: (c.name, c.salt),
}
"""Orders of a listing: the one used last, with most chunks, with most turns first; or by name."""
_TAG_BYTES = 6


class TierAdmin:
    """Answers for one engine.

    Args:
        account: Of its tier.
    """

    def __init__(self, account: TierAccount) -> None:
        self._account = account
        self._tag_key = secrets.token_bytes(16)
        self._actions: dict[str, Callable[..., dict[str, Any]]] = {
            "statistics": account.state,
            "list": self._list,
            "show": self._show,
            "pin": self._pin,
            "unpin": self._unpin,
            "drop": self._drop,
        }

    def answer(self, action: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked, and return what came of it, fit for JSON.

        Args:
            action: ``statistics``; ``list``, with offset, limit, and sort (`SORTS`); ``show``, with name; ``pin``,
                ``unpin`` or ``drop``, with name, and salt or salt_tag, or neither for requests without a salt.

        Raises:
            ValueError: There is no such action.
        """
        if action not in self._actions:
            raise ValueError(f"action={action!r}: must be one of {', '.join(self._actions)}")
        return self._actions[action](**arguments)

    def _list(self, offset: int, limit: int, sort: str) -> dict[str, Any]:
        book = self._keeper.book
        found = heapq.nsmallest(offset + limit, book, key=SORTS[sort])[offset:]
        return {"total": len(book), "conversations": [self._row(conversation) for conversation in found]}

    def _show(self, name: str) -> dict[str, Any]:
        return {"conversations": [self._row(conversation) for conversation in self._keeper.book.find(name)]}

    def _pin(self, name: str, salt: str | None, salt_tag: str | None) -> dict[str, Any]:
        return self._change(name, salt, salt_tag, self._keep)

    def _unpin(self, name: str, salt: str | None, salt_tag: str | None) -> dict[str, Any]:
        return self._change(name, salt, salt_tag, self._keep_no_more)

    def _drop(self, name: str, salt: str | None, salt_tag: str | None) -> dict[str, Any]:
        return self._change(name, salt, salt_tag, self._forget)

    def _change(
        self, name: str, salt: str | None, salt_tag: str | None, change: Callable[[Conversation], dict[str, Any]]
    ) -> dict[str, Any]:
        """Change the conversation of a name and a salt; say how many others of that name there are if there is none."""
        named = self._keeper.book.find(name)
        for conversation in named:
            meant = self._tag(conversation) == salt_tag if salt_tag else conversation.salt == (salt or "")
            if meant:
                done = change(conversation)
                return {**done, "conversation": self._row(conversation)}
        return {"conversation": None, "with_other_salts": len(named)}

    def _keep(self, conversation: Conversation) -> dict[str, Any]:
        keeper = self._keeper
        keeper.pin(conversation, wanted=True)
        keeper.sweep(self._account.tier.clock())  # takes pins away again that would hold too much
        if conversation.pinned:
            return {}
        if not self._knows_chunks:
            return {"refused": "kv_tier.policy is one of vLLM's own, which know no conversations"}
        most, held = keeper.most_pinned_chunks, len(conversation.keys)
        why = f"pinned conversations may hold {most} chunks together (kv_tier.pin_share), and this one holds {held}"
        return {"refused": f"{why}; of several, those used last stay pinned"}

    def _keep_no_more(self, conversation: Conversation) -> dict[str, Any]:
        self._keeper.pin(conversation, wanted=False)
        return {}

    def _forget(self, conversation: Conversation) -> dict[str, Any]:
        dropped = self._keeper.drop(conversation)
        return {"dropped_chunks": dropped, "left_chunks": len(conversation.keys)}

    @property
    def _keeper(self) -> Keeper:
        keeper = self._account.tier.keeper
        if keeper is None:
            raise ValueError("nobody follows the conversations of this tier")
        return keeper

    @property
    def _knows_chunks(self) -> bool:
        return isinstance(self._account.host.policy, RetentionCachePolicy)

    def _row(self, conversation: Conversation) -> dict[str, Any]:
        """Return what is shown of a conversation; times in seconds, chunks None if nobody knows whose they are."""
        chunks = len(conversation.keys) if self._knows_chunks else None
        return {
            "name": conversation.name,
            "named_by_client": conversation.named,
            "salt_tag": self._tag(conversation),
            "turns": conversation.turns,
            "running": conversation.running,
            "unused_s": max(0.0, self._account.tier.clock() - conversation.last_used_s),
            "pinned": conversation.pinned,
            "ttl_s": None if math.isinf(conversation.ttl_s) else conversation.ttl_s,
            "chunks": chunks,
            "bytes": None if chunks is None else chunks * self._account.chunk_bytes,
        }

    def _tag(self, conversation: Conversation) -> str | None:
        """Return what stands for a conversation's salt; None if it has none."""
        if not conversation.salt:
            return None
        return hashlib.blake2b(conversation.salt.encode(), key=self._tag_key, digest_size=_TAG_BYTES).hexdigest()
