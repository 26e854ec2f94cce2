"""A long random walk: engines of all kinds, and everything that can happen to each, drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.tier_rig import MAX_MODEL_LEN, MIN_BLOCKS, Setup, TierRig
from vllm_ext.config.kv_tier import AHEAD, PREFIX_POLICIES, STORES

STEPS_PER_ENGINE = 1_000
_MOST_LIVE = 9
_OPENINGS = 4
_VOCABULARY = range(100, 4000)


@dataclass
class Walked:
    """What a walk has seen."""

    steps: int = 0
    engines: int = 0
    requests: int = 0
    aborts: int = 0
    preemptions: int = 0
    resets: int = 0
    jobs: int = 0
    failed_jobs: int = 0
    hit_tokens: int = 0
    evicted_chunks: int = 0
    dropped_chunks: int = 0
    unsaved_chunks: int = 0
    step_loads: int = 0
    failed_step_loads: int = 0
    spoilt_requests: int = 0


def walk(
    num_steps: int,
    seed: int,
    *,
    steps_per_engine: int = STEPS_PER_ENGINE,
    watch: Callable[[TierRig], object] = lambda rig: None,
    **fixed: object,
) -> Walked:
    """Take so many steps of engine cores, each checked; every engine is drained at its end.

    Args:
        num_steps: At least; an engine takes ``steps_per_engine`` and what draining it needs.
        seed: Of all chance; also says with which engine to begin.
        watch: Called with each engine before its first step.
        fixed: Fields of `Setup` that are not to be drawn.

    Raises:
        AuditError: (an AssertionError) a check failed; the note names the engine.
    """
    seen = Walked()
    dice = random.Random(seed)
    while seen.steps < num_steps:
        setup = draw_setup(dice, seed * num_steps // steps_per_engine + seen.engines, **fixed)
        try:
            rig = TierRig(setup)
            watch(rig)
            live(rig, dice, min(steps_per_engine, num_steps), seen)
        except Exception as error:
            error.add_note(f"walk({num_steps}, seed={seed}), engine {seen.engines}: {setup}")
            raise
    return seen


def draw_setup(dice: random.Random, number: int, **fixed: object) -> Setup:
    """Return engine ``number``: in turn all schedulings, stores, policies, bits and prices; the rest by dice."""
    number, asynchronous = divmod(number, 2)
    number, store = divmod(number, len(STORES))
    number, policy = divmod(number, len(PREFIX_POLICIES))
    copies_pay = (number + policy) % 2 == 0
    drawn: dict[str, Any] = {
        "async_scheduling": bool(asynchronous),
        "store": STORES[store],
        "policy": PREFIX_POLICIES[policy],
        "bits": (16, 8)[number % 2],
        "prefix_caching": dice.random() < 0.8 or STORES[store] == AHEAD,
        "host_chunks": dice.choice([1, 3, 6, 12, 40]),
        "num_blocks": dice.choice([MIN_BLOCKS, MIN_BLOCKS + 3, MIN_BLOCKS + 10, 3 * MIN_BLOCKS]),
        "max_num_seqs": dice.choice([1, 2, 4, 6]),
        "token_budget": dice.choice([8, 24, 64]),
        "slow": dice.choice([0.0, 0.2, 0.5, 0.9, 1.0]),
        "failing_stores": dice.choice([0.0, 0.0, 0.1, 0.5]),
        "failing_loads": dice.choice([0.0, 0.0, 0.1, 0.5]),
        "copies_pay": copies_pay,
        "seed": dice.randrange(2**32),
    }
    return Setup(**{**drawn, **fixed})


def live(rig: TierRig, dice: random.Random, num_steps: int, seen: Walked) -> None:
    """Let an engine live for so many steps, and drain it."""
    seen.engines += 1
    client = _Client(rig, dice)
    for _ in range(num_steps):
        client.act(seen)
        rig.step()
    rig.drain()
    counters = rig.tier.counters(rig.clock())
    seen.steps += rig.steps
    seen.requests += len(rig.prompts)
    seen.aborts += sum(outcome.finish_reason == "abort" for outcome in rig.loop.outcomes.values())
    seen.preemptions += rig.num_preemptions
    seen.jobs += rig.auditor.checked_jobs
    seen.failed_jobs += rig.copies.failed_jobs
    seen.hit_tokens += int(counters["tier_hit_tokens"])
    seen.evicted_chunks += int(counters["tier_evicted_chunks"])
    seen.dropped_chunks += int(counters["tier_dropped_chunks"])
    seen.step_loads += rig.copies.step_loads
    seen.failed_step_loads += rig.copies.failed_step_loads
    seen.spoilt_requests += rig.auditor.spoilt_requests
    seen.unsaved_chunks += 0 if rig.side.stores is None else rig.side.stores.unsaved


class _Client:
    """All clients and the operator of an engine: now busy, now away."""

    def __init__(self, rig: TierRig, dice: random.Random) -> None:
        self._rig = rig
        self._dice = dice
        self._openings = [self._text(dice.randint(6, 40)) for _ in range(_OPENINGS)]
        self._busy = dice.choice([0.1, 0.3, 0.8])
        self._hasty = dice.choice([0.0, 0.05, 0.3])
        self._unfair = dice.choice([0.0, 0.02, 0.2])
        self._resets = dice.choice([0.0, 0.01, 0.3])
        self._events = (self._ask, self._abort, self._preempt, self._reset)

    def act(self, seen: Walked) -> None:
        """Let something happen before a step, or nothing, in any order."""
        for happens in self._dice.sample(self._events, k=len(self._events)):
            happens(seen)

    def _ask(self, seen: Walked) -> None:
        dice, rig = self._dice, self._rig
        if len(rig.live()) < _MOST_LIVE and dice.random() < self._busy:
            prompt, output = self._prompt(), dice.choice([1, 2, 5, 12, 30])
            session = dice.choice([None, "s", "t"])
            for _ in range(dice.choice([1, 1, 1, 2])):  # twins at the same moment, perhaps of different tenants
                rig.add(prompt, output, session, salt=dice.choice([None, None, None, "tenant"]))

    def _abort(self, seen: Walked) -> None:
        if self._dice.random() < self._hasty and (live := self._rig.live()):
            self._rig.abort(self._dice.choice(live), while_executing=self._dice.random() < 0.5)

    def _preempt(self, seen: Walked) -> None:
        if self._dice.random() < self._unfair and (live := self._rig.live()):
            self._rig.preempt(self._dice.choice(live))

    def _reset(self, seen: Walked) -> None:
        dice = self._dice
        if dice.random() < self._resets:
            seen.resets += self._rig.reset(running=dice.random() < 0.5, connector=dice.random() < 0.7)

    def _prompt(self) -> list[int]:
        """A next turn, one of few openings with something new, or something new."""
        dice, rig = self._dice, self._rig
        kind = dice.random()
        if kind < 0.4 and rig.prompts:
            recent = list(rig.prompts)[-12:]
            history = rig.history(dice.choice(recent))
            if len(history) < MAX_MODEL_LEN - 8:
                return history + self._text(dice.randint(1, 6))
        if kind < 0.8:
            return dice.choice(self._openings) + self._text(dice.randint(0, 12))
        return self._text(dice.randint(1, 50))

    def _text(self, length: int) -> list[int]:
        return self._dice.choices(_VOCABULARY, k=length)
