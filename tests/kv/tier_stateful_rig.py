"""A real scheduler with the real tier, copies that do what they like, and all that can happen to them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.support.audit import AuditError, audit
from tests.support.engine_loop import EngineLoop
from tests.support.tier_audit import TransferAuditor
from vllm_ext.config.kv_tier import KvTierConfig
from vllm_ext.contract import Room, Step
from vllm_ext.kv.connector.options import transfer_config
from vllm_ext.kv.partial_prefix.layout import layouts_of
from vllm_ext.simulation.engine.events import VirtualClock
from vllm_ext.simulation.engine.harness import KvShape, block_hasher, make_request, make_scheduler
from vllm_ext.simulation.engine.tier import Tier, worker_side
from vllm_ext.simulation.engine.token_runner import TokenRunner
from vllm_ext.systems import System, register
from vllm_ext.systems.upstream import Arrival, InOrder

from .tier_stateful_books import audit_quiet, audit_reservations, audit_tier
from .tier_stateful_copies import ChaosCopies

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
MIN_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE + 1
"""vLLM requires that a single request of the greatest length fits; one block is reserved."""
_LAYERS, _PAGE_BYTES = 2, 4096
_LONGEST_WAIT_STEPS = 400
"""Without a token, though requests are left: longer than any copy takes."""
_IDLE_S = 1.0
LEFT: set[str] = set()
"""Requests that were preempted for the next step: they don't join in it."""


@dataclass(frozen=True, kw_only=True)
class InOrderButTheLeft(InOrder):
    """Admits as vLLM does, but for those in `LEFT`."""

    def select(self, step: Step, room: Room) -> None:
        """Take the first ones that fit."""
        for candidate in step.waiting():
            if candidate.request.req_id not in LEFT:
                if not room.fits(candidate):
                    return
                room.take(candidate)


register(System(name="test-tier-preempts", ordering=Arrival, admission=InOrderButTheLeft))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """An engine with a tier."""

    async_scheduling: bool = False
    prefix_caching: bool = True
    bits: int = 16
    store: str = "early"
    load: str = "between"
    policy: str = "retention"
    host_chunks: int = 12
    num_blocks: int = 24
    max_num_seqs: int = 6
    token_budget: int = 24
    slow: float = 0.5
    failing_stores: float = 0.0
    failing_loads: float = 0.0
    system: str = "test-tier-preempts"
    copies_pay: bool = True
    """Whether a step ever waits for a copy ahead of time; else computing everything again is free."""
    seed: int = 0


