"""Copies that take as long as dice say, end in any order, and fail: what a worker may do to the scheduler's side."""

from __future__ import annotations

import random

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec, TransferResult

from vllm_ext.kv.host.report import WorkerReport
from vllm_ext.kv.host.worker import TierWorker
from vllm_ext.simulation.cost.link import Direction, TransferLink
from vllm_ext.simulation.engine.simulated_copies import SimulatedCopies, _Transfer

_DELAYS_S = (0.0, 0.0, 0.5, 1.0, 3.0, 10.0, 40.0)
"""Until a copy is through; a step takes about a second. The last is longer than most requests live."""

BYTES_PER_S = 4e9
"""What a copy is reported to have moved while it was made, however long it lay in a queue."""


class ChaosCopies(SimulatedCopies, TierWorker):
    """Copies whose ends dice choose. It is a `TierWorker`, so that the connector asks it what failed; it has no thread.

    Args:
        dice: Where chance comes from.
        block_bytes: Bytes of a device block.
        slow: Share of copies that take longer than a step.
        failing_stores, failing_loads: Share of jobs that fail.
    """

    def __init__(
        self,
        dice: random.Random,
        *,
        block_bytes: int,
        slow: float = 0.5,
        failing_stores: float = 0.0,
        failing_loads: float = 0.0,
    ) -> None:
        SimulatedCopies.__init__(self, TransferLink(1.0), block_bytes=float(block_bytes))
        self.failed_jobs = 0
        self._dice = dice
        self._slow = slow
        self._share = {Direction.TO_HOST: failing_stores, Direction.TO_DEVICE: failing_loads}
        self._ends: dict[int, float] = {}
        self._specs: dict[int, tuple[GPULoadStoreSpec, BlockIDsLoadStoreSpec]] = {}
        self._report = WorkerReport()

    @property
    def open_jobs(self) -> int:
        """Jobs that are not through."""
        return len(self._begun)

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
        if self.auditor is not None:
            self.auditor.submitted(job_id, direction, device, host)
        return True

    def _run_until(self, now: float) -> None:
        through = [job_id for job_id, end_s in self._ends.items() if end_s <= now]
        self._dice.shuffle(through)
        for job_id in through:
            self._end(job_id)

    def _end(self, job_id: int) -> None:
        transfer, (device, host) = self._begun.pop(job_id), self._specs.pop(job_id)
        del self._ends[job_id]
        lost: list[int] = []
        if self._dice.random() < self._share[transfer.direction]:
            self.failed_jobs += 1
            lost = self._fail(transfer, device.block_ids.tolist(), host.block_ids.tolist())
        if self.auditor is not None:
            self.auditor.finished(job_id, lost)
        num_bytes = int(transfer.num_blocks * self.block_bytes)
        self._results.append(TransferResult(job_id, True, num_bytes, num_bytes / BYTES_PER_S))

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
