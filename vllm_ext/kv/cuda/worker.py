"""The worker's side of the tier for KV on a CUDA device: vLLM's jobs, put into pieces for `kv.cuda.transfers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from vllm_ext.config.kv_tier import QUANTISED
from vllm_ext.kv.cuda.codec import DeviceCodec, Piece, QuantisedCudaCodec, RawCudaCodec, pieces_of
from vllm_ext.kv.cuda.device import CudaDevice, Device, PinnedMemory
from vllm_ext.kv.cuda.transfers import Transfers
from vllm_ext.kv.host.copies import group_transfers
from vllm_ext.kv.host.report import WorkerReport

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec

    from vllm_ext.kernels.kv_quant.format import PageLayout
    from vllm_ext.kv.host.geometry import TierGeometry


class CudaTierWorker(OffloadingWorker):
    """Copies on streams beside the engine's.

    A job that fails is reported as through, since vLLM's connector knows nothing else; what it left behind is in
    `take_report`, and must reach the scheduler with the report. Used by the engine's thread only.

    Args:
        codec: Copies blocks.
        tensors_of_group: By group of layers, the tensors that hold their KV.
        chunk_bytes: What a chunk moves over the link, for the statistics.
        device: Where KV is.
        pool: The pool's pinning, given back at the end.
        loads_first: Let stores wait for the loads before them: see `kv.cuda.transfers`.
    """

    def __init__(
        self, codec: DeviceCodec, tensors_of_group: Sequence[Sequence[int]], *, chunk_bytes: int, device: Device,
        pool: PinnedMemory | None = None, loads_first: bool = True,
    ) -> None:  # fmt: skip
        codec.prepare(tensors_of_group)
        self._tensors_of_group = [tuple(tensors) for tensors in tensors_of_group]
        self._chunk_bytes = chunk_bytes
        self._codec = codec
        self._pool = pool
        self._transfers = Transfers(device, codec, loads_first=loads_first)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        """Copy blocks into chunks, behind the engine's work so far and the loads."""
        return self._submit(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy chunks into blocks, behind the engine's work so far."""
        return self._submit(job_id, dst_spec, src_spec, is_load=True)

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last time, and launch what waited for room."""
        return [
            TransferResult(
                job.job_id,
                True,
                transfer_size=None if job.seconds is None else job.num_chunks * self._chunk_bytes,
                transfer_time=job.seconds,
            )
            for job in self._transfers.take_ended()
        ]

    def take_report(self) -> WorkerReport:
        """Return what is told once; call it after `get_finished`, so that no failure is reported too late."""
        return self._transfers.take_report()

    def wait(self, job_ids: set[int]) -> None:
        """Return when none of these jobs is under way; ids that were never submitted are passed over."""
        self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        """Finish the jobs at hand, and give the pool's pinning back."""
        self._transfers.drain()
        if self._pool is not None:
            self._pool.close()

    def _submit(self, job_id: int, device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec, *, is_load: bool) -> bool:
        try:
            self._transfers.submit(job_id, self._pieces(device, host), is_load=is_load)
        except Exception:  # noqa: BLE001 - a failed copy costs a recomputation, not the engine its life
            self._transfers.refuse(job_id, WorkerReport.of_failed(job_id, device, host, is_load=is_load))
        return True

    def _pieces(self, device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec) -> Iterator[Piece]:
        for group, chunks, blocks in group_transfers(device, host):
            yield from pieces_of(self._codec, self._tensors_of_group[group], chunks, blocks)


def cuda_worker(
    tensors: Sequence[torch.Tensor], tensors_of_group: Sequence[Sequence[int]], pool: torch.Tensor,
    geometry: TierGeometry, layout: PageLayout | None,
) -> CudaTierWorker:  # fmt: skip
    """Return a worker with its codec.

    Args:
        tensors: KV on one CUDA device, each of shape [num_blocks, page_bytes], int8.
        tensors_of_group: By group of layers, the tensors that hold their KV.
        pool: Host memory, shape [num_chunks, chunk_bytes], uint8, any stride between chunks; it is pinned here, or a
            warning logged.
        geometry: Of a chunk.
        layout: Of a page; needed with 8 bits only.

    Raises:
        ValueError: The tensors do not fit the geometry or the layout.
        RuntimeError: 8 bits, and no layout.
    """
    codec: DeviceCodec
    if geometry.bits != QUANTISED:
        codec = RawCudaCodec(tensors, pool, geometry)
    elif layout is None:
        raise RuntimeError("the layout of pages was not found out before the worker was built")
    else:
        codec = QuantisedCudaCodec(tensors, pool, geometry, layout)
    return CudaTierWorker(
        codec, tensors_of_group, chunk_bytes=geometry.chunk_bytes,
        device=CudaDevice(tensors[0].device), pool=PinnedMemory(pool),
    )  # fmt: skip
