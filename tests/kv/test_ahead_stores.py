"""Which copies of idle chunks a step waits for: those that save more than they take."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

from tests.support.tier_audit import resident
from tests.support.tier_rig import BLOCK_SIZE, BYTES_PER_S, MIN_BLOCKS, TierRig, quiet
from vllm_ext.kv.connector.ahead_stores import AheadStores, IdleChunk
from vllm_ext.kv.connector.prices import Bandwidth
from vllm_ext.kv.conversations.conversation import Conversation, Turn
from vllm_ext.kv.eviction.retention import Chain

PROMPT = 8 * BLOCK_SIZE
CROWDED = MIN_BLOCKS + 2
"""Room for two requests, and nothing else."""
ROOMY = 20 * MIN_BLOCKS


def rig(*, num_blocks: int = CROWDED, recompute: float) -> TierRig:
    """An engine that runs two requests; computing a chunk again takes so many times as long as copying it out."""
    found = quiet(store="ahead", num_blocks=num_blocks, host_chunks=500, max_num_seqs=2)
    found.side.prices.out.observe(BYTES_PER_S, 1.0)
    price(found, lambda end: recompute * found.side.prices.store_s(found.side.prices.chunk_tokens))
    return found


def price(found: TierRig, recompute_s: Callable[[int], float]) -> None:
    found.side.stores.use(found.clock, recompute_s)


def nobody_comes_back(found: TierRig) -> None:
    """Let the tier have seen a thousand first turns that no other followed."""
    for _ in range(1000):
        found.side.keeper.book.returns.ended(1)


def ask(found: TierRig, number: int) -> str:
    return found.add(range(1000 * number, 1000 * number + PROMPT), 2, session=f"s{number}")


def idle(key: OffloadKey | str, running: int = 0, length: int = 1) -> IdleChunk:
    """A chunk of so many of a conversation that had one turn, and of which so many requests are there."""
    found_key = make_offload_key(key.encode(), 0) if isinstance(key, str) else key
    owner = ReqContext("owner")
    owner.set_state(Turn(Conversation(1, "c", "", turns=1, running=running)))
    owner.set_state(Chain({0: [found_key] * length}, {0: BLOCK_SIZE}))
    return IdleChunk(found_key, 1, BlockHash(b""), owner, 0.0)


def state(found: TierRig) -> dict[str, Any]:
    read: dict[str, Any] = found.scheduler.vllm_ext_state()["kv_tier"]
    return read


def serve(found: TierRig, questions: int) -> None:
    for number in range(questions):
        ask(found, number)
    found.settle()


def test_what_is_hardly_asked_for_again_is_not_waited_for() -> None:
    found = rig(recompute=5.0)
    nobody_comes_back(found)
    serve(found, 60)
    counts = state(found)
    assert counts["unsaved_chunks"] > 2 * counts["stored_chunks"], "in steps with memory to spare"
    found.drain()


@pytest.mark.parametrize(
    ("recompute", "known"),
    [(5.0, False), (1000.0, True)],
    ids=["until-something-is-seen-all-may-come-back", "what-takes-long-to-compute-again"],
)
def test_what_pays_is_waited_for(recompute: float, known: bool) -> None:
    found = rig(recompute=recompute)
    if known:
        nobody_comes_back(found)
    serve(found, 60)
    counts = state(found)
    assert (counts["unsaved_chunks"], counts["stored_chunks"] > 50 * PROMPT // BLOCK_SIZE) == (0, True)
    found.drain()


@pytest.mark.parametrize("takes_cycles", [False, True], ids=["copied-beside-the-model", "copied-by-the-model-s-cores"])
def test_copies_that_nobody_waits_for_need_not_pay_unless_they_take_cycles(takes_cycles: bool) -> None:
    found = rig(num_blocks=ROOMY, recompute=0.0)
    found.side.prices.takes_cycles = takes_cycles
    nobody_comes_back(found)
    serve(found, 60)
    counts = state(found)
    assert (counts["unsaved_chunks"] > 50, counts["stored_chunks"] > 50) == (takes_cycles, not takes_cycles)
    found.drain()


def test_a_preempted_request_comes_back_for_certain() -> None:
    found = rig(recompute=2.0)
    nobody_comes_back(found)
    waiting, ended = idle("waiting", running=1), idle("ended", running=0)
    assert found.side.stores._worth_a_copy([waiting, ended]) == [waiting]
    price(found, lambda end: 0.0)
    assert found.side.stores._worth_a_copy([waiting, ended]) == []


def test_as_published_all_that_would_be_lost_is_waited_for_and_nothing_is_copied_while_its_request_runs() -> None:
    found = rig(recompute=5.0)
    found.side.stores.copies_all = True
    nobody_comes_back(found)
    for number in range(2):
        ask(found, number)
    while found.live():
        assert state(found)["placed_chunks"] == 0
        found.step()
    serve(found, 60)
    counts = state(found)
    assert (counts["unsaved_chunks"], counts["stored_chunks"] > 50 * PROMPT // BLOCK_SIZE) == (0, True)
    found.drain()


@pytest.mark.parametrize("known", [False, True])
def test_on_a_full_device_chunks_are_copied_while_their_requests_run(known: bool) -> None:
    found = rig(recompute=5.0)
    if known:
        nobody_comes_back(found)
    for number in range(2):
        found.add(range(1000 * number, 1000 * number + PROMPT), BLOCK_SIZE)
    pool = found.scheduler.kv_cache_manager.block_pool
    while pool.get_num_free_blocks():
        assert state(found)["placed_chunks"] == 0
        found.step()
    assert len(found.live()) == 2
    assert (state(found)["placed_chunks"] == 0) == known
    found.drain()


def test_what_the_host_holds_takes_no_share_of_a_step_s_copies() -> None:
    """Questions that were stored and are asked again, and a new one behind them: that is copied in the first step."""
    found = rig(num_blocks=ROOMY, recompute=5.0)
    side = found.side
    side.stores.free_fraction = 1.0
    serve(found, 8)
    ask(found, 8)
    found.settle()
    assert state(found)["stored_chunks"] >= 8 * PROMPT // BLOCK_SIZE
    side.stores.free_fraction = 0.0
    serve(found, 8)
    ask(found, 100)
    found.settle()
    ended: Any = SimpleNamespace(
        preempted_req_ids=None, num_scheduled_tokens={}, finished_req_ids=found.scheduler.finished_req_ids
    )
    side.stores.of_idle(ended, {})
    assert side.stores.idle.num_blocks >= 9 * PROMPT // BLOCK_SIZE
    side.stores.free_fraction = 1.0
    chunks = side.stores._taken_soon(0)
    assert len(chunks) == PROMPT // BLOCK_SIZE
    assert {chunk.owner.req_id for chunk in chunks} == {list(found.prompts)[-1]}
    found.drain()


def test_a_link_that_is_behind_gets_no_more_to_copy_ahead_of_time() -> None:
    found = rig(num_blocks=ROOMY, recompute=5.0)
    side = found.side
    serve(found, 4)
    side.stores.free_fraction = 1.0
    side.prices.out = Bandwidth()
    side.prices.out.observe(10 * side.prices._chunk_bytes, 0.2)
    ask(found, 50)
    found.step()
    under_way = side.stores.under_way_s
    assert under_way > 0.1
    assert side.stores._taken_soon(0) == []
    found.drain()


def test_until_a_copy_was_measured_all_pay() -> None:
    found = rig(recompute=0.0)
    assert found.side.stores._worth_a_copy([idle("a")]) == []
    found.side.prices.out = Bandwidth()
    assert len(found.side.stores._worth_a_copy([idle("a")])) == 1


def test_all_of_a_sequence_is_copied_or_nothing() -> None:
    """What costs more to compute again since it stands further behind is of no use without what stands before it."""
    found = rig(recompute=0.0)
    copy_s = found.side.prices.store_s(BLOCK_SIZE)
    price(found, lambda end: copy_s * (0.5 + end / (20 * BLOCK_SIZE)))
    short, long = idle("short", length=5), idle("long", length=40)
    assert found.side.stores._worth_a_copy([short, long]) == [long]


def test_what_host_memory_has_already_is_not_lost() -> None:
    found = rig(recompute=1000.0)
    serve(found, 8)
    price(found, lambda end: 0.0)
    held = next(iter(resident(found.side.manager.policy)))
    assert found.side.stores._worth_a_copy([idle(held), idle("elsewhere")]) == []
    assert state(found)["unsaved_chunks"] == 1


def test_on_a_full_device_a_chunk_whose_copy_does_not_pay_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rig(recompute=0.0)
    asked: list[bool] = []

    def saves(owner: ReqContext, *, after_this_turn: bool = False) -> bool:
        asked.append(after_this_turn)
        return False

    monkeypatch.setattr(found.side.stores, "_saves", saves)
    monkeypatch.setattr(AheadStores, "looks_at_all", True)
    found.add(range(PROMPT), 2 * BLOCK_SIZE)
    steps = 0
    while found.live():
        found.step()
        steps += 1
    assert steps >= 2 * BLOCK_SIZE
    assert asked.count(True) in (2, 3), "the prompt's chunks, and each that decoding has filled"
    found.drain()
    assert not found.side.stores._asked


def test_a_copy_ahead_of_time_is_no_use_of_a_chunk() -> None:
    """It was stamped with the time of the copy: Cost / T took a conversation for active that had paused for minutes."""
    found = rig(num_blocks=ROOMY, recompute=5.0)
    side = found.side
    side.stores.free_fraction = 0.0
    ask(found, 1)
    found.settle()
    left = found.clock()
    found.clock.advance(600.0)
    side.stores.free_fraction = 1.0
    for number in range(2, 5):
        ask(found, number)
        found.settle()
    nodes = side.manager.policy._nodes
    stored = [nodes[key].used_s for key in nodes if nodes[key].owners[-1].name == "s1"]
    assert len(stored) >= PROMPT // BLOCK_SIZE
    assert max(stored) <= left
    assert max(node.used_s for node in nodes.values()) > left + 600.0
    found.drain()
