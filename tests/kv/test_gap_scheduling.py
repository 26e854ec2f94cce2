"""Conversations whose leading KV was dropped, through the real scheduler and block manager.

The runner keeps what every slot of the KV pool holds and checks each position that a step reads, see `KVLedger`: a
block that was reused although it holds something else, or read before it was computed, fails there.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from vllm_ext.kv.gap_manager import GapManager
from vllm_ext.kv.gap_phases import send_positions
from vllm_ext.scheduling import gap_scheduler
from vllm_ext.simulation.audit import audit
from vllm_ext.simulation.engine_loop import EngineLoop
from vllm_ext.simulation.fake_runner import FakeRunner, RunnerError
from vllm_ext.simulation.harness import block_hasher, make_request, make_scheduler
from vllm_ext.simulation.virtual_clock import VirtualClock

BLOCK = 16
STEERED = "vllm_ext.scheduling.scheduler.SteeredScheduler"
DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
RUNNERS = pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])


class Talks:
    """Conversations over one scheduler; each turn's prompt is what was said before and something new."""

    def __init__(self, *, system: str = "fcfs", gaps: str = "fused", depth: int = 1, v2: bool = False, **kwargs: Any):
        self.clock = VirtualClock(100.0)
        self.scheduler: Any = make_scheduler(
            STEERED,
            async_scheduling=depth == 2,
            v2_model_runner=v2,
            additional_config={"vllm_ext": {"system": system, "kv_tier": {"gaps": gaps}}},
            **kwargs,
        )
        self.scheduler.clock = self.clock
        if self.scheduler.gaps is not None:  # a virtual clock teaches that tokens cost nothing
            self.scheduler.gaps.compute_s = lambda new, context: new * 1e-4 * (1 + context / 1000)
        self.lengths: dict[str, int] = {}
        self.runner = FakeRunner(output_lengths=self.lengths, pipelined=depth == 2, v2=v2)
        self.loop = EngineLoop(self.scheduler, self.runner, depth=depth)
        self.history: dict[str, list[int]] = {}
        self.turns: dict[str, int] = {}
        self.prompts: dict[str, list[int]] = {}

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def manager(self) -> GapManager:
        (manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        assert isinstance(manager, GapManager)
        return manager

    def say(
        self, name: str, tokens: list[int], *, answer: int = 4, max_tokens: int = 400, salt: str | None = None
    ) -> str:
        number = self.turns[name] = self.turns.get(name, 0) + 1
        req_id = f"{name}{number}"
        prompt = self.history.get(name, []) + tokens
        self.lengths[req_id] = answer
        self.prompts[req_id] = prompt
        hasher = block_hasher(BLOCK)
        self.loop.add(make_request(req_id, prompt, max_tokens=max_tokens, cache_salt=salt, hasher=hasher))
        return req_id

    def answered(self, name: str) -> None:
        req_id = f"{name}{self.turns[name]}"
        self.history[name] = self.prompts[req_id] + self.loop.outcomes[req_id].token_ids

    def step(self) -> dict[str, int]:
        decision = self.loop.step()
        self.clock.advance(0.01)
        audit(self.scheduler)
        return {} if decision is None else dict(decision.scheduled)

    def drain(self) -> list[dict[str, int]]:
        steps = []
        for _ in range(5000):
            if not self.loop.has_work:
                return steps
            steps.append(self.step())
        raise AssertionError(f"stalled with {sorted(self.scheduler.requests)}")

    def drop(self, name: str, numbers: range, salt: str | None = None) -> None:
        """Evict blocks of a conversation that nobody holds, and let something else be written there."""
        request = make_request("probe", self.history[name], cache_salt=salt, hasher=block_hasher(BLOCK))
        for number in numbers:
            found = self.pool.get_cached_block(request.block_hashes[number], [0])
            assert found is not None, f"block {number} is not there"
            assert found[0].ref_cnt == 0, f"block {number} is in use"
            self.pool.evict_blocks({found[0].block_id})
            for slot in range(found[0].block_id * BLOCK, (found[0].block_id + 1) * BLOCK):
                self.runner.ledger.slots[slot] = -1  # type: ignore[union-attr]

    def talk(self, name: str, tokens: list[int], **more: Any) -> list[dict[str, int]]:
        self.say(name, tokens, **more)
        steps = self.drain()
        self.answered(name)
        return steps


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(100, 3000) for _ in range(count)]


def crowded(*, answer: int) -> Talks:
    """One conversation that has lost its leading end, and another that leaves 10 blocks free for so many tokens."""
    talks = Talks(num_blocks=26, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(5))
    talks.say("b", words(2, 14 * BLOCK), answer=answer)
    talks.step()
    return talks


