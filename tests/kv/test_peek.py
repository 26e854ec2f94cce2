"""A look-up that changes nothing says what the real one is about to say."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult

from tests.support.tier_rig import quiet
from tests.support.tier_walk import STEPS_PER_ENGINE, walk
from tests.support.upstream import needs
from vllm_ext.kv.connector.scheduler import TierScheduler
from vllm_ext.kv.disk.manager import PATIENCE_S
from vllm_ext.kv.partial_prefix.search import Kept

from .disk_parts import contents, key, rig
from .fingerprint import fingerprint
from .gap_talks import BLOCK, DEPTHS, Talks, words

_LOOKED_AT = 23
"""Of so many look-ups one is compared with all that can be reached before and after: that takes long."""


class Compared:
    """Asks `peek` before each of vLLM's look-ups in a tier, and compares."""

    def __init__(self, side: Any) -> None:
        self.side = side
        self.answers: set[str] = set()
        self._real = side.get_num_new_matched_tokens
        self._count = 0
        side.get_num_new_matched_tokens = self._ask

    def _ask(self, request: Any, local_tokens: int, *limit: Any, **named: Any) -> Any:
        self._count += 1
        self.side._req_status[request.request_id].update_offload_keys()  # which each look-up may do
        exact = self._count % _LOOKED_AT == 0
        before = fingerprint(vars(self.side)) if exact else ""
        peeked = self.side.peek(request, local_tokens)
        again, can_tell = self.side.peek(request, local_tokens), self.side.can_tell(request, local_tokens)
        if exact:
            assert fingerprint(vars(self.side)) == before, "a look-up that changes nothing did"
        tokens, between = self._real(request, local_tokens, *limit, **named)
        assert peeked == again == (tokens or 0, between and bool(tokens))
        assert can_tell is (tokens is not None)
        self.answers.add("later" if tokens is None else "between" if between else "within" if tokens else "nothing")
        return tokens, between


@pytest.mark.parametrize(("load", "ways"), [("between", {"between"}), ("in-step", {"within"}), ("auto", {"within"})])
def test_it_agrees_with_the_real_look_up_whatever_happens(load: str, ways: set[str]) -> None:
    """In engines of all kinds: stores, policies, failures, resets, preemptions, requests that share prefixes."""
    compared: list[Compared] = []
    walk(
        3 * STEPS_PER_ENGINE,
        6,
        steps_per_engine=STEPS_PER_ENGINE // 4,
        watch=lambda rig: compared.append(Compared(rig.side)),
        load=load,
    )
    assert {kind for one in compared for kind in one.answers} >= {"nothing", "later", *ways}


def test_a_request_may_bound_what_is_loaded_or_ask_not_to_read() -> None:
    rig = quiet(load="between")
    rig.leave_on_host(range(100, 124))
    rig.add(range(100, 130), 1)
    request = rig.scheduler.requests["r1"]
    assert rig.side.peek(request, 0) == (24, True)
    assert rig.side.peek(request, 4) == (20, True)
    assert rig.side.peek(request, 0, 12) == (12, True)
    rig.side._req_status["r1"].max_load_tokens = 18
    assert rig.side.peek(request, 0) == (16, True), "whole chunks only"
    request.skip_reading_prefix_cache = True
    assert rig.side.peek(request, 0) == (0, False)
    rig.drain()
    assert rig.side.peek(request, 0) == (0, False), "nobody knows it any more"


def test_no_chunk_behind_the_first_missing_one_is_looked_for() -> None:
    rig = quiet(load="between")
    rig.leave_on_host(range(100, 112))
    rig.add([*range(100, 112), *range(200, 240)], 1)
    asked: list[Any] = []
    get = rig.side.manager.policy.get
    rig.side.manager.policy.get = lambda chunk: asked.append(chunk) or get(chunk)
    assert rig.side.peek(rig.scheduler.requests["r1"], 0) == (12, True)
    assert len(asked) == 4


