"""The schedulers that `step_overhead.py` times: how each state is set up and held, and what one step of it took.

A part of step_overhead.py: it is run from there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_ext.config.kv_tier import STORES, KvTierConfig
from vllm_ext.kv.connector.options import transfer_config
from vllm_ext.simulation.cost.link import TransferLink
from vllm_ext.simulation.engine.events import VirtualClock
from vllm_ext.simulation.engine.harness import block_hasher, make_requests, make_scheduler
from vllm_ext.simulation.engine.simulated_copies import SimulatedCopies
from vllm_ext.simulation.engine.tier import Tier, worker_side
from vllm_ext.simulation.engine.token_runner import TokenRunner

STEERED = "vllm_ext.scheduling.scheduler.SteeredScheduler"
BASELINE = "upstream"
STEP_S = 0.02
AGE_LIMIT_S = 20.0
"""The waiting requests arrived spread over this time: alise's aging period."""
BLOCK = 16
PROMPT_TOKENS = 16
LONG_PROMPT_TOKENS = 512
"""Prompts that wait in the memory-bound state: the head of the queue needs 32 blocks."""
PREDICTED_TOKENS = 2000
MAX_TOKENS = 8000
FINISHED_LENGTHS = 1000
"""Output lengths in the history at the start: past-future's whole window."""
TTFT_SLO_MS = 60_000.0
"""Far enough that nobody becomes urgent while steps are timed: a preemption is work, not overhead."""
TBT_SLO_MS = (50.0, 100.0, 200.0, 400.0)
"""Objectives of the requests, in turn."""
WARMUP_STEPS = 20
TIER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **{f"tier-{store}": {"gib": 1.0, "store": store} for store in STORES},
    "gaps": {"gaps": "fused"},
}
"""`kv_tier` by what follows the colon of ``SYSTEM:TIER``. With ``early`` all that is computed is copied, at a speed
beyond any machine's, outside the timing; the others copy nothing here, as nobody is preempted or ends. ``gaps`` has
no tier: lookups go on behind missing blocks, of which there are none here, and free blocks are taken by their value."""
STEADY_OPTIONS: Mapping[str, Mapping[str, Any]] = {"fastserve": {"ordering": {"base_quantum_s": 1e6}}}
"""By system, what keeps it from preempting: no request outlives its first quantum, as in fastserve's last queue."""
_COPIES_BYTES_PER_S = 1e15
_MOST_ADMISSION_STEPS = 64
_FREE_SEATS = 64
_FREE_BLOCKS = LONG_PROMPT_TOKENS // BLOCK // 4
_MOST_EMPTY_STEPS = 4