@DEPTHS
def test_a_dropped_leading_end_is_computed_with_the_new_prompt_in_one_step(depth: int) -> None:
    talks = Talks(depth=depth, num_blocks=64, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(5))
    first, *later = talks.talk("a", words(2, 40))
    # 5 blocks of the gap, the block of the answer that was not full, and the new prompt
    assert first == {"a2": 5 * BLOCK + 4 + 40}
    assert all(step in ({"a2": 1}, {}) for step in later)
    assert talks.scheduler.gaps.counts.state() == {
        "requests": 1, "gaps": 1, "tokens_kept": 7 * BLOCK, "tokens_loaded": 0, "tokens_computed": 5 * BLOCK,
        "tokens_missing": 5 * BLOCK, "requests_by_gaps": {"1": 1}, "refused": {},
    }  # fmt: skip
    third, *_ = talks.talk("a", words(3, 10))
    assert third["a3"] <= 10 + BLOCK + 4, "an ordinary hit: the whole conversation is in the prefix cache again"
    assert talks.scheduler.gaps.counts.requests == 1


@DEPTHS
@pytest.mark.parametrize("budget", [2, 7, 16, 33, 100])
def test_gaps_are_computed_in_chunks(budget: int, depth: int) -> None:
    talks = Talks(depth=depth, num_blocks=64, max_num_seqs=2, max_num_batched_tokens=budget)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(2, 5))
    talks.drop("a", range(7, 8))
    steps = talks.talk("a", words(2, 40))
    decoded = 3 + (depth - 1)  # of 4 tokens, and with async scheduling one that is not wanted any more
    assert sum(step.get("a2", 0) for step in steps) - decoded == 4 * BLOCK + 4 + 40
    assert talks.scheduler.gaps.counts.gaps == 2
    assert talks.scheduler.gaps.counts.requests_by_gaps == {2: 1}
    assert talks.manager.placements == {}
    assert talks.pool.get_num_free_blocks() == 63


@DEPTHS
def test_where_tokens_are_said_to_cost_nothing_a_prefix_hit_is_still_one(depth: int) -> None:
    talks = Talks(depth=depth, num_blocks=64, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(3, 5))
    talks.scheduler.gaps.compute_s = lambda new, context: 0.0
    first, *_ = talks.talk("a", words(2, 40))
    assert first == {"a2": 9 * BLOCK + 4 + 40}
    assert talks.scheduler.gaps.counts.requests == 0
    assert talks.scheduler.gaps.counts.refused == {"cheaper": 1}


def test_a_short_piece_between_gaps_may_be_computed_with_them() -> None:
    """It was kept, so it counts as what was cheaper to compute: a gap more would have cost more than its one block."""
    talks = Talks(num_blocks=64, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", [*range(3), *range(4, 7)])
    talks.scheduler.gaps.compute_s = lambda new, context: new * 3e-6
    talks.talk("a", words(2, 40))
    counts = talks.scheduler.gaps.counts
    assert (counts.requests_by_gaps, counts.tokens_computed, counts.tokens_missing) == ({1: 1}, 7 * BLOCK, 6 * BLOCK)


def test_a_request_that_does_not_read_what_is_kept_is_counted_once() -> None:
    talks = crowded(answer=30)
    req_id = talks.say("a", words(3, 40))  # waits: 15 blocks, of which 10 are free
    talks.scheduler.requests[req_id].skip_reading_prefix_cache = True
    for _ in range(5):
        talks.step()
    assert talks.scheduler.gaps.counts.refused == {"unsupported": 1}
    talks.drain()
    assert talks.scheduler.gaps.counts.requests == 0


def test_without_it_all_from_the_first_missing_block_on_is_computed() -> None:
    talks = Talks(gaps="off", num_blocks=64, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(5))
    first, *_ = talks.talk("a", words(2, 40))
    assert first == {"a2": 12 * BLOCK + 4 + 40}
    assert talks.scheduler.gaps is None


def test_the_device_drops_leading_ends_first() -> None:
    talks = Talks(num_blocks=26, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.talk("b", words(2, 17 * BLOCK))  # 18 blocks: 5 of the 13 of the first one go
    request = make_request("probe", talks.history["a"], hasher=block_hasher(BLOCK))
    there = [talks.pool.get_cached_block(h, [0]) is not None for h in request.block_hashes]
    assert there == [False] * 5 + [True] * 7
    first, *_ = talks.talk("a", words(3, 20))
    assert first["a2"] == 5 * BLOCK + 4 + 20


def test_a_twin_reuses_what_the_first_one_computes() -> None:
    talks = Talks(num_blocks=64, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(5))
    talks.history["b"] = talks.history["a"]
    talks.say("a", words(2, 20))
    talks.say("b", words(3, 20))
    first, *_ = talks.drain()
    assert first == {"a2": 5 * BLOCK + 4 + 20, "b1": 4 + 20}, "in one step, as vLLM's prefix cache does"


@DEPTHS
@pytest.mark.parametrize("after", range(1, 8))
def test_an_abort_within_a_gap_leaves_nothing_behind(after: int, depth: int) -> None:
    talks = Talks(depth=depth, num_blocks=64, max_num_batched_tokens=32)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(8))
    req_id = talks.say("a", words(2, 40))
    for _ in range(after):
        talks.step()
    talks.loop.abort(req_id)
    talks.drain()
    assert talks.manager.placements == {}
    assert talks.pool.get_num_free_blocks() == 63
    talks.say("a", words(3, 8))  # what it did enter into the prefix cache is checked when it is read
    talks.drain()


def test_one_that_is_aborted_before_it_gets_its_blocks_leaves_nothing_behind() -> None:
    talks = crowded(answer=30)
    req_id = talks.say("a", words(3, 40))  # 15 blocks, of which 10 are free
    talks.step()
    assert not talks.manager.placements[req_id].placed
    talks.loop.abort(req_id)
    talks.drain()
    assert talks.manager.placements == {}
    assert talks.pool.get_num_free_blocks() == 25


@pytest.mark.parametrize("gaps", ["fused", "phased"])
def test_what_is_kept_under_another_salt_is_nobodys(gaps: str) -> None:
    talks = Talks(gaps=gaps, num_blocks=64, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK), salt="mine")
    talks.drop("a", range(5), salt="mine")
    talks.history["b"] = talks.history["a"]
    (first, *_), tokens = talks.talk("b", words(2, 20), salt="yours"), 12 * BLOCK + 4 + 20
    assert first == {"b1": tokens}
    assert talks.scheduler.gaps.counts.requests == 0
    talks.talk("a", words(2, 20), salt="mine")
    assert talks.scheduler.gaps.counts.requests == 1


