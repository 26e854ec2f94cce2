"""What conversations mean for the host tier: whose chunks are worth how much, stay, and go."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_ext.hints import NO_HINTS, HintError, RequestHints, from_extra_args
from vllm_ext.kv.conversations import Conversation, ConversationBook, Turn
from vllm_ext.kv.retention import RetentionCachePolicy
from vllm_ext.kv.tally import DROPPED, EXPIRED

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.request import Request

    from vllm_ext.kv.disk_manager import DiskBackedManager
    from vllm_ext.kv.manager import TierManager

logger = init_logger("vllm.vllm_ext.kv")


class Keeper:
    """Follows conversations for a manager's chunks.

    With a policy of vLLM's own, which knows no conversations, they are counted and nothing else.

    Args:
        manager: Of the host tier, and of the disk behind it if there is one: what is dropped goes from both.
        ttl_s: Seconds after its last use at which a conversation is dropped, unless its client says so; 0: never.
        pin_share: Most of the tier that pinned conversations may hold.
        salt_share: Most of it that chunks of one salt may hold.
        learn_returns: Whether chunks are valued by the rate at which such conversations come back.
    """

    def __init__(
        self,
        manager: TierManager | DiskBackedManager,
        *,
        ttl_s: float = 0.0,
        pin_share: float = 0.25,
        salt_share: float = 1.0,
        learn_returns: bool = True,
    ) -> None:
        self.book = ConversationBook(ttl_s or math.inf)
        self.expired = self.dropped = self.unpinned = 0
        """Conversations whose time was over, that were dropped by hand, and whose pin was taken away."""
        self._manager = manager
        self.most_pinned_chunks = int(pin_share * manager.num_chunks)
        """Most chunks that pinned conversations may hold."""
        self._pinned: dict[Conversation, None] = {}
        policy = manager.policy
        self._policy = policy if isinstance(policy, RetentionCachePolicy) else None
        if self._policy is not None:
            self._policy.returns = self.book.returns if learn_returns else None
            self._policy.quota = max(1, int(salt_share * manager.num_chunks)) if salt_share < 1 else None

    def use(self, clock: Callable[[], float], cost: Callable[[int], float]) -> None:
        """Take the scheduler's clock, and what a chunk costs to compute again, by the tokens up to its end."""
        if self._policy is not None:
            self._policy.clock, self._policy.cost = clock, cost

    def enter(self, request: Request, keys: Sequence[OffloadKey], now: float) -> Turn:
        """Return a new request's place in its conversation."""
        hints = _hints_of(request)
        salt = request.cache_salt or ""
        conversation = self.book.enter(hints.conversation_id, salt, keys, now, ttl_s=hints.kv_ttl_s)
        if hints.kv_pin is not None:
            self.pin(conversation, hints.kv_pin)
        return Turn(conversation)

    def leave(self, turn: Turn, keys: Sequence[OffloadKey], now: float) -> None:
        """Note that a request ended; ``keys`` are all its chunks."""
        self.book.leave(turn.conversation, keys, now)

    def return_share(self, conversation: Conversation, *, after_this_turn: bool = False) -> float:
        """Return the probability that a conversation's KV is asked for again: 1 while a request of it is there.

        Args:
            after_this_turn: Take it that the request that is there has ended.
        """
        if after_this_turn:
            return self.book.returns.share(conversation.turns + 1)
        return 1.0 if conversation.running else self.book.returns.share(conversation.turns)

    def sweep(self, now: float) -> None:
        """Drop conversations whose time is over, and pins that hold too much."""
        for conversation in self.book.expired(now):
            self.pin(conversation, wanted=False)
            self.expired += 1
            self._forget(conversation, EXPIRED)
        while self._pinned and self.pinned_chunks > self.most_pinned_chunks:
            oldest = min(self._pinned, key=lambda conversation: conversation.last_used_s)
            if not self.unpinned:
                logger.warning(
                    "pinned conversations hold more than kv_tier.pin_share of the KV tier: those that were not used "
                    "longest are pinned no more (counted, not logged again)"
                )
            self.unpinned += 1
            self.pin(oldest, wanted=False)

    def pin(self, conversation: Conversation, wanted: bool) -> None:
        """Keep a conversation's chunks whatever they are worth, or no more."""
        if self._policy is None:
            return
        self._policy.pin(conversation, wanted)
        if wanted:
            self._pinned[conversation] = None
        else:
            self._pinned.pop(conversation, None)

    def drop(self, conversation: Conversation) -> int:
        """Forget a conversation's chunks, but those in use and those that others' chunks follow; return how many."""
        self.dropped += 1
        self.pin(conversation, wanted=False)
        return self._forget(conversation, DROPPED)

    @property
    def pinned_chunks(self) -> int:
        """Chunks that pinned conversations hold."""
        return 0 if self._policy is None else self._policy.pinned_chunks

    def states(self) -> dict[str, int]:
        """Return how many conversations run, wait with chunks in the tier, and without. Cost: one pass over them."""
        found = dict.fromkeys(("running", "kept", "gone"), 0)
        for conversation in self.book:
            found["running" if conversation.running else "kept" if conversation.keys else "gone"] += 1
        found["pinned"] = len(self._pinned)
        return found

    def _forget(self, conversation: Conversation, reason: str) -> int:
        if self._policy is None:
            return 0
        taken = self._policy.take(conversation)
        self._manager.forget(taken, reason)
        return len(taken)


def _hints_of(request: Request) -> RequestHints:
    """Return a request's hints; where they are malformed, the scheduler counts that, and none are followed."""
    params: Any = request.sampling_params
    try:
        return from_extra_args(params.extra_args if params is not None else None, request.session_id)
    except HintError:
        return NO_HINTS