def split(label: str) -> tuple[str, str | None]:
    """Return system and tier of a label.

    Raises:
        ValueError: there is no such tier.
    """
    system, colon, tier = label.partition(":")
    if colon and tier not in TIER_OPTIONS:
        raise ValueError(f"{label}: what follows : must be one of {', '.join(TIER_OPTIONS)}")
    return system, tier or None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the grid."""

    running: int
    waiting: int
    memory_bound: bool = False
    """Seats are free, but the head of the queue does not fit into KV memory; otherwise every seat is taken."""

    @property
    def key(self) -> str:
        """Part of the names of metrics."""
        return f"{self.running}_running_{self.waiting}_waiting" + ("_memory_bound" if self.memory_bound else "")

    @property
    def state(self) -> str:
        """Name of the state, for the table."""
        return "memory" if self.memory_bound else "seats"


@dataclass
class Times:
    """Per-step times of one system in one cell, one list per block, in seconds."""

    schedule: list[list[float]] = field(default_factory=list)
    update: list[list[float]] = field(default_factory=list)
    policy: list[float] = field(default_factory=list)
    """Mean time of policies per step, one per block."""

    def total(self) -> np.ndarray:
        """[blocks, steps per block]"""
        both: np.ndarray = np.array(self.schedule) + np.array(self.update)
        return both


class Subject:
    """A scheduler in a steady state: N requests decode, M wait, and nobody can join.

    In the memory-bound state, blocks that nobody uses are taken out of the pool or put back between steps, so that what
    is free always lasts for the running requests and never for the head of the queue. They stand for KV that others
    hold, and are counted as such by policies that count blocks.
    """

    def __init__(self, name: str, cell: Cell, timer: Callable[[], float]) -> None:
        self.name = name
        self.times = Times()
        self.clock = VirtualClock(1000.0)
        self.preempted = 0
        self.fallbacks = 0
        """Steps in which a policy failed, or let nothing run; known at the end."""
        self.running: list[int] = []
        """Running requests after each step, warm-up included."""
        self._timer = timer
        self._cell = cell
        self._ballast: list[Any] = []
        self._policy_steps, self._policy_s = 0, 0.0
        system, kind = (None, None) if name == BASELINE else split(name)
        options: dict[str, Any] = {"system": system, **STEADY_OPTIONS.get(system, {})} if system else {}
        connector: dict[str, Any] = {}
        if kind:
            options["kv_tier"] = TIER_OPTIONS[kind]
            tier = KvTierConfig(**TIER_OPTIONS[kind])
            if tier.gib:
                connector["kv_transfer_config"] = transfer_config(tier)
        # Room for everybody's longest output, so that policies that reserve it let all requests in at the start.
        blocks = cell.running * (-(-(PROMPT_TOKENS + BLOCK + MAX_TOKENS) // BLOCK) + 1) + 64
        self.scheduler: Any = make_scheduler(
            STEERED if system else None,
            num_blocks=blocks,
            max_num_seqs=cell.running + (_FREE_SEATS if cell.memory_bound else 0),
            max_num_batched_tokens=8192,
            max_model_len=16384,
            async_scheduling=True,
            additional_config={"vllm_ext": options} if options else {},
            **connector,
        )
        self._tier = _tier(self.scheduler) if connector else None
        if system:
            self.scheduler.clock = self.clock
            self._fill_history()
            self._time_policies()
        self.runner = TokenRunner(defaultdict(int))  # nobody ends before its bound
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._start()

    def _start(self) -> None:
        cell = self._cell
        # Prompts of all lengths modulo a block: the requests need their next blocks in different steps.
        lengths = {PROMPT_TOKENS + i: len(range(i, cell.running, BLOCK)) for i in range(BLOCK)}
        self._add("run", lengths, over_s=0.0)
        for _ in range(_MOST_ADMISSION_STEPS):
            self.step()
            if len(self.scheduler.running) == cell.running:
                break
        for _ in range(WARMUP_STEPS // 2):
            self.step()
        if cell.memory_bound:
            self._hold_memory()
        prompt = LONG_PROMPT_TOKENS if cell.memory_bound else PROMPT_TOKENS
        self._add("wait", {prompt: cell.waiting}, over_s=AGE_LIMIT_S)
        for _ in range(WARMUP_STEPS // 2):
            self.step()
        if len(self.scheduler.running) < cell.running and not self.preempted:
            raise RuntimeError(f"{self.name}: {len(self.scheduler.running)} requests run instead of {cell.running}")

    def _time_policies(self) -> None:
        """Time the policies by the timer of the steps: the scheduler's own counters are of wall time."""
        plan = self.scheduler._plan

        def timed(now: float) -> Any:
            start = self._timer()
            found = plan(now)
            self._policy_s += self._timer() - start
            self._policy_steps += 1
            return found

        self.scheduler._plan = timed

    def _fill_history(self) -> None:
        lengths = np.random.default_rng(0).lognormal(np.log(PREDICTED_TOKENS / 2), 0.8, FINISHED_LENGTHS)
        for length in np.clip(lengths, 1, MAX_TOKENS):
            self.scheduler.tracked.finished_lengths.add(int(length))

    def _add(self, prefix: str, counts: Mapping[int, int], over_s: float) -> None:
        """Add requests by prompt length, ``over_s`` seconds of virtual time from the first to the last."""
        total = sum(counts.values())
        for request in _requests(prefix, counts):
            self.clock.advance(over_s / total)
            request.arrival_time = self.clock()
            self.scheduler.add_request(request)

    def _hold_memory(self) -> None:
        """Leave as many blocks free as the running requests may take in a step, and less than the head needs."""
        pool = self.scheduler.kv_cache_manager.block_pool
        wanted = -(-self._cell.running // BLOCK) + _FREE_BLOCKS
        surplus = pool.get_num_free_blocks() - wanted
        if surplus > 0:
            self._ballast += pool.get_new_blocks(surplus)
        elif surplus < 0 and self._ballast:
            back, self._ballast = self._ballast[surplus:], self._ballast[:surplus]
            pool.free_blocks(back)

    def step(self) -> tuple[float, float]:
        """Schedule a step, process the output of the one before; return the seconds of both.

        A schedule without a token is no model step: its time counts to the step after it.
        """
        self.clock.advance(STEP_S)
        if self._ballast:
            self._hold_memory()
        schedule_s = update_s = 0.0
        for _ in range(_MOST_EMPTY_STEPS):
            start = self._timer()
            output = self.scheduler.schedule()
            schedule_s += self._timer() - start
            self.preempted += len(output.preempted_req_ids or ())
            self._in_flight.append((output, self._execute(output)))
            if len(self._in_flight) >= 2:
                done, result = self._in_flight.popleft()
                start = self._timer()
                self.scheduler.update_from_output(done, result)
                update_s += self._timer() - start
            if output.total_num_scheduled_tokens:
                break
        self.running.append(len(self.scheduler.running))
        return schedule_s, update_s

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result, _ = self.runner.execute(output.num_scheduled_tokens, self.scheduler.requests)
        if self._tier is None:
            return result
        now = self.clock()
        self._tier.before_forward(output, now, now)
        return self._tier.after_forward(output, result, now)

    def block(self, steps: int) -> None:
        """Take one block of timed steps."""
        old_count, old_seconds = self._policy_steps, self._policy_s
        pairs = [self.step() for _ in range(steps)]
        self.times.schedule.append([schedule_s for schedule_s, _ in pairs])
        self.times.update.append([update_s for _, update_s in pairs])
        if (count := self._policy_steps - old_count) > 0:
            self.times.policy.append((self._policy_s - old_seconds) / count)

    @property
    def mean_running(self) -> float:
        """Running requests per timed step."""
        timed = sum(map(len, self.times.schedule))
        return float(np.mean(self.running[-timed:])) if timed else 0.0

    def drop(self) -> None:
        """Free what is large and keep what was measured: a long queue holds gigabytes."""
        if self.name != BASELINE:
            counters = self.scheduler.observer.counters
            self.fallbacks = counters.fallbacks + counters.stalls
        del self.scheduler, self.runner, self._tier
        self._in_flight.clear()
        self._ballast.clear()


def _tier(scheduler: Any) -> Tier:
    """Return the worker's side of a scheduler's tier, whose copies are through by the next step."""
    copies = SimulatedCopies(TransferLink(_COPIES_BYTES_PER_S), block_bytes=BLOCK)
    return Tier(scheduler, worker_side(scheduler), copies)


def _requests(prefix: str, counts: Mapping[int, int]) -> Iterator[Request]:
    """Requests by prompt length; their objectives take turns.

    Those who wait share their prompt with each other, to build them fast, and with nobody who runs: a step in which
    none of them can join needs the blocks of the whole prompt. They are predicted to be longer than those who run:
    preempting is work, not overhead.
    """
    made = []
    for tokens, count in counts.items():
        for turn, tbt_ms in enumerate(TBT_SLO_MS):
            osl = PREDICTED_TOKENS if prefix == "run" else 2 * PREDICTED_TOKENS
            hints = {"osl": osl, "ttft_slo_ms": TTFT_SLO_MS, "tbt_slo_ms": tbt_ms}
            share = len(range(turn, count, len(TBT_SLO_MS)))
            name = f"{prefix}-{tokens}-{turn}-"
            made.append(
                make_requests(
                    name,
                    share,
                    tokens,
                    MAX_TOKENS,
                    extra_args=hints,
                    hasher=block_hasher(BLOCK),
                    first_token=100 if prefix == "run" else 50_000,
                )
            )
    return (request for request in chain.from_iterable(zip_longest(*made)) if request is not None)
