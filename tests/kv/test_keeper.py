"""Times to live, quotas and drops on the real books of the tier: no client does anything to the KV of others."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vllm_ext.kv.conversations.conversation import ConversationBook
from vllm_ext.kv.eviction.retention import RetentionCachePolicy

from .keeper_parts import CHUNK, Tier, key

OURS = ("retention", "tail", "leading")
HALF = {"salt_share": 0.5}
MANY_TURNS = [turn for n in range(200) for turn in (f"once-{n}: x{n} @{n}", f"often-{n // 10}: y{n // 10} @{n + 0.5}")]


@pytest.mark.parametrize(
    ("tier", "turns", "there", "gone"),
    [
        pytest.param(
            Tier({"ttl_s": 10.0}), ["a: a0 a1 @0", "b: b0 @5", "c: c0 @10"], "b0 c0", "a0 a1", id="its-time-is-over"
        ),
        pytest.param(
            Tier({"ttl_s": 10.0}), ["a: a0 @0 salt=s ttl=2", "b: b0 @2"], "b0", "a0", id="its-client-wants-it-earlier"
        ),
        pytest.param(  # B sent A's session_id with kv_ttl_s: 1e-6, and A's KV was gone in the next step
            Tier(), ["a: a0 a1 @0", "a: b0 @1 ttl=1e-6", "c: c0 @5"], "a0 a1 b0", "", id="nobody-ends-it-without-a-salt"
        ),
        *(
            pytest.param(  # under `leading` the front that B had used last went with B
                Tier(policy=policy),
                ["a: front a1 @0 salt=s", "b: front b1 @1 salt=s ttl=1", "c: c0 @5"],
                "front a1 c0", "b1", id=f"what-two-share-lives-as-long-as-the-longer-lived-{policy}",
            )
            for policy in OURS
        ),
        pytest.param(
            Tier(HALF),
            ["q: q0 q1 @0 salt=q", *(f"c{n}: {n}-0 {n}-1 @{1 + n} salt=loud" for n in range(10))],
            "q0 q1 9-0 9-1 8-0 8-1", "7-0 7-1", id="a-salt-beyond-its-quota-loses-its-own",
        ),
        pytest.param(Tier(HALF), ["a: x @0 salt=s", "b: x y @1 salt=t"], "x y", "", id="it-counts-for-its-last-user"),
        pytest.param(
            Tier(HALF), ["a: b0 b1 b2 b3 b4 b5 b6 @0 salt=s"], "b0 b1 b2 b3", "b4", id="stored-up-to-its-quota"
        ),
        pytest.param(
            Tier({"salt_share": 0.01}), ["a: a0 a1 @0 salt=s"], "a0", "a1", id="a-quota-is-a-chunk-at-least"
        ),
        pytest.param(  # each salt had a share of its own, so one client could take the whole tier
            Tier(HALF),
            [*["q: q0 q1 q2 @0 salt=q"] * 2, *(f"l: {n}-0 {n}-1 @{2 + n} salt=l{n}" for n in range(20))],
            "q0 q1 q2 19-0 19-1 18-0 18-1", "0-0", id="new-salts-have-one-share",
        ),
        pytest.param(
            Tier({"salt_share": 0.25}), [f"a: {n} @{n} salt=s{n}" for n in range(8)],
            " ".join(map(str, range(8))), "", id="new-salts-take-what-nobody-else-wants",
        ),
        *(
            pytest.param(
                Tier(num_chunks=8, policy=policy),
                ["o: o0 o1 @0", "a: a0 t0 t1 @100 generated=2", "a: a0 answer a2 @101", "b: b0 b1 b2 @102"],
                "o0 o1 a0 answer a2 b0 b1 b2", "t0 t1", id=f"the-branch-that-a-turn-leaves-behind-goes-first-{policy}",
            )
            for policy in OURS
        ),
        pytest.param(
            Tier(),
            ["a: a0 t0 t1 @0 generated=2", "b: a0 t0 b1 @1", "a: a0 answer @2", "c: c0 c1 c2 c3 @3"],
            "a0 t0 b1 answer", "t1", id="a-branch-that-another-one-goes-on-with-stays",
        ),
        pytest.param(
            Tier(policy="tail", num_chunks=4, cost=lambda end: 1e6 if end > CHUNK else 1.0),
            ["a: a0 a1 @0", "b: b0 b1 @1", "c: c0 @2"], "a0 b0 b1 c0", "a1", id="under-tail-the-oldest-goes",
        ),
    ],
)  # fmt: skip
def test_what_stays_and_what_goes(tier: Tier, turns: list[str], there: str, gone: str) -> None:
    tier.turns(*turns)
    assert tier.there(there, gone) == (there.split(), [])


@pytest.mark.parametrize(("returns", "gone"), [("turns", "once-1"), ("age", "often-1")])
def test_who_has_come_back_often_is_expected_to_come_again(returns: str, gone: str) -> None:
    tier = Tier({"returns": returns}, num_chunks=6)
    tier.turns(*MANY_TURNS)
    tier.manager.reset_cache()
    tier.turns("often-0: often-1 @300", "once: once-1 @300.5", "d: d0 d1 d2 d3 @310", "e: e0 @310.1")
    assert [name for name in ("once-1", "often-1") if not tier.has(name)] == [gone]


def test_what_others_own_is_not_dropped_with_a_conversation() -> None:
    tier = Tier()
    first, second, third = (tier.turn(name, "system", f"{name}1", at=at) for at, name in enumerate("abc"))
    assert tier.keeper.drop(third) == 1, "the others own the first chunk, which it had used last"
    assert tier.keeper.drop(first) == 1
    assert tier.has("system", "b1")
    tier.check()
    assert tier.keeper.drop(second) == 2
    assert (tier.has("system"), tier.keeper.dropped) == (False, 3)
    assert tier.keeper.states() == {"running": 0, "kept": 0, "gone": 3}
    tier.check()


def test_what_a_copy_uses_goes_first_after_it() -> None:
    tier = Tier()
    tier.turns("o: o0 @0")
    conversation = tier.turn("a", "a0", "a1", at=5.0)
    chunk: Any = tier.manager.policy.get(key("a1"))
    chunk.ref_cnt = 1
    assert tier.keeper.drop(conversation) == 0, "the first chunk would be no use without the other"
    chunk.ref_cnt = 0
    tier.manager.policy.mark_evictable(key("a1"))
    tier.turns("b: b0 b1 b2 b3 b4 b5 b6 @9")
    assert tier.there("o0 a0 a1") == (["o0"],)


def test_of_many_owners_those_are_remembered_whose_lives_end_last() -> None:
    tier = Tier({"ttl_s": 100.0}, num_chunks=40)
    tier.turns("long: system l1 @0 salt=s", *(f"c{n}: system @1 salt=s ttl=1" for n in range(20)))
    policy: Any = tier.manager.policy
    assert len(policy._nodes[key("system")].owners) == 4
    tier.turns("o: o0 @50")
    assert tier.has("system", "l1"), "all others are over"
    assert tier.keeper.expired == 20
    tier.turns("o: o0 @100")
    assert not tier.has("system")


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_vllms_own_policies_are_left_alone(policy: str) -> None:
    tier = Tier(policy=policy)
    conversation = tier.turn("a", "a0", at=0.0)
    assert (tier.keeper.drop(conversation), tier.has("a0"), conversation.turns) == (0, True, 1)


def test_a_client_only_shortens_a_life_and_is_told_what_it_may_not_ask_for() -> None:
    tier, told = Tier({"ttl_s": 10.0}), []
    tier.keeper.on_bad_hint = lambda req_id, problem: told.append((req_id, problem.field))
    ttls = [
        tier.turn(name, "x", at=0.0, salt=salt, kv_ttl_s=ttl).ttl_s
        for name, salt, ttl in [("a", "s", 2.0), ("a", "s", 9.0), ("b", "s", 11.0), ("c", "s", 10.0), ("d", "", 1.0)]
    ]
    assert ttls == [2.0, 2.0, 10.0, 10.0, 10.0]
    assert told == [("request-0.0-b", "kv_ttl_s"), ("request-0.0-d", "kv_ttl_s")], "too long, and without a salt"
    assert [c.name for c in tier.keeper.book.after(0)] == ["a", "b", "c", "d"], "their other hints are followed"
    assert Tier().turn("free", "f0", at=1.0, salt="s", kv_ttl_s=100.0).ttl_s == 100.0, "there never is for ever"
    malformed = Tier().turn(None, "a0", at=0.0, salt="s", conversation_id=7, kv_ttl_s=1.0)
    assert (malformed.name, malformed.ttl_s) == (None, math.inf)


def test_a_client_does_not_name_an_anonymous_conversation() -> None:
    """``unnamed-1`` could be joined, and its life ended."""
    book = ConversationBook()
    anonymous = book.enter(None, "", [key("x")], 0.0)
    for name in ("unnamed-0", "unnamed-1", "", "None"):
        assert book.enter(name, "", [key("y")], 1.0, ttl_s=1.0) is not anonymous
    assert (anonymous.running, anonymous.ttl_s) == (1, math.inf)


def test_a_salt_leaves_nothing_behind() -> None:
    tier = Tier(HALF)
    tier.turns(*(f"a: a{number} @{number} salt=salt-{number}" for number in range(100)))
    assert isinstance(tier.manager.policy, RetentionCachePolicy)
    quotas = tier.manager.policy.quotas
    assert len(quotas.salts) <= tier.num_chunks
    assert len(quotas.ends_of_new) <= 2 * tier.num_chunks + 64
    tier.manager.reset_cache()
    tier.check()
    assert (quotas.salts, quotas.of_new, len(quotas.ends_of_new)) == ({}, 0, 0)
    assert not any(conversation.keys for conversation in tier.keeper.book.after(0))


def test_the_heap_of_a_salt_is_as_large_as_what_the_salt_holds() -> None:
    tier = Tier({"salt_share": 0.9}, num_chunks=1000)
    tier.turn("big", *(f"b{number}" for number in range(800)), at=0.0, salt="big")
    for number in range(500):
        small = tier.turn("small", "s0", at=1.0 + number, salt="small")
    policy: Any = tier.manager.policy
    assert len(policy.quotas.ends(small.salt_tag)) <= 2 + 64


@pytest.mark.parametrize(
    ("conversations", "chunks", "ended"), [(300, 1, [64, 128, 192, 256, 300, 300]), (20, 100, [6, 12, 18, 20])]
)
def test_lives_that_end_at_once_end_in_several_steps(conversations: int, chunks: int, ended: list[int]) -> None:
    """Else a client had thousands of conversations dropped in one step, all others waiting."""
    tier = Tier(num_chunks=2000)
    for number in range(conversations):
        tier.turn(f"c{number}", *(f"{number}-{n}" for n in range(chunks)), at=0.0, salt="s", kv_ttl_s=1.0)
    found = []
    for step in range(len(ended)):
        tier.keeper.sweep(5.0 + step)
        found.append(tier.keeper.expired)
    assert found == ended
    tier.check()
