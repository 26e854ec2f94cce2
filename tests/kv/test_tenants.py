"""What one client can do to the KV of others, and to the engine: nothing."""

from __future__ import annotations

import math

import pytest

from vllm_ext.kv.conversations.conversation import ConversationBook
from vllm_ext.kv.eviction.retention import RetentionCachePolicy

from .keeper_parts import Tier, key

POLICIES = ("retention", "tail", "leading")


def policy_of(tier: Tier) -> RetentionCachePolicy:
    assert isinstance(tier.manager.policy, RetentionCachePolicy)
    return tier.manager.policy


def test_without_a_salt_nobody_ends_the_conversation_that_he_names() -> None:
    """B sent A's ``session_id`` with ``kv_ttl_s: 1e-6``: A's KV was gone in the next step."""
    tier = Tier()
    tier.turn("a", "a0", "a1", at=0.0)
    tier.turn("a", "b0", at=1.0, kv_ttl_s=1e-6)
    tier.turn("other", "o0", at=5.0)
    assert tier.has("a0", "a1")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chunk_that_two_share_lives_as_long_as_the_longer_lived(policy: str) -> None:
    """Under ``leading`` the front that B had used last went with B, and A's conversation had lost its beginning."""
    tier = Tier(policy=policy)
    tier.turn("a", "front", "a1", at=0.0, salt="s")
    tier.turn("b", "front", "b1", at=1.0, salt="s", kv_ttl_s=1.0)
    tier.turn("other", "o0", at=5.0)
    assert tier.has("front", "a1", "o0")
    assert not tier.has("b1")
    tier.check()


def test_a_client_only_shortens_a_life() -> None:
    tier = Tier({"ttl_s": 10.0})
    tier.turn("a", "a0", at=0.0, salt="s", kv_ttl_s=2.0)
    assert tier.turn("a", "a0", at=1.0, salt="s", kv_ttl_s=9.0).ttl_s == 2.0
    assert tier.turn("long", "l0", at=1.0, salt="s", kv_ttl_s=100.0).ttl_s == 10.0
    assert tier.turn("none", "n0", at=1.0, kv_ttl_s=1.0).ttl_s == 10.0, "it has no salt"
    assert Tier().turn("free", "f0", at=1.0, salt="s", kv_ttl_s=100.0).ttl_s == 100.0, "there never is for ever"


def test_a_client_does_not_name_an_anonymous_conversation() -> None:
    """``unnamed-1`` could be joined, and its life ended."""
    book = ConversationBook()
    anonymous = book.enter(None, "", [key("x")], 0.0)
    for number in range(3):
        for name in (f"unnamed-{number}", "", "None"):
            assert book.enter(name, "", [key("y")], 1.0, ttl_s=1.0) is not anonymous
    assert (anonymous.running, anonymous.ttl_s) == (1, math.inf)


def test_a_salt_leaves_nothing_behind() -> None:
    tier = Tier({"salt_share": 0.5})
    for number in range(100):
        tier.turn("a", f"a{number}", at=float(number), salt=f"salt-{number}")
    quotas = policy_of(tier).quotas
    assert len(quotas.salts) <= tier.num_chunks
    assert len(quotas.ends_of_new) <= 2 * tier.num_chunks + 64
    tier.manager.reset_cache()
    assert not quotas.salts
    assert (quotas.of_new, len(quotas.ends_of_new)) == (0, 0)


def test_the_heap_of_a_salt_is_as_large_as_what_the_salt_holds() -> None:
    tier = Tier({"salt_share": 0.9}, num_chunks=1000)
    tier.turn("big", *(f"b{number}" for number in range(800)), at=0.0, salt="big")
    for number in range(500):
        small = tier.turn("small", "s0", at=1.0 + number, salt="small")
    ends = policy_of(tier).quotas.ends(small.salt_tag)
    assert ends is not None
    assert len(ends) <= 2 + 64


def test_a_client_that_changes_its_salt_has_one_share() -> None:
    """Each salt had a share of its own, so a client with a new one for each request took the whole tier."""
    tier = Tier({"salt_share": 0.5})
    for at in (0.0, 1.0):
        tier.turn("quiet", "q0", "q1", "q2", at=at, salt="quiet")
    for number in range(20):
        tier.turn("loud", f"{number}-0", f"{number}-1", at=2.0 + number, salt=f"loud-{number}")
        tier.check()
    assert tier.has("q0", "q1", "q2")
    assert tier.has("19-0", "19-1", "18-0", "18-1")


def test_new_salts_take_what_nobody_else_wants() -> None:
    tier = Tier({"salt_share": 0.25})
    for number in range(8):
        tier.turn("a", f"{number}", at=float(number), salt=f"salt-{number}")
    assert tier.has(*map(str, range(8)))


def test_lives_that_end_at_once_end_in_several_steps() -> None:
    """Else a client had thousands of conversations dropped in one step, all others waiting."""
    tier = Tier(num_chunks=400)
    for number in range(300):
        tier.turn(f"c{number}", f"{number}", at=0.0, salt="s", kv_ttl_s=1.0)
    ended = []
    for step in range(6):
        tier.keeper.sweep(5.0 + step)
        ended.append(tier.keeper.expired)
    assert ended == [64, 128, 192, 256, 300, 300]
    tier.check()
