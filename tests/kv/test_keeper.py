"""Times to live, quotas and drops, on the real books of the tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from vllm_ext.kv.eviction.retention import RetentionCachePolicy

from .keeper_parts import CHUNK, Tier


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


def test_a_clients_time_to_live_goes_before() -> None:
    tier = Tier({"ttl_s": 10.0})
    tier.turn("short", "s0", at=0.0, salt="s", kv_ttl_s=2.0)
    tier.turn("other", "o0", at=2.0)
    assert not tier.has("s0")
    assert tier.keeper.states() == {"running": 0, "kept": 1, "gone": 1}
    tier.check()


def test_what_others_own_is_not_dropped_with_a_conversation() -> None:
    tier = Tier()
    first = tier.turn("a", "system", "a1", at=0.0)
    second = tier.turn("b", "system", "b1", at=1.0)
    third = tier.turn("c", "system", "c1", at=2.0)
    assert tier.keeper.drop(third) == 1, "the others own the first chunk, which it had used last"
    assert tier.keeper.drop(first) == 1
    assert tier.has("system", "b1")
    tier.check()
    assert tier.keeper.drop(second) == 2
    assert not tier.has("system")
    tier.check()


def test_of_many_owners_those_are_remembered_whose_lives_end_last() -> None:
    tier = Tier({"ttl_s": 100.0}, num_chunks=40)
    tier.turn("long", "system", "l1", at=0.0, salt="s")
    for number in range(20):
        tier.turn(f"c{number}", "system", at=1.0 + number, salt="s", kv_ttl_s=1.0)
        tier.check()
    policy = tier.manager.policy
    assert isinstance(policy, RetentionCachePolicy)
    tier.turn("other", "o0", at=50.0)
    assert tier.has("system", "l1"), "all others are over"
    tier.turn("other", "o0", at=100.0)
    assert not tier.has("system")
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
    tag = tier.keeper.book.salt_tag
    assert {tag: salt.chunks for tag, salt in policy.quotas.salts.items()} == {tag("quiet"): 2, tag("loud"): 4}


def test_a_prefix_beyond_its_quota_is_stored_in_part() -> None:
    tier = Tier({"salt_share": 0.5})
    tier.turn("big", *(f"b{n}" for n in range(7)), at=0.0, salt="s")
    assert tier.has("b0", "b1", "b2", "b3")
    assert not tier.has("b4")
    tier.check()


@pytest.mark.parametrize(("returns", "gone"), [("turns", "once-1"), ("age", "often-1")])
def test_who_has_come_back_often_is_expected_to_come_again(returns: str, gone: str) -> None:
    tier = Tier({"returns": returns}, num_chunks=6)
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
    tier = Tier(policy=policy)
    conversation = tier.turn("a", "a0", at=0.0)
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
    conversation = tier.turn(None, "a0", at=0.0, salt="s", conversation_id=7, kv_ttl_s=1.0)
    assert conversation.name is None
    assert conversation.ttl_s == math.inf


def test_of_what_a_client_may_not_ask_for_the_scheduler_is_told() -> None:
    tier, told = Tier({"ttl_s": 10.0}), []
    tier.keeper.on_bad_hint = lambda req_id, problem: told.append((req_id, problem.field))
    tier.turn("a", "a0", at=0.0, kv_ttl_s=1.0)
    tier.turn("b", "b0", at=1.0, salt="s", kv_ttl_s=11.0)
    tier.turn("c", "c0", at=2.0, salt="s", kv_ttl_s=10.0)
    assert told == [("request-0.0-a", "kv_ttl_s"), ("request-1.0-b", "kv_ttl_s")]
    assert [c.name for c in tier.keeper.book.after(0)] == ["a", "b", "c"], "their other hints are followed"


def test_emptying_the_tier_empties_the_conversations() -> None:
    tier = Tier({"salt_share": 0.5})
    names: Sequence[str] = ("a", "b", "c")
    for number, name in enumerate(names):
        tier.turn(name, f"{name}0", at=float(number))
    tier.manager.reset_cache()
    tier.check()
    assert not any(conversation.keys for conversation in tier.keeper.book.after(0))
