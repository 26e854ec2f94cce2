"""Who is evicted under the retention value: by hand, and against a plain search over all chunks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from vllm_ext.kv.eviction.retention import LastUse, LeadingCachePolicy, RetentionCachePolicy, default_cost

from .keeper_parts import CHUNK, in_order, key

LONG = " ".join(f"b{i}" for i in range(256))
CHEAP, DEAR = default_cost(76), default_cost(9741)
"""In the middle of the classes of ends of 64 and 8192 tokens, the 12th and 26th half octaves."""


class Script:
    """A policy that is told what happens, one line each: the time, what, and the chunks of a prefix."""

    def __init__(self, kind: Callable[[int], RetentionCachePolicy] = RetentionCachePolicy) -> None:
        self.policy, self.now = kind(1000), 0.0
        self.policy.clock = lambda: self.now

    def run(self, *lines: str) -> None:
        for line in lines:
            now, action, *words = line.split()
            self.now = float(now)
            getattr(self, action)(*words)

    def store(self, *names: str) -> None:
        self.copy(in_order([key(name) for name in names]), *names)

    def copy(self, context: ReqContext, *names: str) -> None:
        self.policy.announce(context)
        for name in names:
            if self.policy.get(key(name)) is None:
                chunk = ChunkStatus(0)
                self.policy.insert(key(name), chunk)
                chunk.ref_cnt = 0
                self.policy.mark_evictable(key(name))

    def late(self, used: str, name: str) -> None:
        """Copy a chunk whose request used it then and has ended; vLLM's manager touches it once more."""
        context = in_order([key(name)])
        context.set_state(LastUse({key(name): float(used)}))
        self.copy(context, name)
        self.policy.touch([key(name)], context)

    def lone(self, name: str) -> None:
        """Store a chunk of which nobody knows the prefix."""
        self.copy(ReqContext(req_id="r"), name)

    def use(self, *names: str) -> None:
        self.policy.touch([key(name) for name in names], in_order([key(name) for name in names]))

    def hold(self, name: str, copies: str) -> None:
        chunk = self.policy.get(key(name))
        assert chunk is not None
        chunk.ref_cnt = int(copies)
        if not chunk.ref_cnt:
            self.policy.mark_evictable(key(name))

    def remove(self, name: str) -> None:
        self.policy.remove(key(name))

    def clear(self) -> None:
        self.policy.clear()

    def evict(self, count: str, *words: str) -> None:
        """``3 = c b a``, or nothing; ``- x`` before that protects x."""
        place = words.index("=")
        found = self.policy.evict(int(count), {key(name) for name in words[1:place]})
        assert names_of(found) == list(words[place + 1 :])


def names_of(found: list[tuple[OffloadKey, ChunkStatus]] | None) -> list[str]:
    return [key[:-4].decode() for key, _ in found or ()]


RETENTION = {
    "from-its-tail": ["0 store a1 a2 a3", "10 evict 2 = a3 a2", "11 evict 1 = a1", "12 evict 1 ="],
    "short-ones-are-cheap": [f"0 store {LONG}", "10 store a1 a2", "40 evict 1 = a2"],
    "but-not-when-young": [f"0 store {LONG}", "30 store a1 a2", "40 evict 1 = b255"],
    "what-many-share-stays": ["0 store s a", "50 store s b", "60 evict 1 = a", "60 evict 2 = b s"],
    "use-makes-young": ["0 store a", "1 store b", "5 use a", "6 evict 1 = b"],
    "a-copy-brings-the-time-of-use": ["5 store b", "600 late 1 a", "601 evict 1 = a", "601 evict 1 = b"],
    "a-copy-makes-nothing-older": ["3 store a", "5 store b", "5 late 1 b", "6 evict 1 = a"],
    "what-is-used-or-protected-stays": [
        "0 store a1 a2", "5 store b", "6 hold a2 1", "10 evict 2 =", "10 evict 1 - b =", "10 evict 1 = b",
        "11 hold a2 0", "11 evict 1 - a2 =", "11 evict 2 = a2 a1",
    ],
    "what-cannot-be-found-goes": [
        "0 store old", "100 store a1 a2 a3", "100 remove a2", "101 evict 1 = a3", "102 store a1 a2",
        "103 evict 2 = old a2",
    ],
    "of-an-unknown-prefix": ["0 lone x", "1 evict 1 = x"],
    "cleared": ["0 store a1 a2", "0 clear", "1 evict 1 =", "2 store a2", "3 evict 1 = a2"],
}  # fmt: skip
LEADING = {
    "the-leading-end-goes": [
        "0 store s a2 a3 a4", "50 store s b2 b3", "50 use s b2 b3", "60 evict 2 = a2 a3", "70 evict 4 = a4 s b2 b3"
    ],
    "and-takes-nothing-along": [
        "0 store a1 a2 a3", "5 store b1", "5 remove a1", "10 use a2 a3", "11 evict 1 = b1", "12 evict 2 = a2 a3"
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        pytest.param(kind, lines, id=name)
        for kind, table in ((RetentionCachePolicy, RETENTION), (LeadingCachePolicy, LEADING))
        for name, lines in table.items()
    ],
)
def test_who_goes(kind: type[RetentionCachePolicy], lines: list[str]) -> None:
    assert CHEAP / 10.0 > DEAR / 40.0 > CHEAP / 30.0, "what the rows with long prefixes go by"
    Script(kind).run(*lines)


@pytest.mark.parametrize("seed", range(4))
def test_it_evicts_what_a_search_over_all_chunks_would(seed: int) -> None:
    """Random conversations over a shared start: the tail of least value, classes of cost apart."""
    rng, script = random.Random(seed), Script()
    prefixes = [["s0", "s1"] + [f"{who}-{i}" for i in range(rng.randint(1, 40))] for who in range(12)]
    used: dict[str, float] = {}
    ends = {name: (i + 1) * CHUNK for prefix in prefixes for i, name in enumerate(prefix)}
    for _ in range(300):
        script.now += rng.expovariate(1.0)
        prefix = rng.choice(prefixes)
        there = next((i for i, name in enumerate(prefix) if name not in used), len(prefix))
        if rng.random() < 0.6:
            length = min(len(prefix), there + rng.randint(1, 6))
            script.use(*prefix[:there])
            script.store(*prefix[:length])
            used.update(dict.fromkeys(prefix[:length], script.now))
        elif used:
            script.now += 1.0
            (gone,) = names_of(script.policy.evict(1, set()))
            followed = {prefix[i - 1] for prefix in prefixes for i, name in enumerate(prefix) if i and name in used}
            value = {n: default_cost(ends[n]) / (script.now - at) for n, at in used.items() if n not in followed}
            assert value[gone] <= min(value.values()) * 1.42, "within a class costs differ by less than half an octave"
            del used[gone]
    assert len(script.policy._tails) < 4 * len(ends) + 64 * 12
