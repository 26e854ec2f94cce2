"""`TierRig` with loads within the step, which may fail, and an auditor that knows what a step may then have read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.support.audit import AuditError
from tests.support.tier_audit import TransferAuditor
from vllm_ext.simulation.cost.link import Direction

from .tier_stateful_copies import ChaosCopies
from .tier_stateful_rig import Setup, TierRig

_GARBAGE = b"computed from what was not loaded"


class ForgivingAuditor(TransferAuditor):
    """Lets a step read what was not loaded, as long as the scheduler can't know of it; what that writes is garbage.

    Garbage may be copied to the host and back, where nobody may read it once the scheduler has been told.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.failed_outputs: list[SchedulerOutput] = []
        """Steps whose loads failed, until the scheduler has taken their output."""
        self.load_failed = False
        """Whether a load of the step that is being launched did."""
        self.spoilt_requests = 0

    def launched(self, output: SchedulerOutput) -> None:
        """Check request by request."""
        if self.load_failed:
            self.failed_outputs.append(output)
            self.load_failed = False
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            one: Any = SimpleNamespace(num_scheduled_tokens={req_id: num_tokens})
            try:
                super().launched(one)
            except AuditError:
                if not (self.failed_outputs and self._spoil(req_id, num_tokens)):
                    raise

    def finished(self, job_id: int, lost: Collection[int] = ()) -> None:
        """As the base's; what was not loaded may be copied out again, since nobody knows of it yet."""
        to_device = self._jobs[job_id].direction is Direction.TO_DEVICE
        super().finished(job_id, lost)
        if to_device:
            self._device.update(dict.fromkeys(lost, _GARBAGE))

    def _spoil(self, req_id: str, num_tokens: int) -> bool:
        """Let a step write garbage, if it read some; False if it did not."""
        computed = self._scheduler.requests[req_id].num_computed_tokens
        (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(req_id)
        read = [blocks[number] for number, _ in self._ends(0, computed - num_tokens)]
        if all(self._device.get(block) != _GARBAGE for block in read):
            return False
        self.spoilt_requests += 1
        for number, end in self._ends(0, computed):
            if end > computed - num_tokens:
                self._device[blocks[number]] = _GARBAGE
        return True


class SteppingCopies(ChaosCopies):
    """Copies of which those within a step are through when it ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_loads = 0
        self.failed_step_loads = 0
        self.loaded = 0
        """Blocks."""

    def fail_loads(self, share: float) -> None:
        """Let so many of the loads fail."""
        self._share[Direction.TO_DEVICE] = share

    def load_by_layer(self, jobs: Mapping[int, TransferJob]) -> Any:
        """Load all at once."""
        failed_before = self.failed_jobs
        for job_id, job in jobs.items():
            self.submit_load(job_id, job.src_spec, job.dst_spec)
            self._end(job_id)
            self.loaded += len(job.dst_spec.block_ids)
        self.step_loads += len(jobs)
        failed = self.failed_jobs - failed_before
        self.failed_step_loads += failed
        auditor: Any = self.auditor
        auditor.load_failed |= failed > 0
        return SimpleNamespace(wait=lambda tensor=None: None, tensors=())


class StepRig(TierRig):
    """An engine with a tier that loads within the step."""

    copies_type = SteppingCopies
    auditor_type = ForgivingAuditor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        auditor: Any = self.auditor
        original = self.scheduler.update_from_output

        def update(output: SchedulerOutput, model_output: ModelRunnerOutput) -> Any:
            result = original(output, model_output)
            auditor.failed_outputs = [failed for failed in auditor.failed_outputs if failed is not output]
            return result

        self.scheduler.update_from_output = update