@needs("kv-disk")
def test_what_is_on_disk_only_is_not_brought_back(tmp_path: Path) -> None:
    with rig(tmp_path) as tiers:
        context = tiers.request(*range(4))
        assert tiers.store(context, *range(4))
        tiers.step()
    with rig(tmp_path) as tiers:
        context = tiers.request(*range(4))
        books = (vars(tiers.manager.host), tiers.manager._awaited, tiers.manager._pending_load_submissions)
        before = fingerprint(*books)
        assert tiers.manager.peek(key(0)) is LookupResult.MISS
        assert fingerprint(*books) == before
        assert tiers.lookup(context, 0) == [LookupResult.HIT_PENDING]
        assert fingerprint(*books) != before, "the real one brings it back, and that shows"
        assert tiers.manager.peek(key(0)) is LookupResult.HIT_PENDING
        tiers.clock.now += PATIENCE_S + 1.0
        assert tiers.manager.peek(key(0)) is LookupResult.MISS
        tiers.step()
        tiers.step()
        assert tiers.lookup(context, 0) == [LookupResult.HIT]
        assert tiers.manager.peek(key(0)) is LookupResult.HIT


@needs("kv-disk")
def test_a_look_up_behind_gaps_leaves_on_disk_what_it_cannot_wait_for(tmp_path: Path) -> None:
    """It began to bring chunks back, which took room from others, and the plan computed them again all the same."""
    with rig(tmp_path) as tiers:
        context = tiers.request(*range(3))
        assert tiers.store(context, *range(3))
        tiers.step()
    with rig(tmp_path) as tiers:
        context = tiers.request(*range(3))
        assert tiers.load(context, 1) == contents(1)
        keys = [key(number) for number in range(3)]
        config = SimpleNamespace(kv_group_configs=[SimpleNamespace(hashes_per_chunk=1)])
        state = SimpleNamespace(offload_keys=keys, block_ids=[])
        status = SimpleNamespace(
            config=config,
            group_states=[state],
            req=SimpleNamespace(block_hashes=[]),
            req_context=context,
            update_offload_keys=lambda: None,
        )
        side: Any = SimpleNamespace(_req_status={"r": status}, config=config, manager=tiers.manager)
        request: Any = SimpleNamespace(request_id="r")
        assert TierScheduler.held_blocks(side, request, range(4)) == {1}
        assert tiers.manager._awaited == {}


@DEPTHS
@pytest.mark.parametrize("seed", range(2))
def test_what_is_kept_behind_gaps_agrees_too(depth: int, seed: int) -> None:
    rng = random.Random(seed)
    talks = Talks(depth=depth, num_blocks=44, max_num_batched_tokens=96, max_model_len=448)
    gaps, pool = talks.scheduler.gaps, talks.pool
    real, found = gaps.kept_tokens, []

    def compared(request: Any, num_hit_tokens: int) -> int:
        books = (talks.manager.placements, talks.manager.searches, gaps.counts)
        before = fingerprint(*books, [block.ref_cnt for block in pool.blocks], pool.get_num_free_blocks())
        peeked = gaps.peek(request, num_hit_tokens)
        assert gaps.peek(request, num_hit_tokens) == peeked
        after = fingerprint(*books, [block.ref_cnt for block in pool.blocks], pool.get_num_free_blocks())
        assert after == before
        tokens: int = real(request, num_hit_tokens)
        assert peeked.tokens == tokens
        placement = talks.manager.placements.get(request.request_id)
        counts = [block.ref_cnt for block in placement.reused.values()] if placement is not None else []
        assert [peeked.held_blocks, peeked.idle_blocks] == [sum(map(bool, counts)), counts.count(0)]
        found.append(peeked)
        return tokens

    gaps.kept_tokens = compared
    talks.walk(rng, words(99, 6 * BLOCK), clients=3, lose=1.0)
    assert any(kept.idle_blocks for kept in found)


def test_blocks_that_others_hold_are_told_from_idle_ones() -> None:
    """Another request runs on the first eight blocks, of which the third is found no more: so there is a gap."""
    talks = Talks(num_blocks=64, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.history["b"] = talks.history["a"][: 8 * BLOCK]
    talks.say("b", words(2, 40), answer=30)
    talks.step()
    blocks = talks.manager.req_to_blocks["b1"]
    talks.pool.evict_blocks({blocks[2].block_id})
    twin = talks.say("a", words(3, 20))
    request = talks.scheduler.requests[twin]
    assert talks.scheduler.gaps.peek(request, 2 * BLOCK) == Kept(11 * BLOCK, held_blocks=5, idle_blocks=4)
    talks.drain()
