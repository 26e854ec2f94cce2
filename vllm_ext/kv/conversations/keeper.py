"""What conversations mean for the host tier: whose chunks are worth how much, stay, and go."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_ext.config.kv_tier import AUTO, BY_AGE
from vllm_ext.hints import NO_HINTS, HintError, RequestHints, check_lifetime, from_extra_args
from vllm_ext.kv.conversations.branches import Branches
from vllm_ext.kv.conversations.conversation import Conversation, ConversationBook, Turn
from vllm_ext.kv.conversations.endings import ending
from vllm_ext.kv.eviction.retention import RetentionCachePolicy
from vllm_ext.kv.eviction.worth import ClassCosts
from vllm_ext.kv.host.tally import DROPPED, EXPIRED

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.request import Request

    from vllm_ext.kv.disk.manager import DiskBackedManager
    from vllm_ext.kv.host.manager import TierManager

_MOST_ENDS = 64
"""Conversations whose lives end in one step at most; the rest follows in the next steps."""
_MOST_DROPPED = 512
"""Chunks after which no further one ends in a step."""


class Keeper:
    """Follows conversations for a manager's chunks.

    With a policy of vLLM's own, which knows no conversations, they are counted and nothing else.

    Args:
        manager: Of the host tier, and of the disk behind it if there is one: what is dropped goes from both.
        ttl_s: Seconds after its last use at which a conversation is dropped, unless its client wants it earlier; 0:
            never.
        salt_share: Most of the tier that chunks of one salt may hold, and where it is full all new salts together.
        returns: At which rate conversations are taken to come back (`config.kv_tier.RETURNS`).
        prompt_only: ``auto`` keeps what was generated only where next turns ask for it; else it is not decided here.

    Attributes:
        branches: How much of what was generated next turns ask for.
        learns: Whether that decides what is kept.
        on_bad_hint: Told the id of a request, and what it may not ask for and does not get. Hints that are malformed by
            themselves are not followed either, and counted by the scheduler.
    """

    def __init__(
        self,
        manager: TierManager | DiskBackedManager,
        *,
        ttl_s: float = 0.0,
        salt_share: float = 1.0,
        returns: str = BY_AGE,
        prompt_only: bool | str | None = AUTO,
    ) -> None:
        self.book = ConversationBook(ttl_s or math.inf)
        self.branches = Branches()
        self.expired = self.dropped = 0
        """Conversations whose time was over, and that were dropped by hand."""
        self.on_bad_hint: Callable[[str, HintError], None] = _nobody
        self._ttl_s = ttl_s
        self._manager = manager
        policy = manager.policy
        self._policy = policy if isinstance(policy, RetentionCachePolicy) else None
        self.learns = self._policy is not None and prompt_only == AUTO
        if self._policy is not None:
            self._policy.return_rate = self.book.returns.by(returns)
            self._policy.quotas.most = max(1, int(salt_share * manager.num_chunks)) if salt_share < 1 else None

    def use(self, clock: Callable[[], float], cost: Callable[[int], float]) -> None:
        """Take the scheduler's clock, and what a chunk costs to compute again, by the tokens up to its end."""
        if self._policy is not None:
            self._policy.clock, self._policy.costs = clock, ClassCosts(cost)

    def enter(self, request: Request, keys: Sequence[OffloadKey], now: float) -> Turn:
        """Return a new request's place in its conversation."""
        hints, salt_tag = self._hints_of(request), self.book.salt_tag(request.cache_salt)
        if self._policy is not None:
            self._policy.quotas.comes(salt_tag)
        name, tokens = hints.conversation_id, request.prompt_token_ids
        conversation = self.book.enter(name, salt_tag, keys, now, ttl_s=hints.kv_ttl_s, tokens=tokens)
        origin = "" if request.lora_request is None else request.lora_request.lora_name, salt_tag
        turn = Turn(conversation, origin, request.num_prompt_tokens, len(keys))
        dead = self.branches.enter(turn, keys)
        if self._policy is not None:
            turn.prompts_only = self.learns and self.branches.is_low(origin)
            if dead is not None:
                self._policy.let_go(dead, conversation)
        return turn

    def leave(self, turn: Turn, keys: Sequence[OffloadKey], now: float, output: Sequence[int] = ()) -> None:
        """Note that a request ended.

        Args:
            turn: Its place in its conversation.
            keys: All its chunks.
            now: Clock time, s.
            output: The tokens that it generated.
        """
        left = ending(keys[: turn.prompt_chunks], turn.prompt_tokens, output)
        self.book.leave(turn.conversation, keys, now, left)
        self.branches.leave(turn, keys)
        if self._policy is not None and turn.prompts_only and len(keys) > turn.prompt_chunks:
            turn.kept_tokens = turn.prompt_tokens
            self.branches.counts["left_out"] += len(keys) - turn.prompt_chunks
            if not turn.conversation.running:
                self._policy.let_go(keys[turn.prompt_chunks], turn.conversation)

    def return_share(self, conversation: Conversation, *, after_this_turn: bool = False) -> float:
        """Return the probability that a conversation's KV is asked for again: 1 while a request of it is there.

        Args:
            after_this_turn: Take it that the request that is there has ended.
        """
        if after_this_turn:
            return self.book.returns.share(conversation.turns + 1)
        return 1.0 if conversation.running else self.book.returns.share(conversation.turns)

    def sweep(self, now: float) -> None:
        """Drop conversations whose time is over: a bounded number in one step, however many end at once."""
        chunks = 0
        for conversation in self.book.expired(now, _MOST_ENDS):
            chunks += len(conversation.keys)
            self.expired += 1
            self._forget(conversation, EXPIRED)
            if chunks >= _MOST_DROPPED:
                return

    def drop(self, conversation: Conversation) -> int:
        """Forget a conversation's chunks, but those in use and those that others own or need; return how many."""
        self.dropped += 1
        return self._forget(conversation, DROPPED)

    def states(self) -> dict[str, int]:
        """Return how many conversations run, wait with chunks in the tier, and without."""
        running, kept = self.book.counts.running, self.book.counts.kept
        return {"running": running, "kept": kept, "gone": len(self.book) - running - kept}

    def _forget(self, conversation: Conversation, reason: str) -> int:
        if self._policy is None:
            return 0
        taken = self._policy.take(conversation)
        self._manager.forget(taken, reason)
        return len(taken)

    def _hints_of(self, request: Request) -> RequestHints:
        """Return a request's hints that are followed."""
        params: Any = request.sampling_params
        try:
            hints = from_extra_args(params.extra_args if params is not None else None, request.session_id)
        except HintError:
            return NO_HINTS
        try:
            check_lifetime(hints, request.cache_salt, self._ttl_s)
        except HintError as error:
            self.on_bad_hint(request.request_id, error)
            return replace(hints, kv_ttl_s=None)
        return hints


def _nobody(req_id: str, problem: HintError) -> None:
    """Nobody counts hints."""
