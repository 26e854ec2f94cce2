"""The tier's real books and who follows its conversations, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

from tests.support.tier_audit import audit_owners
from vllm_ext.kv.conversations.conversation import Conversation
from vllm_ext.kv.conversations.keeper import Keeper
from vllm_ext.kv.eviction.retention import Chain, RetentionCachePolicy
from vllm_ext.kv.host.manager import TierManager

CHUNK = 32


def key(name: str) -> OffloadKey:
    return make_offload_key(name.encode(), 0)


def in_order(keys: Sequence[OffloadKey]) -> ReqContext:
    """A request whose prefix these chunks are."""
    context = ReqContext(req_id="r")
    for number, found in enumerate(keys):
        context.set_offload_key_position(found, (number + 1) * CHUNK)
    context.set_state(Chain({0: keys}, {0: CHUNK}))
    return context


@dataclass
class Tier:
    """Eight chunks unless said otherwise; time stands where it is set."""

    options: dict[str, Any] = field(default_factory=dict)
    num_chunks: int = 8
    policy: str = "retention"
    now: float = 0.0
    cost: Callable[[int], float] = lambda end: 1.0

    def __post_init__(self) -> None:
        self.manager = TierManager(self.num_chunks, cache_policy=self.policy)
        self.keeper = Keeper(self.manager, **self.options)
        self.keeper.use(lambda: self.now, self.cost)

    def turn(
        self,
        name: str | None,
        *chunks: str,
        at: float,
        salt: str = "",
        lora: str = "",
        generated: int = 0,
        **hints: Any,
    ) -> Conversation:
        """Let a request store chunks as they are full, of which it generated the last ones, and end."""
        self.now = at
        self.keeper.sweep(at)
        request: Any = SimpleNamespace(
            request_id=f"request-{at}-{name}",
            sampling_params=SimpleNamespace(
                extra_args={**({} if name is None else {"conversation_id": name}), **hints}
            ),
            session_id=None,
            cache_salt=salt or None,
            lora_request=SimpleNamespace(lora_name=lora) if lora else None,
            num_prompt_tokens=(len(chunks) - generated) * CHUNK,
            prompt_token_ids=None,
        )
        found = [key(chunk) for chunk in chunks]
        turn = self.keeper.enter(request, found[: len(found) - generated], at)
        context = in_order(found)
        context.set_state(turn)
        self.manager.on_new_request(context)
        stored = self.manager.prepare_store(found, context)
        if stored is not None:
            self.manager.complete_store(stored.keys_to_store, context)
        self.keeper.leave(turn, found, at)
        self.manager.on_request_finished(context)
        self.keeper.sweep(at)
        return turn.conversation

    def turns(self, *lines: str) -> None:
        """Let requests come and check the books after each; each is ``name: chunks @time options``."""
        for line in lines:
            name, _, rest = line.partition(": ")
            chunks, _, said = rest.partition(" @")
            at, *options = said.split()
            hints: dict[str, Any] = dict(option.split("=") for option in options)
            if "ttl" in hints:
                hints["kv_ttl_s"] = float(hints.pop("ttl"))
            generated = int(hints.pop("generated", 0))
            self.turn(name, *chunks.split(), at=float(at), generated=generated, **hints)
            self.check()

    def has(self, *chunks: str) -> bool:
        return all(self.manager.policy.get(key(chunk)) is not None for chunk in chunks)

    def there(self, *names: str) -> tuple[list[str], ...]:
        """Return which of the chunks are there."""
        return tuple([chunk for chunk in some.split() if self.has(chunk)] for some in names)

    def check(self) -> None:
        """The books agree with each other."""
        if self.policy in ("lru", "arc"):
            return
        policy = self.manager.policy
        assert isinstance(policy, RetentionCachePolicy)
        resident = len(policy._nodes)
        assert self.manager._get_num_free_chunks() + resident == self.num_chunks
        assert self.manager._num_evictable_cache_chunks == resident
        audit_owners(policy, self.keeper.book)
