"""What next turns contain of what was generated: learned from two prompts, for each salt and LoRA adapter.

That a branch that is left behind goes first is a row in test_keeper.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import OffloadKey

from tests.support.tier_audit import resident
from tests.support.tier_rig import BLOCK_SIZE, MIN_BLOCKS, TierRig, quiet
from vllm_ext.kv.connector.ahead_stores import AheadStores
from vllm_ext.kv.conversations import branches
from vllm_ext.kv.conversations.conversation import Conversation, Turn

from .disk_parts import CHUNK_TOKENS
from .disk_parts import rig as disk_rig
from .keeper_parts import Tier

OURS = ("retention", "tail", "leading")


def talk(tier: Tier, name: str, *, at: float, drops: bool, **options: Any) -> None:
    """Two turns, of which the first generates two chunks that the second contains or leaves out."""
    prompt, thought = f"{name}-prompt", [f"{name}-thought-{i}" for i in range(2)]
    tier.turn(name, prompt, *thought, at=at, generated=2, **options)
    answer = [f"{name}-answer-{i}" for i in range(2)] if drops else thought
    tier.turn(name, prompt, *answer, f"{name}-more", at=at + 1, **options)


def learned(tier: Tier, salt: str = "", lora: str = "") -> bool:
    return tier.keeper.branches.is_low((lora, tier.keeper.book.salt_tag(salt)))


def test_only_prompts_are_kept_once_eight_next_turns_left_out_what_was_generated() -> None:
    tier = Tier(num_chunks=100)
    for number in range(8):
        assert not learned(tier)
        talk(tier, f"c{number}", at=10.0 * number, drops=True)
    assert learned(tier)
    counts = {"contained": 0, "omitted": 16, "left_out": 0}
    assert tier.keeper.branches.state() == {"low_reuse_salts": 1, "generated_chunks": counts}
    tier.turn("next", "prompt", "thought", at=100.0, generated=1)
    assert tier.keeper.branches.counts["left_out"] == 1
    tier.check()


def test_a_template_that_changes_back_is_noticed() -> None:
    """No conversation has to store all for that: chunks are compared by their hashes."""
    tier = Tier(num_chunks=400)
    for drops, count in ((True, 40), (False, 30)):
        for number in range(count):
            talk(tier, f"{drops}-{number}", at=tier.now + 10.0, drops=drops)
        assert learned(tier) == drops


def test_salts_and_adapters_learn_for_themselves() -> None:
    tier = Tier(num_chunks=400)
    for number in range(10):
        talk(tier, f"c{number}", at=10.0 * number, drops=True, salt="a", lora="thinks")
        talk(tier, f"d{number}", at=10.0 * number + 2, drops=False, salt="a")
        talk(tier, f"e{number}", at=10.0 * number + 4, drops=False, salt="b", lora="thinks")
    assert [learned(tier, *who) for who in (("a", "thinks"), ("a", ""), ("b", "thinks"))] == [True, False, False]


def test_who_stores_all_by_name_only_counts() -> None:
    for prompt_only, policy in ((False, "retention"), (True, "retention"), ("auto", "lru")):
        tier = Tier({"prompt_only": prompt_only}, num_chunks=100, policy=policy)
        for number in range(9):
            talk(tier, f"c{number}", at=10.0 * number, drops=True)
        tier.turn("next", "prompt", "thought", at=100.0, generated=1)
        assert tier.keeper.branches.counts == {"contained": 0, "omitted": 18, "left_out": 0}


@pytest.mark.parametrize("policy", OURS)
def test_what_was_generated_goes_first_when_its_request_has_ended(policy: str) -> None:
    tier = Tier(num_chunks=60, policy=policy)
    for number in range(8):
        talk(tier, f"c{number}", at=10.0 * number, drops=True)
    for name in [f"c{number}" for number in range(8)]:
        tier.keeper.drop(tier.keeper.book.find(name)[""])
    tier.turn("old", *(f"o{i}" for i in range(50)), at=100.0)
    tier.turn("a", "a0", "a1", *(f"thought-{i}" for i in range(5)), at=200.0, generated=5)
    tier.turn("b", *(f"b{i}" for i in range(8)), at=201.0)
    assert tier.has("a0", "a1", *(f"o{i}" for i in range(50)))
    assert sum(tier.has(f"thought-{i}") for i in range(5)) == 0
    tier.check()


def turn(conversation: Conversation, prompt: int) -> Turn:
    conversation.begin()
    return Turn(conversation, prompt_tokens=prompt * CHUNK_TOKENS, prompt_chunks=prompt)


def keys(*names: str) -> list[OffloadKey]:
    return [OffloadKey(name.encode()) for name in names]


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        ("p0 p1", (0, 0)),
        ("p0 p1 g0", (1, 0)),
        ("p0 p1 g0 g1 g2 new", (3, 0)),
        ("p0 p1 g0 x y z", (1, 2)),
        ("p0 p1 x", (0, 1)),
        ("p0 x y z", (0, 0)),
        ("x", (0, 0)),
    ],
    ids=["asked-again", "shorter", "all", "in-part", "nothing", "another-branch", "another-agent"],
)
def test_what_a_next_turn_says(chunks: str, says: tuple[int, int]) -> None:
    book, conversation = branches.Branches(), Conversation(1, "c", "")
    last = turn(conversation, 2)
    conversation.end()
    book.leave(last, keys("p0", "p1", "g0", "g1", "g2"))
    dead = book.enter(turn(conversation, len(chunks.split())), keys(*chunks.split()))
    assert (book.counts["contained"], book.counts["omitted"]) == says
    assert dead == (keys(f"g{says[0]}")[0] if says[1] else None)
    assert last.kept_tokens == (2 * CHUNK_TOKENS if says[1] else float("inf"))


def test_samples_side_by_side_say_nothing() -> None:
    book, conversation = branches.Branches(), Conversation(1, "c", "")
    samples = [turn(conversation, 1) for _ in range(2)]
    for number, sample in enumerate(samples):
        conversation.end()
        book.leave(sample, keys("p0", f"g{number}"))
    assert book.enter(turn(conversation, 3), keys("p0", "g0", "new")) is None
    assert not any(book.counts.values())


def test_clients_that_invent_salts_and_conversations_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "_MOST_ORIGINS", 5)
    monkeypatch.setattr(branches, "_MOST_LEFT", 7)
    monkeypatch.setattr(branches, "_MOST_CHUNKS", 3)
    tier = Tier(num_chunks=50)
    for number in range(40):
        talk(tier, f"c{number}", at=10.0 * number, drops=True, salt=f"s{number}")
        tier.turn("long", *(f"{number}-{i}" for i in range(9)), at=10.0 * number + 5, generated=8)
    book = tier.keeper.branches
    assert (len(book._reuse), len(book._left)) == (5, 7)
    assert max(len(left) for _, left in book._left.values()) == 4


# --- with a scheduler -----------------------------------------------------------------------------------------------


def thinking(store: str, **options: Any) -> TierRig:
    """An engine that has learned to keep prompts only."""
    rig = quiet(store=store, host_chunks=400, **options)
    if store == "ahead":
        rig.side.stores.free_fraction = 0.9
    for number in range(9):
        prompt = [1000 * number + 100 + i for i in range(2 * BLOCK_SIZE)]
        for added in ([], [3, 1, 4, 1] * 3):
            rig.add(prompt + added, 3 * BLOCK_SIZE, session=f"c{number}")
            rig.settle()
    assert rig.side.keeper.branches.state()["low_reuse_salts"] == 1
    return rig


def chunks_of(rig: TierRig, req_id: str) -> list[OffloadKey]:
    status = rig.side._req_status[req_id]
    status.update_offload_keys()
    found: list[OffloadKey] = status.group_states[0].offload_keys
    return found


def running(rig: TierRig, tokens: int) -> tuple[str, list[OffloadKey]]:
    """Let a request of two blocks run for a step, and until it has so many tokens; return it with its chunks so far."""
    req_id = rig.add([90_000 + i for i in range(2 * BLOCK_SIZE)], 5 * BLOCK_SIZE, session="one")
    rig.step()
    while len(rig.history(req_id)) < tokens:
        rig.step()
    return req_id, chunks_of(rig, req_id)


@pytest.mark.parametrize("store", ["early", "ahead"])
def test_generated_chunks_are_there_for_a_preempted_request_and_go_when_it_ends(store: str) -> None:
    rig = thinking(store)
    req_id, keys = running(rig, 5 * BLOCK_SIZE + 1)
    policy = rig.side.manager.policy
    rig.preempt(req_id)
    for _ in range(4):
        rig.add([len(rig.prompts) * 1000 + i for i in range(8 * BLOCK_SIZE)], 2)
        rig.step()
    assert all(key in resident(policy) for key in keys[:5]), "what it will ask for again"
    rig.settle()
    waiting = policy._nodes
    assert all(waiting[key].used_s > 0 for key in keys[:2])
    assert all(waiting[key].used_s == float("-inf") for key in keys[2:] if key in waiting)
    assert rig.scheduler.vllm_ext_state()["kv_tier"]["generated_chunks"]["left_out"] >= 3
    rig.drain()


def test_ahead_of_time_no_generated_chunk_is_copied() -> None:
    rig = thinking("ahead")
    queued: list[Any] = []
    add = rig.side.stores.idle.add
    rig.side.stores.idle.add = lambda chunks: add(queued.extend(chunks) or chunks)
    _, keys = running(rig, 1)
    for number in range(12):
        rig.settle()
        rig.add([(100 + number) * 1000 + i for i in range(8 * BLOCK_SIZE)], 2)
    rig.settle()
    held = resident(rig.side.manager.policy)
    assert len(keys) >= 6
    assert {chunk.key for chunk in queued}.isdisjoint(keys[2:])
    assert {chunk.key for chunk in queued} >= set(keys[:2])
    assert [key in held for key in keys] == [True] * 2 + [False] * (len(keys) - 2)
    rig.drain()


def test_on_a_full_device_no_generated_chunk_is_copied_while_its_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = thinking("ahead")
    rig.side.stores.free_fraction = 0.01
    monkeypatch.setattr(AheadStores, "looks_at_all", True)
    monkeypatch.setattr(rig.side.stores, "_saves", lambda *_, **__: True)
    _, keys = running(rig, 6 * BLOCK_SIZE)
    held = resident(rig.side.manager.policy)
    assert [key in held for key in keys[:5]] == [True] * 2 + [False] * 3
    rig.drain()


def test_a_branch_that_is_left_behind_on_the_device_is_not_copied() -> None:
    rig = quiet(store="ahead", num_blocks=6 * MIN_BLOCKS, host_chunks=400)
    rig.side.stores.free_fraction = 0.001
    prompt = list(range(100, 100 + 2 * BLOCK_SIZE))
    req_id = rig.add(prompt, 4 * BLOCK_SIZE, session="c")
    rig.step()
    first = chunks_of(rig, req_id)
    rig.settle()
    req_id = rig.add([*prompt, *range(500, 500 + 3 * BLOCK_SIZE)], 2, session="c")
    rig.step()
    second = chunks_of(rig, req_id)
    rig.settle()
    rig.side.stores.free_fraction = 0.999
    for number in range(3):
        rig.add([1000 * number + i for i in range(2 * BLOCK_SIZE)], 2)
        rig.settle()
    held = resident(rig.side.manager.policy)
    assert all(key in held for key in second)
    assert [key in held for key in first] == [True] * 2 + [False] * (len(first) - 2)
    assert len(first) >= 5
    rig.drain()


def test_what_is_kept_for_preemptions_only_does_not_go_to_disk(tmp_path: Path) -> None:
    with disk_rig(tmp_path, host=40) as tiers:
        context = tiers.request(1, 2, 3)
        context.set_state(Turn(Conversation(1, "c", ""), prompt_tokens=CHUNK_TOKENS + 5, prompts_only=True))
        assert tiers.store(context, 1)
        assert tiers.store(context, 2, 3)
        tiers.step()
        assert tiers.on_disk(1, 2, 3) == [True, False, False]
        assert all(tiers.manager.host.policy.get(key) is not None for key in context._offload_key_positions)