def test_who_waits_for_blocks_is_not_looked_up_in_full_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    talks = crowded(answer=60)
    looked_for: list[Any] = []
    real = talks.pool.get_cached_block
    monkeypatch.setattr(talks.pool, "get_cached_block", lambda *args: looked_for.append(args) or real(*args))
    talks.say("a", words(3, 40))  # 15 blocks, of which 10 are free
    talks.step()
    at_first = len(looked_for)
    for _ in range(10):
        talks.step()
    assert at_first == 1 + 14, "vLLM's own lookup ends at the first"
    assert len(looked_for) - at_first == 10 * (1 + 7), "those that were kept"
    talks.drain()
    assert talks.scheduler.gaps.counts.requests == 1
    assert talks.manager.searches == {}


# --- gaps in steps of their own -------------------------------------------------------------------------------------


@DEPTHS
@RUNNERS
def test_a_dropped_leading_end_is_computed_in_a_step_before_the_new_prompt(v2: bool, depth: int) -> None:
    talks = Talks(gaps="phased", v2=v2, depth=depth, num_blocks=64, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(5))
    first, second, *later = talks.talk("a", words(2, 40))
    assert (first, second) == ({"a2": 5 * BLOCK}, {"a2": 4 + 40})
    assert all(step in ({"a2": 1}, {}) for step in later)
    assert talks.scheduler.gaps.counts.state() == {
        "requests": 1, "gaps": 1, "tokens_kept": 7 * BLOCK, "tokens_loaded": 0, "tokens_computed": 5 * BLOCK,
        "tokens_missing": 5 * BLOCK, "requests_by_gaps": {"1": 1}, "refused": {},
    }  # fmt: skip
    third, *_ = talks.talk("a", words(3, 10))
    assert third["a3"] <= 10 + BLOCK + 4, "an ordinary hit: the whole conversation is in the prefix cache again"


