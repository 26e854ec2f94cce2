"""Who is evicted under the retention value: by hand, and against a plain search over all chunks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from vllm_ext.kv.eviction.retention import Chain, LastUse, LeadingCachePolicy, RetentionCachePolicy, default_cost

CHUNK = 32


def key(name: str) -> OffloadKey:
    return make_offload_key(name.encode(), 0)


def name_of(found: OffloadKey) -> str:
    return found[:-4].decode()


@dataclass
class Tier:
    """A policy whose time stands where it is set."""

    now: float = 0.0
    policy: RetentionCachePolicy = field(default_factory=lambda: RetentionCachePolicy(1000))

    def __post_init__(self) -> None:
        self.policy.clock = lambda: self.now

    def store(self, *names: str, at: float, first: int = 0) -> None:
        """Insert the chunks of a prefix, of which the first ``first`` are there already."""
        self.now = at
        context = request(names)
        self.policy.announce(context)
        for number, name in enumerate(names[first:]):
            chunk = ChunkStatus(number)
            self.policy.insert(key(name), chunk)
            chunk.ref_cnt = 0
            self.policy.mark_evictable(key(name))

    def use(self, *names: str, at: float) -> None:
        self.now = at
        self.policy.touch([key(name) for name in names], request(names))

    def evict(self, count: int, *, at: float, protected: Sequence[str] = ()) -> list[str] | None:
        self.now = at
        found = self.policy.evict(count, {key(name) for name in protected})
        return None if found is None else [name_of(key) for key, _ in found]


def request(names: Sequence[str]) -> ReqContext:
    """A request whose prefix these chunks are."""
    context = ReqContext(req_id="r")
    keys = [key(name) for name in names]
    for number, found in enumerate(keys):
        context.set_offload_key_position(found, (number + 1) * CHUNK)
    context.set_state(Chain({0: keys}, {0: CHUNK}))
    return context


def test_a_conversation_shrinks_from_its_tail() -> None:
    tier = Tier()
    tier.store("a1", "a2", "a3", at=0.0)
    assert tier.evict(2, at=10.0) == ["a3", "a2"]
    assert tier.evict(1, at=11.0) == ["a1"]
    assert tier.evict(1, at=12.0) is None


def test_the_one_that_is_cheaper_for_its_age_goes() -> None:
    """Cost(l) / T with the cost of the middle of a class; ends of 64 and 8192 tokens, 12 and 26 half octaves."""
    long = [f"b{i}" for i in range(256)]
    cheap, dear = default_cost(76), default_cost(9741)
    assert dear / cheap == pytest.approx(2.17, abs=0.01)
    for idle_of_short, goes in ((10.0, "b255"), (30.0, "a2")):  # the long one was idle for 40 s
        tier = Tier()
        tier.store(*long, at=0.0)
        tier.store("a1", "a2", at=40.0 - idle_of_short)
        assert tier.evict(1, at=40.0) == [goes]
        assert (cheap / idle_of_short < dear / 40.0) == (goes == "a2")


def test_what_many_share_stays_while_one_of_them_does() -> None:
    tier = Tier()
    tier.store("s", "a", at=0.0)
    tier.store("s", "b", at=50.0, first=1)
    assert tier.evict(1, at=60.0) == ["a"]
    assert tier.evict(2, at=60.0) == ["b", "s"]


def test_use_makes_young() -> None:
    tier = Tier()
    tier.store("a", at=0.0)
    tier.store("b", at=1.0)
    tier.use("a", at=5.0)
    assert tier.evict(1, at=6.0) == ["b"]


def test_a_copy_brings_the_time_of_the_last_use_with_it() -> None:
    tier = Tier()
    tier.store("b", at=5.0)
    copied = request(["a"])
    copied.set_state(LastUse({key("a"): 1.0}))
    tier.now = 600.0
    tier.policy.announce(copied)
    tier.policy.insert(key("a"), ChunkStatus(7))
    tier.policy.touch([key("a")], copied)  # vLLM's manager does when the copy's request ends
    chunk = tier.policy.get(key("a"))
    assert chunk is not None
    chunk.ref_cnt = 0
    tier.policy.mark_evictable(key("a"))
    assert tier.evict(1, at=601.0) == ["a"]
    assert tier.evict(1, at=601.0) == ["b"]


def test_a_copy_makes_nothing_older() -> None:
    tier = Tier()
    tier.store("a", at=3.0)
    tier.store("b", at=5.0)
    copied = request(["b"])
    copied.set_state(LastUse({key("b"): 1.0}))
    tier.policy.touch([key("b")], copied)
    assert tier.evict(1, at=6.0) == ["a"]


def test_chunks_in_use_or_protected_stay_and_so_does_what_they_follow() -> None:
    tier = Tier()
    tier.store("a1", "a2", at=0.0)
    tier.store("b", at=5.0)
    chunk = tier.policy.get(key("a2"))
    assert chunk is not None
    tier.policy.mark_non_evictable(key("a2"))
    chunk.ref_cnt = 1
    assert tier.evict(2, at=10.0) is None, "all or nothing"
    assert tier.evict(1, at=10.0, protected=["b"]) is None
    assert tier.evict(1, at=10.0) == ["b"]
    chunk.ref_cnt = 0
    tier.policy.mark_evictable(key("a2"))
    assert tier.evict(1, at=11.0, protected=["a2"]) is None
    assert tier.evict(2, at=11.0) == ["a2", "a1"]


def test_what_cannot_be_found_any_more_goes_first() -> None:
    """A chunk that could not be read is removed from the middle of a prefix."""
    tier = Tier()
    tier.store("old", at=0.0)
    tier.store("a1", "a2", "a3", at=100.0)
    tier.policy.remove(key("a2"))
    assert tier.evict(1, at=101.0) == ["a3"]
    tier.store("a1", "a2", at=102.0, first=1)
    assert tier.evict(2, at=103.0) == ["old", "a2"]


def test_chunks_of_nobody_knows_what_prefix_can_go() -> None:
    tier = Tier()
    chunk = ChunkStatus(0)
    tier.policy.announce(ReqContext(req_id="r"))
    tier.policy.insert(key("x"), chunk)
    chunk.ref_cnt = 0
    tier.policy.mark_evictable(key("x"))
    assert tier.evict(1, at=1.0) == ["x"]


def test_a_cleared_policy_is_empty() -> None:
    tier = Tier()
    tier.store("a1", "a2", at=0.0)
    tier.policy.clear()
    assert tier.policy.get(key("a1")) is None
    assert tier.evict(1, at=1.0) is None


@pytest.mark.parametrize("seed", range(4))
def test_it_evicts_what_a_search_over_all_chunks_would(seed: int) -> None:
    """Random conversations over a shared start: the tail of least value, classes of cost apart."""
    rng = random.Random(seed)
    tier = Tier()
    prefixes = [["s0", "s1"] + [f"{who}-{i}" for i in range(rng.randint(1, 40))] for who in range(12)]
    used: dict[str, float] = {}
    ends = {name: (i + 1) * CHUNK for prefix in prefixes for i, name in enumerate(prefix)}
    now = 0.0
    for _ in range(300):
        now += rng.expovariate(1.0)
        prefix = rng.choice(prefixes)
        there = next((i for i, name in enumerate(prefix) if name not in used), len(prefix))
        if rng.random() < 0.6:
            tier.use(*prefix[:there], at=now)
            used.update(dict.fromkeys(prefix[:there], now))
            length = min(len(prefix), there + rng.randint(1, 6))
            tier.store(*prefix[:length], at=now, first=there)
            used.update(dict.fromkeys(prefix[there:length], now))
        elif used:
            now += 1.0
            (gone,) = tier.evict(1, at=now) or [""]
            followed = {prefix[i - 1] for prefix in prefixes for i, name in enumerate(prefix) if i and name in used}
            value = {name: default_cost(ends[name]) / (now - at) for name, at in used.items() if name not in followed}
            assert gone in value
            assert value[gone] <= min(value.values()) * 1.42, "within a class costs differ by less than half an octave"
            del used[gone]
    assert len(tier.policy._tails) < 4 * len(ends) + 64 * 12


def test_where_gaps_are_crossed_leading_ends_go_first() -> None:
    tier = Tier(policy=LeadingCachePolicy(1000))
    tier.store("s", "a2", "a3", "a4", at=0.0)
    tier.store("s", "b2", "b3", at=50.0, first=1)
    tier.use("s", "b2", "b3", at=50.0)
    assert tier.evict(2, at=60.0) == ["a2", "a3"], "what both share was used with the second one"
    assert tier.evict(4, at=70.0) == ["a4", "s", "b2", "b3"]


def test_a_chunk_that_is_gone_takes_nothing_along_where_gaps_are_crossed() -> None:
    tier = Tier(policy=LeadingCachePolicy(1000))
    tier.store("a1", "a2", "a3", at=0.0)
    tier.store("b1", at=5.0)
    tier.policy.remove(key("a1"))
    tier.use("a2", "a3", at=10.0)
    assert tier.evict(1, at=11.0) == ["b1"]
    assert tier.evict(2, at=12.0) == ["a2", "a3"]
