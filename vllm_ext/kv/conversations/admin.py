"""What an administrator may ask of a tier, and tell it: one engine's answers.

Called between two steps, in the engine's process, which stands still meanwhile: an answer costs as much as what it
shows or changes, however many conversations there are. Salts are secrets of tenants: an answer never shows one, but a
tag that tells two of them apart, and that means nothing outside this process.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm_ext.kv.eviction.retention import RetentionCachePolicy

if TYPE_CHECKING:
    from vllm_ext.kv.connector.statistics import TierAccount
    from vllm_ext.kv.conversations.conversation import Conversation

MOST_SHOWN = 1000
"""Conversations in one answer."""
_SHOWN_TAG_CHARS = 12


class TierAdmin:
    """Answers for one engine.

    Args:
        account: Of its tier.

    Raises:
        ValueError: The tier does not track conversations (`lru`, `arc`).
    """

    def __init__(self, account: TierAccount) -> None:
        if account.tier.keeper is None:
            raise ValueError("this tier does not track conversations (policy lru or arc)")
        self._account, self._keeper = account, account.tier.keeper
        self._engine = secrets.token_hex(4)
        """Makes ids of conversations unlike those of other engines, which are asked the same."""
        self._actions: dict[str, Callable[..., dict[str, Any]]] = {
            "statistics": account.state,
            "list": self._list,
            "show": self._show,
            "drop": self._drop,
        }

    def answer(self, action: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked, and return what came of it, fit for JSON.

        Args:
            action: ``statistics``; ``list``, with cursor (0, or the page before's) and limit; ``show``, with name;
                ``drop``, with id, or with name and salt, which is None for requests without one.

        Raises:
            ValueError: There is no such action.
        """
        if action not in self._actions:
            raise ValueError(f"action={action!r}: must be one of {', '.join(self._actions)}")
        return self._actions[action](**arguments)

    def _list(self, cursor: int, limit: int) -> dict[str, Any]:
        """Return the conversations that began after a cursor's, the oldest first, and the cursor to go on with."""
        book = self._keeper.book
        found = list(islice(book.after(cursor), limit + 1))
        shown, more = found[:limit], len(found) > limit
        return {
            "total": len(book),
            "conversations": [self._row(conversation) for conversation in shown],
            "cursor": shown[-1].number if shown else cursor,
            "more": more,
        }

    def _show(self, name: str) -> dict[str, Any]:
        found = self._keeper.book.find(name)
        return {
            "total": len(found),
            "conversations": [self._row(conversation) for conversation in islice(found.values(), MOST_SHOWN)],
        }

    def _drop(self, id: str | None = None, name: str = "", salt: str | None = None) -> dict[str, Any]:
        """Drop the conversation that is meant; if there is none, say how many have the name under other salts."""
        book, (engine, _, number) = self._keeper.book, (id or "").partition("-")
        if id is None:
            conversation = book.find(name).get(book.salt_tag(salt))
        else:
            conversation = book.get(int(number)) if engine == self._engine and number.isdecimal() else None
        if conversation is None:
            return {"conversation": None, "with_other_salts": len(book.find(name))}
        dropped = self._keeper.drop(conversation)
        left = len(conversation.keys)
        return {"dropped_chunks": dropped, "left_chunks": left, "conversation": self._row(conversation)}

    def _row(self, conversation: Conversation) -> dict[str, Any]:
        """Return what is shown of a conversation; times in seconds, chunks None if nobody knows whose they are."""
        knows_chunks = isinstance(self._account.host.policy, RetentionCachePolicy)
        chunks = len(conversation.keys) if knows_chunks else None
        return {
            "id": f"{self._engine}-{conversation.number}",
            "name": conversation.name,
            "salt_tag": conversation.salt_tag[:_SHOWN_TAG_CHARS] or None,
            "turns": conversation.turns,
            "running": conversation.running,
            "unused_s": max(0.0, self._account.tier.clock() - conversation.last_used_s),
            "ttl_s": None if math.isinf(conversation.ttl_s) else conversation.ttl_s,
            "chunks": chunks,
            "bytes": None if chunks is None else chunks * self._account.chunk_bytes,
        }
