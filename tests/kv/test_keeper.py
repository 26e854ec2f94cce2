"""Pins, times to live, quotas and drops, on the real books of the tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

from vllm_ext.kv.conversations import Conversation
from vllm_ext.kv.keeper import Keeper
from vllm_ext.kv.manager import TierManager
from vllm_ext.kv.retention import Chain, RetentionCachePolicy

CHUNK = 32


def key(name: str) -> OffloadKey:
    return make_offload_key(name.encode(), 0)


@dataclass
class Tier:
    """Eight chunks unless said otherwise; time stands where it is set."""

    options: dict[str, Any] = field(default_factory=dict)
    num_chunks: int = 8
    policy: str = "retention"
    now: float = 0.0

    def __post_init__(self) -> None:
        self.manager = TierManager(self.num_chunks, cache_policy=self.policy)
        self.keeper = Keeper(self.manager, **self.options)
        self.keeper.use(lambda: self.now, lambda end: 1.0)

    def turn(self, name: str | None, *chunks: str, at: float, salt: str = "", **hints: Any) -> Conversation:
        """Let a request store chunks, and end."""
        self.now = at
        self.keeper.sweep(at)
        extra = {**({} if name is None else {"conversation_id": name}), **hints}
        request: Any = SimpleNamespace(
            sampling_params=SimpleNamespace(extra_args=extra), session_id=None, cache_salt=salt or None
        )
        found = [key(chunk) for chunk in chunks]
        turn = self.keeper.enter(request, found, at)
        context = ReqContext(f"request-{at}-{name}")
        for number, one in enumerate(found):
            context.set_offload_key_position(one, (number + 1) * CHUNK)
        context.set_state(Chain({0: found}, {0: CHUNK}))
        context.set_state(turn)
        self.manager.on_new_request(context)
        stored = self.manager.prepare_store(found, context)
        if stored is not None:
            self.manager.complete_store(stored.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.keeper.leave(turn, found, at)
        self.keeper.sweep(at)
        return turn.conversation

    def has(self, *chunks: str) -> bool:
        return all(self.manager.policy.get(key(chunk)) is not None for chunk in chunks)

    def check(self) -> None:
        """The books agree with each other."""
        policy = self.manager.policy
        assert isinstance(policy, RetentionCachePolicy)
        resident = len(policy._nodes)
        assert self.manager._get_num_free_chunks() + resident == self.num_chunks
        assert self.manager._num_evictable_cache_chunks == resident
        assert sum(policy.per_salt.values()) == sum(len(c.keys) for c in self.keeper.book) == resident


def test_a_pinned_conversation_stays_though_it_is_the_oldest() -> None:
    tier = Tier({"pin_share": 0.5})
    tier.turn("kept", "k0", "k1", at=0.0, kv_pin=True)
    for number in range(10):
        tier.turn(f"c{number}", f"{number}-0", f"{number}-1", at=1.0 + number)
        tier.check()
    assert tier.has("k0", "k1")
    assert tier.keeper.states() == {"running": 0, "kept": 4, "gone": 7, "pinned": 1}


def test_a_pin_ends_when_its_client_says_so() -> None:
    tier = Tier({"pin_share": 0.5})
    tier.turn("kept", "k0", "k1", at=0.0, kv_pin=True)
    tier.turn("kept", "k0", "k1", at=1.0, kv_pin=False)
    for number in range(4):
        tier.turn(f"c{number}", f"{number}-0", f"{number}-1", at=2.0 + number)
    assert not tier.has("k0")
    tier.check()


def test_pins_hold_no_more_than_their_share() -> None:
    tier = Tier({"pin_share": 0.25})
    for number in range(4):
        tier.turn(f"p{number}", f"{number}-0", f"{number}-1", at=float(number), kv_pin=True)
    assert tier.keeper.unpinned == 3
    assert [c.name for c in tier.keeper.book if c.pinned] == ["p3"], "the one used last"
    tier.turn("more", "m0", "m1", "m2", "m3", at=9.0)
    assert tier.has("m0", "m3", "3-0", "3-1")
    tier.check()


def test_where_pins_are_switched_off_the_hint_is_ignored() -> None:
    tier = Tier({"pin_share": 0.0})
    assert not tier.turn("a", "a0", at=0.0, kv_pin=True).pinned


def test_a_tier_full_of_pins_stores_nothing_and_does_not_fail() -> None:
    tier = Tier({"pin_share": 0.9})
    tier.turn("kept", *(f"k{n}" for n in range(7)), at=0.0, kv_pin=True)
    tier.turn("big", "b0", "b1", "b2", at=1.0)
    assert tier.has(*(f"k{n}" for n in range(7)))
    assert not tier.has("b0")
    tier.check()


def test_a_conversation_is_dropped_when_its_time_is_over() -> None:
    tier = Tier({"ttl_s": 10.0})
    tier.turn("a", "a0", "a1", at=0.0)
    tier.turn("b", "b0", at=5.0)
    tier.turn("c", "c0", at=10.0)
    assert not tier.has("a0")
    assert not tier.has("a1")
    assert tier.has("b0")
    assert tier.keeper.expired == 1
    tier.check()


def test_a_clients_time_to_live_goes_before_and_ends_a_pin() -> None:
    tier = Tier({"ttl_s": 10.0, "pin_share": 0.5})
    tier.turn("short", "s0", at=0.0, kv_ttl_s=2.0, kv_pin=True)
    tier.turn("long", "l0", at=0.0, kv_ttl_s=100.0)
    tier.turn("other", "o0", at=2.0)
    assert not tier.has("s0")
    tier.turn("other", "o0", at=99.0)
    assert tier.has("l0")
    tier.check()


def test_what_others_follow_is_not_dropped_with_a_conversation() -> None:
    tier = Tier()
    shared = tier.turn("a", "system", "a1", at=0.0)
    tier.turn("b", "system", "b1", at=1.0)  # uses the first chunk last: it is b's now
    assert tier.keeper.drop(shared) == 1
    assert tier.has("system", "b1")
    assert not tier.has("a1")
    owner = tier.keeper.book.find("b")[0]
    tier.turn("c", "system", "c1", at=2.0)
    assert tier.keeper.drop(tier.keeper.book.find("c")[0]) == 1, "b's chunk follows the shared one, which stays"
    assert tier.has("system", "b1")
    assert tier.keeper.drop(owner) == 1
    tier.check()


def test_a_salt_does_not_push_out_the_others() -> None:
    tier = Tier({"salt_share": 0.5})
    tier.turn("quiet", "q0", "q1", at=0.0, salt="quiet")
    for number in range(10):
        tier.turn(f"c{number}", f"{number}-0", f"{number}-1", at=1.0 + number, salt="loud")
        tier.check()
    assert tier.has("q0", "q1")
    assert tier.has("9-0", "9-1", "8-0", "8-1"), "its own oldest went"
    policy = tier.manager.policy
    assert isinstance(policy, RetentionCachePolicy)
    assert dict(policy.per_salt) == {"quiet": 2, "loud": 4}


def test_a_prefix_beyond_its_quota_is_stored_in_part() -> None:
    tier = Tier({"salt_share": 0.5})
    tier.turn("big", *(f"b{n}" for n in range(7)), at=0.0, salt="s")
    assert tier.has("b0", "b1", "b2", "b3")
    assert not tier.has("b4")
    tier.check()


@pytest.mark.parametrize(("learn", "gone"), [(True, "once-1"), (False, "often-1")])
def test_who_has_come_back_often_is_expected_to_come_again(learn: bool, gone: str) -> None:
    tier = Tier({"learn_returns": learn}, num_chunks=6)
    for number in range(200):  # many who come once, and some who come ten times
        tier.turn(f"once-{number}", f"x{number}", at=number)
        tier.turn(f"often-{number // 10}", f"y{number // 10}", at=number + 0.5)
    tier.manager.reset_cache()
    tier.turn("often-0", "often-1", at=300.0)
    tier.turn("once", "once-1", at=300.5)
    tier.turn("d", *(f"d{n}" for n in range(4)), at=310.0)
    tier.turn("e", "e0", at=310.1)
    assert [name for name in ("once-1", "often-1") if not tier.has(name)] == [gone]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_vllms_own_policies_are_left_alone(policy: str) -> None:
    tier = Tier({"pin_share": 0.5}, policy=policy)
    conversation = tier.turn("a", "a0", at=0.0, kv_pin=True)
    assert not conversation.pinned
    assert tier.keeper.drop(conversation) == 0
    assert tier.has("a0")
    assert conversation.turns == 1


def test_the_oldest_tail_goes_first_under_policy_tail() -> None:
    costs: Callable[[int], float] = lambda end: 1e6 if end > CHUNK else 1.0  # noqa: E731
    tier = Tier(policy="tail", num_chunks=4)
    tier.keeper.use(lambda: tier.now, costs)
    tier.turn("a", "a0", "a1", at=0.0)
    tier.turn("b", "b0", "b1", at=1.0)
    tier.turn("c", "c0", at=2.0)
    assert not tier.has("a1"), "however dear"
    assert tier.has("a0", "b0", "b1", "c0")


def test_a_malformed_hint_is_none() -> None:
    tier = Tier()
    conversation = tier.turn(None, "a0", at=0.0, conversation_id=7, kv_pin=True)
    assert not conversation.named
    assert not conversation.pinned


def test_emptying_the_tier_empties_the_conversations() -> None:
    tier = Tier({"salt_share": 0.5})
    names: Sequence[str] = ("a", "b", "c")
    for number, name in enumerate(names):
        tier.turn(name, f"{name}0", at=float(number))
    tier.manager.reset_cache()
    tier.check()
    assert not any(conversation.keys for conversation in tier.keeper.book)
