"""One scheduler of the matrix with its runner, loop and clock, and the things that can happen to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput

from tests.support.audit import audit, audit_drained
from tests.support.engine_loop import EngineLoop
from tests.support.fake_runner import FakeRunner
from tests.support.systems_matrix import Row
from vllm_ext.simulation.engine.events import VirtualClock
from vllm_ext.simulation.engine.harness import block_hasher, make_request, make_scheduler
from vllm_ext.simulation.measure.run_data import Decision

MAX_MODEL_LEN = 160
"""Below the smallest pool, as vLLM requires: any single request can finish."""
MIN_BLOCKS = 12
TOKEN_BUDGET = 48
STEP_S = 0.02
"""What a step takes on the virtual clock, between its schedule and its output."""
IDLE_STEP_S = 0.001
MAX_DRAIN_STEPS = 4000


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request as a test describes it."""

    prompt_len: int = 20
    shared_len: int = 0
    """Leading tokens taken from the family's common text."""
    family: int = 0
    max_tokens: int = 16
    true_len: int = 8
    """Hidden: the runner stops there unless ``max_tokens`` comes first."""
    osl: int | None = None
    """What the client announces, right or wrong."""
    priority: int = 0
    ttft_slo_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class RigConfig:
    depth: int = 1
    caching: bool = True
    num_blocks: int = 64
    max_num_seqs: int = 6
    v2_model_runner: bool = False


class Rig:
    """Applies events to a scheduler and keeps the books a client would."""

    def __init__(self, row: Row, config: RigConfig | None = None) -> None:
        self.row = row
        self.config = config = config or RigConfig()
        self.clock = VirtualClock(1000.0)
        self.true_lengths: dict[str, int] = {}
        self.arrivals: dict[str, Arrival] = {}
        pipelined = config.depth == 2
        self.scheduler = make_scheduler(
            row.scheduler_cls,
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=TOKEN_BUDGET,
            max_model_len=MAX_MODEL_LEN,
            async_scheduling=pipelined,
            enable_prefix_caching=config.caching,
            additional_config={"vllm_ext": dict(row.options)},
            v2_model_runner=config.v2_model_runner,
        )
        if row.scheduler_cls is not None:
            self.scheduler.clock = self.clock
        self.runner = FakeRunner(output_lengths=self.true_lengths, pipelined=pipelined, v2=config.v2_model_runner)
        self.loop = EngineLoop(self.scheduler, self.runner, depth=config.depth, on_schedule=self._run_for_a_while)

    def _run_for_a_while(self, output: SchedulerOutput) -> None:
        self.clock.advance(STEP_S if output.total_num_scheduled_tokens else IDLE_STEP_S)

    def arrive(self, arrival: Arrival) -> str:
        req_id = f"r{len(self.arrivals)}"
        self.arrivals[req_id] = arrival
        self.true_lengths[req_id] = arrival.true_len
        shared = min(arrival.shared_len, arrival.prompt_len)
        tokens = [1000 + 1000 * arrival.family + i % 900 for i in range(shared)]
        tokens += [100 + (7 * len(self.arrivals) + i) % 800 for i in range(arrival.prompt_len - shared)]
        extra_args: dict[str, Any] = {"bench_output_len": arrival.true_len, "tag": f"client {arrival.family}"}
        if arrival.osl is not None:
            extra_args["osl"] = arrival.osl
        if arrival.ttft_slo_ms is not None:
            extra_args["ttft_slo_ms"] = arrival.ttft_slo_ms
        request = make_request(
            req_id,
            tokens,
            max_tokens=arrival.max_tokens,
            arrival_time=self.clock(),
            extra_args=extra_args,
            priority=arrival.priority,
            hasher=block_hasher() if self.config.caching else None,
        )
        self.loop.add(request)
        return req_id

    def step(self) -> Decision | None:
        return self.loop.step()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def abort(self, number: int, while_executing: bool = False) -> None:
        if self.arrivals:
            self.loop.abort([f"r{number % len(self.arrivals)}"], while_executing=while_executing)

    def reset_prefix_cache(self) -> None:
        self.loop.reset_prefix_cache()

    def pause(self, state: PauseState) -> None:
        self.scheduler.set_pause_state(state)

    def audit(self) -> None:
        audit(self.scheduler)

    def drain(self, before_step: Callable[[], None] | None = None) -> None:
        """Resume, run until idle, and check that every client got what it was owed, once."""
        self.pause(PauseState.UNPAUSED)
        self.loop.run_until_idle(max_steps=MAX_DRAIN_STEPS, before_step=before_step)
        audit_drained(self.scheduler)
        for req_id in self.arrivals:
            self._check_outcome(req_id)

    def _check_outcome(self, req_id: str) -> None:
        outcome, arrival = self.loop.outcomes[req_id], self.arrivals[req_id]
        assert outcome.num_finishes == 1, f"{req_id} finished {outcome.num_finishes} times"
        expected = [self.runner.token_at(req_id, i) for i in range(len(outcome.token_ids))]
        assert outcome.token_ids == expected, f"{req_id} got tokens out of order"
        if outcome.finish_reason != "abort":
            room = MAX_MODEL_LEN - arrival.prompt_len
            limit = min(arrival.max_tokens, room)
            assert len(outcome.token_ids) == min(arrival.true_len, limit)
            assert outcome.finish_reason == ("stop" if arrival.true_len <= limit else "length")

    def state(self) -> dict[str, object]:
        """What the scheduler reports of itself; empty for upstream."""
        return self.scheduler.vllm_ext_state(0) if self.row.scheduler_cls is not None else {}