@DEPTHS
@RUNNERS
@pytest.mark.parametrize("budget", [2, 7, 16, 33, 100])
def test_several_gaps_are_computed_one_after_the_other_in_chunks(budget: int, v2: bool, depth: int) -> None:
    talks = Talks(gaps="phased", v2=v2, depth=depth, num_blocks=64, max_num_seqs=2, max_num_batched_tokens=budget)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(2, 5))
    talks.drop("a", range(7, 8))
    steps = [step["a2"] for step in talks.talk("a", words(2, 40)) if "a2" in step]
    prefill = steps[: len(steps) - 3 - (depth - 1)]
    pieces = [-(-tokens // budget) for tokens in (3 * BLOCK, BLOCK, 44)]
    assert len(prefill) == sum(pieces)
    assert sum(prefill) == 4 * BLOCK + 44
    assert sum(prefill[: pieces[0]]) == 3 * BLOCK, "no piece goes beyond a kept range"
    assert talks.manager.placements == {}
    assert talks.pool.get_num_free_blocks() == 63


@DEPTHS
@RUNNERS
@pytest.mark.parametrize("after", range(1, 6))
def test_an_abort_between_two_gaps_leaves_nothing_behind(after: int, v2: bool, depth: int) -> None:
    talks = Talks(gaps="phased", v2=v2, depth=depth, num_blocks=64, max_num_batched_tokens=32)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(2, 4))
    talks.drop("a", range(6, 9))
    req_id = talks.say("a", words(2, 40))
    for _ in range(after):
        talks.step()
    talks.loop.abort(req_id)
    talks.drain()
    assert talks.manager.placements == {}
    assert talks.pool.get_num_free_blocks() == 63
    talks.say("a", words(3, 8))
    talks.drain()


def test_runners_that_are_not_told_where_a_piece_stands_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls of the tests above: virtual counts are sent as they are; V2 is not sent the request anew."""

    def talk(v2: bool) -> None:
        talks = Talks(gaps="phased", v2=v2, num_blocks=64, max_num_batched_tokens=512)
        talks.talk("a", words(1, 12 * BLOCK))
        talks.drop("a", range(5))
        talks.talk("a", words(2, 40))

    with monkeypatch.context() as patch:
        patch.setattr(gap_scheduler, "send_positions", lambda *_: None)
        with pytest.raises(RunnerError, match="is not that of its own prefix"):
            talk(v2=False)
    with monkeypatch.context() as patch:
        patch.setattr(
            gap_scheduler, "send_positions", lambda output, placements, _: send_positions(output, placements, None)
        )
        with pytest.raises(RunnerError, match="this runner counts by itself: 80"):
            talk(v2=True)


# --- walks ----------------------------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("system", "gaps"), [("fcfs", "fused"), ("alise", "fused"), ("auto", "fused"),
                                              ("fcfs", "phased"), ("alise", "phased")])  # fmt: skip
def test_walk(system: str, gaps: str, seed: int, depth: int) -> None:
    """Random turns in a pool that is too small, random drops, aborts; every read is checked."""
    rng = random.Random(seed)
    budget = rng.choice([24, 48, 96, 512])
    talks = Talks(
        system=system,
        gaps=gaps,
        v2=gaps == "phased" and seed % 2 == 0,
        depth=depth,
        num_blocks=rng.randint(34, 48),
        max_num_batched_tokens=budget,
        max_model_len=448,
    )
    shared = words(99, rng.choice([0, 24, 48]))
    busy: dict[str, str] = {}
    served = 0
    while served < 60:
        name = rng.choice("abcdef")
        if name not in busy and len(busy) < 3:
            if not talks.history.get(name) or len(talks.history[name]) > 300:
                talks.history[name] = list(shared)
            busy[name] = talks.say(name, words(rng.randint(0, 10**6), rng.randint(1, 70)), answer=rng.randint(1, 40))
        for _ in range(rng.randint(1, 8)):
            talks.step()
        if busy and rng.random() < 0.05:
            victim = rng.choice(sorted(busy))
            talks.loop.abort(busy.pop(victim))
            talks.history[victim] = list(shared)
        if rng.random() < 0.3:
            idle = [b for b in talks.pool.blocks if b.ref_cnt == 0 and b.block_hash is not None]
            for block in rng.sample(idle, min(len(idle), rng.randint(0, 3))):
                talks.pool.evict_blocks({block.block_id})
        for name in [n for n, req_id in busy.items() if req_id not in talks.scheduler.requests]:
            talks.answered(name)
            del busy[name]
            served += 1
    talks.drain()
    counts = talks.scheduler.gaps.counts
    assert counts.requests > 3, "the walk went past what it is for"
    if (system, gaps, seed) == ("alise", "fused", 0):
        assert sum(talks.scheduler.vllm_ext_state()["preemptions"].values()) > 0
    assert talks.manager.placements == {}
    assert talks.pool.get_num_free_blocks() == talks.pool.num_gpu_blocks - 1
    assert talks.scheduler.vllm_ext_state()["fallbacks"] == 0


def test_the_runner_would_see_a_block_that_is_not_what_it_is_taken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a kept block of another conversation, and a jump over a gap that was not computed."""
    talks = Talks(num_blocks=64, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(5))
    probe = make_request("probe", talks.history["a"], hasher=block_hasher(BLOCK))
    kept = talks.pool.get_cached_block(probe.block_hashes[8], [0])
    talks.runner.ledger.slots[kept[0].block_id * BLOCK] = -1  # type: ignore[union-attr]
    with pytest.raises(RunnerError, match="is not that of its own prefix"):
        talks.talk("a", words(2, 40))

    talks = Talks(num_blocks=64, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(5))
    monkeypatch.setattr(talks.scheduler.gaps, "layouts", lambda *_: {})
    with pytest.raises(RunnerError, match="is not that of its own prefix"):
        talks.talk("a", words(2, 40))
