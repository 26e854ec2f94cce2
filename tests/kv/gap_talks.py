"""Conversations over the real scheduler and block manager, whose blocks can be lost between turns.

The runner keeps what every slot of the KV pool holds and checks each position that a step reads, see `KVLedger`: a
block that was reused although it holds something else, or read before it was computed, fails there.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.audit import audit
from tests.support.engine_loop import EngineLoop
from tests.support.fake_runner import FakeRunner
from vllm_ext.kv.partial_prefix.layout import ATTRIBUTE
from vllm_ext.kv.partial_prefix.manager import GapManager
from vllm_ext.simulation.engine.events import VirtualClock
from vllm_ext.simulation.engine.harness import block_hasher, make_request, make_scheduler

BLOCK = 16
STEERED = "vllm_ext.scheduling.scheduler.SteeredScheduler"
DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
ONE_GAP_OF_FIVE_BLOCKS = {
    "requests": 1, "gaps": 1, "tokens_kept": 7 * BLOCK, "tokens_loaded": 0, "tokens_computed": 5 * BLOCK,
    "tokens_missing": 5 * BLOCK, "requests_by_gaps": {"1": 1}, "refused": {},
}  # fmt: skip
"""What is counted when a conversation of twelve blocks comes back without the first five."""
RUNNERS = pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])


class Talks:
    """Conversations over one scheduler; each turn's prompt is what was said before and something new."""

    def __init__(
        self,
        *,
        system: str = "fcfs",
        gaps: str = "fused",
        depth: int = 1,
        v2: bool = False,
        int8_share: float = 0.0,
        **kwargs: Any,
    ):
        self.clock = VirtualClock(100.0)
        self.scheduler: Any = make_scheduler(
            STEERED,
            async_scheduling=depth == 2,
            v2_model_runner=v2,
            additional_config={
                "vllm_ext": {"system": system, "kv_tier": {"gaps": gaps, "device_int8_share": int8_share}}
            },
            **kwargs,
        )
        self.scheduler.clock = self.clock
        if self.scheduler.gaps is not None:  # a virtual clock teaches that tokens cost nothing
            self.scheduler.gaps.compute_s = lambda new, context: new * 1e-4 * (1 + context / 1000)
        self._check_rows()
        self.lengths: dict[str, int] = {}
        num_blocks = self.pool.num_gpu_blocks
        self.runner = FakeRunner(output_lengths=self.lengths, pipelined=depth == 2, v2=v2, num_blocks=num_blocks)
        self.loop = EngineLoop(self.scheduler, self.runner, depth=depth)
        self.history: dict[str, list[int]] = {}
        self.turns: dict[str, int] = {}
        self.prompts: dict[str, list[int]] = {}

    def _check_rows(self) -> None:
        """Let every step fail that has more rows of attention than the kernels' tables."""
        schedule = self.scheduler.schedule
        self.most_rows = 0

        def checked(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            layouts, scheduled = getattr(output, ATTRIBUTE, {}), output.num_scheduled_tokens
            rows = 0
            for req_id, count in scheduled.items():
                first = self.scheduler.requests[req_id].num_computed_tokens - count
                rows += len(list(layouts[req_id].spans(first, count))) if req_id in layouts else 1
            self.most_rows = max(self.most_rows, rows)
            assert rows <= self.scheduler.scheduler_config.max_num_seqs, f"{rows} rows"
            return output

        self.scheduler.schedule = checked

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

    def walk(self, rng: random.Random, shared: list[int], *, clients: int, lose: float, reset: float = 0.0) -> None:
        """Serve 60 random turns of at most ``clients`` conversations at a time, with random aborts, until none is left.

        Args:
            rng: Decides.
            shared: What every conversation begins with.
            clients: See above.
            lose: Probability that idle blocks are lost between two bursts of steps.
            reset: Probability that the prefix cache is reset there.
        """
        busy: dict[str, str] = {}
        served = 0
        while served < 60:
            name = rng.choice("abcdef")
            if name not in busy and len(busy) < clients:
                if not self.history.get(name) or len(self.history[name]) > 300:
                    self.history[name] = list(shared)
                busy[name] = self.say(name, words(rng.randint(0, 10**6), rng.randint(1, 70)), answer=rng.randint(1, 40))
            for _ in range(rng.randint(1, 8)):
                self.step()
            if busy and rng.random() < 0.05:
                victim = rng.choice(sorted(busy))
                self.loop.abort(busy.pop(victim))
                self.history[victim] = list(shared)
            if reset and rng.random() < reset:
                self.scheduler.reset_prefix_cache(reset_running_requests=True)
            if rng.random() < lose:
                idle = [b for b in self.pool.blocks if b.ref_cnt == 0 and b.block_hash is not None]
                for block in rng.sample(idle, min(len(idle), rng.randint(0, 3))):
                    self.pool.evict_blocks({block.block_id})
            for name in [n for n, req_id in busy.items() if req_id not in self.scheduler.requests]:
                self.answered(name)
                del busy[name]
                served += 1
        self.drain()


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(100, 3000) for _ in range(count)]


def returning(**options: Any) -> Talks:
    """A conversation of twelve blocks that has lost its first five."""
    talks = Talks(**{"num_blocks": 64, "max_num_batched_tokens": 512, **options})
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(5))
    return talks


def crowded(*, answer: int) -> Talks:
    """One conversation that has lost its leading end, and another that leaves 10 blocks free for so many tokens."""
    talks = returning(num_blocks=26)
    talks.say("b", words(2, 14 * BLOCK), answer=answer)
    talks.step()
    return talks
