"""A real scheduler with the real tier, copies that do what they like, and all that can happen to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec, TransferResult
from vllm.v1.outputs import ModelRunnerOutput

from tests.support.audit import AuditError, audit
from tests.support.engine_loop import EngineLoop
from tests.support.tier_audit import TransferAuditor, audit_quiet, audit_reservations, audit_tier
from vllm_ext.config.kv_tier import QUANTISED, KvTierConfig
from vllm_ext.contract import Room, Step
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.connector.options import transfer_config
from vllm_ext.kv.host.report import WorkerReport
from vllm_ext.kv.host.worker import TierWorker
from vllm_ext.kv.partial_prefix.layout import layouts_of
from vllm_ext.simulation.cost.link import Direction, TransferLink
from vllm_ext.simulation.engine.events import VirtualClock
from vllm_ext.simulation.engine.harness import KvShape, block_hasher, make_request, make_scheduler
from vllm_ext.simulation.engine.simulated_copies import SimulatedCopies, _Transfer
from vllm_ext.simulation.engine.tier import Tier, worker_side
from vllm_ext.simulation.engine.token_runner import TokenRunner
from vllm_ext.systems import System, register
from vllm_ext.systems.upstream import Arrival, InOrder

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
MIN_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE + 1
"""vLLM requires that a single request of the greatest length fits; one block is reserved."""
_LAYERS, _PAGE_BYTES = 2, 4096
_BLOCK_BYTES = _LAYERS * _PAGE_BYTES
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


_DELAYS_S = (0.0, 0.0, 0.5, 1.0, 3.0, 10.0, 40.0)
"""Until a copy is through; a step takes about a second. The last is longer than most requests live."""

BYTES_PER_S = 4e9
"""What a copy is reported to have moved while it was made, however long it lay in a queue."""


class ChaosCopies(SimulatedCopies, TierWorker):
    """Copies that take as long as dice say, end in any order, and fail; those within a step are through when it ends.

    It is a `TierWorker`, so that the connector asks it what failed; it has no thread.
    """

    def __init__(self, setup: Setup, auditor: TransferAuditor) -> None:
        SimulatedCopies.__init__(self, TransferLink(1.0), block_bytes=float(_BLOCK_BYTES))
        self.auditor = auditor
        self.failed_jobs = self.step_loads = self.failed_step_loads = self.loaded_in_steps = 0
        """All but the last, which is in blocks, are jobs."""
        self.failing = {Direction.TO_HOST: setup.failing_stores, Direction.TO_DEVICE: setup.failing_loads}
        """Share of jobs that fail."""
        self._slow = setup.slow
        self._dice = random.Random(setup.seed)
        self._ends: dict[int, float] = {}
        self._specs: dict[int, tuple[GPULoadStoreSpec, BlockIDsLoadStoreSpec]] = {}
        self._report = WorkerReport()

    @property
    def open_jobs(self) -> int:
        """Jobs that are not through."""
        return len(self._begun)

    def load_by_layer(self, jobs: Mapping[int, TransferJob]) -> Any:
        """Load all at once."""
        for job_id, job in jobs.items():
            self.submit_load(job_id, job.src_spec, job.dst_spec)
            self.failed_step_loads += self._end(job_id, in_step=True)
            self.loaded_in_steps += len(job.dst_spec.block_ids)
        self.step_loads += len(jobs)
        return SimpleNamespace(wait=lambda tensor=None: None, tensors=())

    def take_report(self) -> WorkerReport:
        """Return what failed since the last time; no time passes here."""
        report, self._report = self._report, WorkerReport()
        return report

    def next_end_s(self) -> float | None:
        """Return when the next job will be through; None if there is none."""
        return min(self._ends.values(), default=None)

    def shutdown(self) -> None:
        """There is no thread to end."""

    def _submit(self, job_id: int, direction: Direction, device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec) -> bool:
        start_s = max(self.host_s, self.stream_s)
        self._begun[job_id] = _Transfer(start_s, job_id, direction, len(device.block_ids), 1)
        self._specs[job_id] = device, host
        slow = self._dice.random() < self._slow
        self._ends[job_id] = start_s + (self._dice.choice(_DELAYS_S) if slow else 0.0) + self._dice.random() / 8
        self.auditor.submitted(job_id, direction, device, host)
        return True

    def _run_until(self, now: float) -> None:
        through = [job_id for job_id, end_s in self._ends.items() if end_s <= now]
        self._dice.shuffle(through)
        for job_id in through:
            self._end(job_id)

    def _end(self, job_id: int, *, in_step: bool = False) -> bool:
        """Let a job be through; return whether it failed."""
        transfer, (device, host) = self._begun.pop(job_id), self._specs.pop(job_id)
        del self._ends[job_id]
        lost: list[int] = []
        if failed := self._dice.random() < self.failing[transfer.direction]:
            self.failed_jobs += 1
            lost = self._fail(transfer, device.block_ids.tolist(), host.block_ids.tolist())
        self.auditor.finished(job_id, lost, in_step=in_step)
        num_bytes = int(transfer.num_blocks * self.block_bytes)
        self._results.append(TransferResult(job_id, True, num_bytes, num_bytes / BYTES_PER_S))
        return failed

    def _fail(self, transfer: _Transfer, blocks: list[int], chunks: list[int]) -> list[int]:
        """Note a failure as `TierWorker` does; return the blocks of the target that hold nothing."""
        if transfer.direction is Direction.TO_DEVICE:
            self._report.chunks.update(chunks)
            self._report.blocks.update(blocks)
            self._report.load_jobs.add(transfer.job_id)
            return blocks
        broken = [chunk for chunk in chunks if self._dice.random() < 0.5] or chunks
        self._report.chunks.update(broken)
        return broken


class TierRig:
    """Applies events to an engine with a tier, and checks it after each step."""

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
        self.auditor = TransferAuditor(self.scheduler)
        self.copies = ChaosCopies(setup, self.auditor)
        self.tier = Tier(self.scheduler, worker_side(self.scheduler), self.copies)
        self.tier.use_clock(self.clock)
        if not setup.copies_pay and self.side.stores is not None:
            self.side.stores.use(self.clock, lambda end: 0.0)
        self.loop = EngineLoop(self.scheduler, _Runner(self), depth=2 if setup.async_scheduling else 1)
        self.steps = self.num_preemptions = 0
        self._waited = 0
        self._live: list[str] = []
        self._after("_preempt_request", self._count_preemption)
        self._after("update_from_output", self._forgive_no_more)

    @staticmethod
    def _make_scheduler(setup: Setup) -> Any:
        tier = KvTierConfig(gib=1.0, bits=setup.bits, policy=setup.policy, store=setup.store, load=setup.load)
        config = transfer_config(tier)
        record = RecordFormat(PageLayout.rows(torch.bfloat16, 1, _PAGE_BYTES // (4 * BLOCK_SIZE), BLOCK_SIZE))
        chunk_bytes = _LAYERS * (record.record_bytes if setup.bits == QUANTISED else _PAGE_BYTES)
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
            kv_shape=KvShape(_BLOCK_BYTES, layers=_LAYERS, dtype="bfloat16"),
        )

    def _after(self, method: str, then: Callable[..., None]) -> None:
        """Let something follow each call of a method of the scheduler's."""
        original = getattr(self.scheduler, method)

        def called(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            then(*args)
            return result

        setattr(self.scheduler, method, called)

    def _count_preemption(self, *_: Any) -> None:
        self.num_preemptions += 1

    def _forgive_no_more(self, output: SchedulerOutput, *_: Any) -> None:
        self.auditor.failed_outputs = [failed for failed in self.auditor.failed_outputs if failed is not output]

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

    def leave_on_host(self, prompt: Sequence[int]) -> None:
        """Compute a prompt, and let the device forget it."""
        self.add(prompt, 1)
        self.settle()
        assert self.reset(running=False, connector=False)

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


def quiet(**options: Any) -> TierRig:
    """An engine whose copies take no time and do not fail."""
    return TierRig(Setup(**{"slow": 0.0, "num_blocks": 2 * MIN_BLOCKS, "host_chunks": 30, **options}))