class TierRig:
    """Applies events to an engine with a tier, and checks it after each step."""

    copies_type: type[ChaosCopies] = ChaosCopies
    auditor_type: type[TransferAuditor] = TransferAuditor

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = VirtualClock()
        self.lengths: dict[str, int] = {}
        self.prompts: dict[str, list[int]] = {}
        self._victims: set[str] = set()
        LEFT.clear()
        self.scheduler = self._make_scheduler(setup)
        self.scheduler.clock = self.clock
        self.side: Any = self.scheduler.connector.connector_scheduler
        self.copies = self.copies_type(
            random.Random(setup.seed),
            block_bytes=_LAYERS * _PAGE_BYTES,
            slow=setup.slow,
            failing_stores=setup.failing_stores,
            failing_loads=setup.failing_loads,
        )
        self.auditor = self.auditor_type(self.scheduler)
        self.copies.auditor = self.auditor
        self.tier = Tier(self.scheduler, worker_side(self.scheduler), self.copies)
        self.tier.use_clock(self.clock)
        if not setup.copies_pay and self.side.stores is not None:
            self.side.stores.use(self.clock, lambda end: 0.0)
        self.loop = EngineLoop(self.scheduler, _Runner(self), depth=2 if setup.async_scheduling else 1)
        self.steps = self.num_preemptions = 0
        self._waited = 0
        self._live: list[str] = []
        self._count_preemptions()

    @staticmethod
    def _make_scheduler(setup: Setup) -> Any:
        tier = KvTierConfig(
            gib=1.0,
            bits=setup.bits,
            policy=setup.policy,
            store=setup.store,
            load=setup.load,
        )
        config = transfer_config(tier)
        chunk_bytes = _LAYERS * _PAGE_BYTES
        if setup.bits == 8:
            chunk_bytes = _record_bytes() * _LAYERS
        config.kv_connector_extra_config["cpu_bytes_to_use"] = setup.host_chunks * chunk_bytes
        return make_scheduler(
            "vllm_ext.scheduling.scheduler.SteeredScheduler",
            num_blocks=setup.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.token_budget,
            max_model_len=MAX_MODEL_LEN,
            async_scheduling=setup.async_scheduling,
            enable_prefix_caching=setup.prefix_caching,
            additional_config={"vllm_ext": {"system": setup.system}},
            log_stats=False,
            kv_transfer_config=config,
            kv_shape=KvShape(_LAYERS * _PAGE_BYTES, layers=_LAYERS, dtype="bfloat16"),
        )

    def _count_preemptions(self) -> None:
        original = self.scheduler._preempt_request

        def preempt(*args: Any, **kwargs: Any) -> None:
            self.num_preemptions += 1
            original(*args, **kwargs)

        self.scheduler._preempt_request = preempt

    # --- what happens -----------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        output_tokens: int,
        session: str | None = None,
        salt: str | None = None,
        hints: Mapping[str, Any] | None = None,
    ) -> str:
        """Let a client ask; its request stops by itself after so many tokens, one at least."""
        req_id = f"r{len(self.prompts)}"
        self._live.append(req_id)
        tokens = list(prompt)[: MAX_MODEL_LEN - 2]
        self.prompts[req_id] = tokens
        self.lengths[req_id] = max(1, min(output_tokens, MAX_MODEL_LEN - len(tokens) - 1))
        self.loop.add(
            make_request(
                req_id,
                tokens,
                max_tokens=MAX_MODEL_LEN,
                arrival_time=self.clock(),
                extra_args=hints,
                session_id=session,
                cache_salt=salt,
                hasher=block_hasher(BLOCK_SIZE),
            )
        )
        return req_id

    def abort(self, req_id: str, *, while_executing: bool = False) -> None:
        """Let a client go."""
        self.loop.abort([req_id], while_executing=while_executing)

    def preempt(self, req_id: str) -> None:
        """Let the system's policy preempt a request in the next step, if it runs then."""
        self._victims.add(req_id)

    def reset(self, *, running: bool, connector: bool) -> bool:
        """Reset the prefix cache, as before other weights are loaded; False if vLLM could not.

        It can't while a step under way writes into blocks; it has preempted the running requests then, and nothing that
        was computed before may be read all the same.
        """
        try:
            done = bool(self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector))
        except RuntimeError as error:
            if not self.loop.num_in_flight or "Failed to reset KV cache" not in str(error):
                raise
            done = False
        if (done or running) and connector:
            self.auditor.weights_changed()
        return done

    def step(self) -> None:
        """One step of the engine core, and all checks.

        Raises:
            AuditError: a check failed, or nothing was scheduled for so long that it never will be.
        """
        LEFT.clear()
        for request in [r for r in self.scheduler.running if r.request_id in self._victims]:
            self.scheduler.preempt_now(request, "policy", drop_output=self.scheduler.requires_kv_delivery)
            LEFT.add(request.request_id)
        self._victims.clear()
        decision = self.loop.step()
        self.steps += 1
        if decision is None or not decision.scheduled:
            self.clock.advance(_IDLE_S)
        waits = bool(self.scheduler.requests) and (decision is None or not decision.scheduled)
        self._waited = self._waited + 1 if waits else 0
        if self._waited > _LONGEST_WAIT_STEPS:
            raise AuditError(f"nothing scheduled in {self._waited} steps, left: {sorted(self.scheduler.requests)}")
        self.audit()

    def audit(self) -> None:
        """Check queues, blocks and the tier's books."""
        audit(self.scheduler)
        audit_tier(self.scheduler)
        audit_reservations(self.scheduler)

    def settle(self) -> None:
        """Step until nobody wants anything; what a reset leaves to the next step to wait for gets a next step."""
        while self.loop.has_work:
            self.step()
        while self.side._current_batch_jobs_to_flush:
            self.add([1, 2], 1)
            while self.loop.has_work:
                self.step()

    def drain(self) -> None:
        """Step until all is over, empty the tier, and check that nothing is left and nobody was lost.

        Raises:
            AuditError: something is left, or a request did not end exactly once.
        """
        self.settle()
        audit_quiet(self.scheduler)
        if self.auditor.open_jobs or self.copies.open_jobs:
            raise AuditError(f"{self.copies.open_jobs} copies under way when all is over")
        for req_id, outcome in self.loop.outcomes.items():
            if outcome.num_finishes != 1:
                raise AuditError(f"{req_id} ended {outcome.num_finishes} times")
            if outcome.finish_reason == "stop" and len(outcome.token_ids) != self.lengths[req_id]:
                raise AuditError(f"{req_id}: {len(outcome.token_ids)} tokens, not {self.lengths[req_id]}")

    # --- what is known ----------------------------------------------------------------------------------------------

    def live(self) -> Sequence[str]:
        """Return the requests that have not ended, oldest first."""
        outcomes = self.loop.outcomes
        self._live = [req_id for req_id in self._live if outcomes[req_id].finish_reason is None]
        return self._live

    def history(self, req_id: str) -> list[int]:
        """Return a request's prompt and what was generated: how its conversation's next turn begins."""
        return self.prompts[req_id] + self.loop.outcomes[req_id].token_ids


class _Runner:
    """What a model runner does with a tier, in virtual time."""

    def __init__(self, rig: TierRig) -> None:
        self._rig = rig
        self._tokens = TokenRunner(rig.lengths)
        self._device_free_s = 0.0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        rig = self._rig
        scheduled = output.num_scheduled_tokens
        model_output, shape = self._tokens.execute(scheduled, rig.scheduler.requests, layouts_of(output))
        ready_s = rig.tier.before_forward(output, rig.clock(), self._device_free_s)
        if shape.num_requests:
            self._device_free_s = max(ready_s, self._device_free_s) + 1.0
        model_output = rig.tier.after_forward(output, model_output, self._device_free_s)
        rig.clock.advance_to(max(ready_s, rig.clock()) + (1.0 if shape.num_requests else 0.0))
        return model_output

    def invalidate_kv(self) -> None:
        """Said by `EngineLoop`; the auditor knows."""


def _record_bytes() -> int:
    """Bytes of a layer's record in 8 bits; asked of the format, so that the tier holds exactly so many chunks."""
    import torch

    from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat

    channels = _PAGE_BYTES // (2 * BLOCK_SIZE)
    return RecordFormat(PageLayout.rows(torch.bfloat16, 1, channels // 2, BLOCK_SIZE)).record_bytes
