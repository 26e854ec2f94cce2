"""The copies of vLLM's offloading worker, as transfers on a link in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec, OffloadingWorker, TransferResult

from vllm_ext.kv.host.copies import LayerCopies
from vllm_ext.kv.host.report import WorkerReport
from vllm_ext.simulation.cost.link import Direction, TransferLink

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob


class _Transfer(NamedTuple):
    start_s: float
    job_id: int
    direction: Direction
    num_blocks: int
    num_copies: int


class SimulatedCopies(OffloadingWorker):
    """Copies that take what a link's model says.

    Args:
        link: Between each device and the host.
        block_bytes: What one block of one device moves over the link.
        copies_per_block: Copies one block takes; vLLM's layout for offloading has one region per layer.
        quantise_s_per_block: Time for a block that is not hidden behind its copy, in seconds.
        num_devices: Devices whose copies go side by side. To the scheduler's side they are one worker, which moves the
            bytes of all of them: so it is told, or it would learn the speed of one link for the chunks of all.
    """

    def __init__(
        self,
        link: TransferLink,
        *,
        block_bytes: float,
        copies_per_block: int = 0,
        quantise_s_per_block: float = 0.0,
        num_devices: int = 1,
    ) -> None:
        self.link = link
        self.block_bytes = block_bytes
        self.num_devices = num_devices
        self.host_s = 0.0
        """What the worker's host thread has come to, in virtual time."""
        self.stream_s = 0.0
        """When the device will be through with all that was launched."""
        self.loaded_blocks = self.stored_blocks = 0
        """Blocks of transfers that are through."""
        self.waited_s = 0.0
        """Time the host waited for stores before it could launch a step."""
        self.exposed_s = 0.0
        """Time by which loads within steps made these longer."""
        self.auditor: Any = None
        """A test's: is told of jobs ``submitted`` and ``finished`` and of steps ``launched``, and may raise."""
        self._copies_per_block = copies_per_block
        self._quantise_s_per_block = quantise_s_per_block
        self._begun: dict[int, _Transfer] = {}  # submitted and not through, by the link's id
        self._results: list[TransferResult] = []
        self._layers: tuple[float, float] | None = None
        """When the loads of the step that is being launched begin and end; None: it has none."""
        self._busy_s = 0.0
        """Until when the worker's host thread waits for such loads."""

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        """Copy blocks to the host once the device is through with what was launched."""
        return self._submit(job_id, Direction.TO_HOST, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy blocks to the device once it is through with what was launched."""
        return self._submit(job_id, Direction.TO_DEVICE, dst_spec, src_spec)

    def step_begins(self, host_s: float, device_free_s: float) -> None:
        """Take when the engine core hands a step over, and when the device is through with those before; in seconds."""
        self.host_s, self.stream_s = max(host_s, self._busy_s), device_free_s

    def load_by_layer(self, jobs: Mapping[int, TransferJob]) -> LayerCopies:
        """Load for the step that is being launched, while it computes; see `forward_end_s`."""
        for job_id, job in jobs.items():
            self.submit_load(job_id, job.src_spec, job.dst_spec)
        begin_s = max(self.host_s, self.stream_s)
        self._layers = begin_s, self._end_s(set(jobs), begin_s)
        return LayerCopies((), ())

    def forward_end_s(self, start_s: float, compute_s: float, num_layers: int) -> float:
        """Return when a forward ends, each of whose layers waits for its own share of the step's loads, in seconds.

        Layer l of L can begin when l + 1 shares are there, and L - l layers are still to be computed then: the latest
        of these is that of the first or of the last layer.

        Args:
            start_s: When the device can begin.
            compute_s: What it takes without waiting.
            num_layers: Of the model.
        """
        if self._layers is None:
            return start_s + compute_s
        begin_s, end_s = self._layers
        first_s = begin_s + (end_s - begin_s) / num_layers
        found = max(start_s + compute_s, first_s + compute_s, end_s + compute_s / num_layers)
        self.exposed_s += found - start_s - compute_s
        return found

    def step_ends(self) -> None:
        """Let the host wait for the step's loads, as the worker does before it reports."""
        if self._layers is not None:
            self._busy_s = self._layers[1]
            self.host_s = max(self.host_s, self._busy_s)
            self._layers = None

    def take_report(self) -> WorkerReport:
        """Return nothing: no copy fails, and the link's times are told by `get_finished`."""
        return WorkerReport()

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that are through by ``host_s``, each once; their times are those of an idle link."""
        self._run_until(self.host_s)
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Let the host wait until none of these jobs is under way."""
        self._run_until(self.host_s)
        before = self.host_s
        self.host_s = self._end_s(job_ids, self.host_s)
        self.waited_s += self.host_s - before

    def next_end_s(self) -> float | None:
        """Return when the next copy will be through; None if there is none."""
        return self.link.next_end_s()

    def _end_s(self, job_ids: set[int], now: float) -> float:
        """Run until none of these jobs is under way and return when that is, or ``now`` if it is later."""
        while any(transfer.job_id in job_ids for transfer in self._begun.values()):
            end_s = self.next_end_s()
            if end_s is None:
                raise RuntimeError(f"jobs {sorted(job_ids)} were submitted and never end")
            now = max(end_s, now)
            self._run_until(now)
        return now

    def _submit(self, job_id: int, direction: Direction, device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec) -> bool:
        num_blocks = len(device.block_ids)
        num_copies = max(1, num_blocks * self._copies_per_block)
        start_s = max(self.host_s, self.stream_s)
        transfer = _Transfer(start_s, job_id, direction, num_blocks, num_copies)
        self._begun[self.link.submit(transfer.start_s, direction, *self._work(transfer))] = transfer
        if self.auditor is not None:
            self.auditor.submitted(job_id, direction, device, host)
        return True

    def _work(self, transfer: _Transfer) -> tuple[float, int, float]:
        """Return bytes, copies, and set-up time in seconds."""
        quantise_s = transfer.num_blocks * self._quantise_s_per_block
        return transfer.num_blocks * self.block_bytes, transfer.num_copies, quantise_s

    def _run_until(self, now: float) -> None:
        for transfer_id in self.link.advance(now):
            transfer = self._begun.pop(transfer_id)
            if transfer.direction is Direction.TO_DEVICE:
                self.loaded_blocks += transfer.num_blocks
            else:
                self.stored_blocks += transfer.num_blocks
            work = self._work(transfer)
            size = int(work[0] * self.num_devices)
            self._results.append(TransferResult(transfer.job_id, True, size, self.link.alone_s(*work)))
            if self.auditor is not None:
                self.auditor.finished(transfer.job_id)
