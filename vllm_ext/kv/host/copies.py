"""Jobs of vLLM's, as the copies that they come to: which block goes into which chunk, layer by layer."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vllm_ext.kv.host.report import LOAD, STORE, WorkerReport

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec

    from vllm_ext.kv.host.codec import Codec

Ids = npt.NDArray[np.int64]


def group_transfers(device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec) -> list[tuple[int, Ids, Ids]]:
    """Return the number of each group of layers that has blocks, its chunks, and its blocks, one for each chunk.

    vLLM lists the blocks of all groups one after the other, and likewise the chunks.

    Raises:
        ValueError: the lists do not fit each other.
    """
    num_blocks, num_chunks = len(device.block_ids), len(host.block_ids)
    if not sum(device.group_sizes) == num_blocks == num_chunks:
        allowed = f"must add up to the transfer's {num_blocks} blocks and {num_chunks} chunks"
        raise ValueError(f"group_sizes={list(device.group_sizes)}: {allowed}")
    ends = np.cumsum(device.group_sizes)
    chunks, blocks = (np.split(spec.block_ids.astype(np.int64), ends) for spec in (host, device))
    return [(group, chunks[group], blocks[group]) for group, size in enumerate(device.group_sizes) if size]


class Copy:
    """One job, and what became of it.

    Attributes:
        seconds: What copying took.
        error: Why it failed; from then on it copies nothing.
    """

    def __init__(
        self, job_id: int, device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec,
        tensors_of_group: Sequence[Sequence[int]], *, is_load: bool,
    ) -> None:  # fmt: skip
        self.job_id, self.device, self.host, self.is_load = job_id, device, host, is_load
        self.seconds = 0.0
        self.error: Exception | None = None
        self._unwritten: set[int] = set()
        self._parts: defaultdict[int, list[tuple[Ids, Ids]]] = defaultdict(list)
        """By tensor of KV: chunks and blocks."""
        try:
            for group, *ids in group_transfers(device, host):
                for tensor in tensors_of_group[group]:
                    self._parts[tensor].append((ids[0], ids[1]))
        except (ValueError, IndexError) as error:
            self.error = error

    @property
    def tensors(self) -> tuple[int, ...]:
        """Those of its layers, in their order."""
        return tuple(self._parts)

    def run(self, codec: Codec, tensor: int) -> None:
        """Copy one tensor's share, unless another's failed."""
        if self.error is not None:
            return
        started = time.perf_counter()
        try:
            for chunks, blocks in self._parts[tensor]:
                if self.is_load:
                    codec.load(tensor, chunks, blocks)
                else:
                    self._unwritten.update(chunks[~codec.store(tensor, blocks, chunks)].tolist())
        except Exception as error:  # noqa: BLE001 - a failed copy costs a recomputation, not the worker its life
            self.error = error
        self.seconds += time.perf_counter() - started

    def report(self) -> WorkerReport:
        """Return what is to be told of it once it is through."""
        report = WorkerReport(set(self._unwritten))
        if self.error is not None:
            report = WorkerReport.of_failed(self.job_id, self.device, self.host, is_load=self.is_load)
        report.codec_s[LOAD if self.is_load else STORE] = self.seconds
        return report


class LayerCopies:
    """Copies side by side: first of one tensor of KV, then of the next. One thread runs them, another waits.

    Args:
        copies: Each fails for itself.
        tensors: Those that hold the KV of the copies, in the order of layers.
    """

    def __init__(self, copies: Sequence[Copy], tensors: Sequence[int]) -> None:
        self.copies, self.tensors = copies, tuple(tensors)
        self._left = set(tensors)
        self._changed = threading.Condition()

    def run(self, codec: Codec, make_way: Callable[[], None] = lambda: None) -> None:
        """Copy everything; ``make_way`` is called before each tensor."""
        for tensor in self.tensors:
            make_way()
            for copy in self.copies:
                copy.run(codec, tensor)
            with self._changed:
                self._left.discard(tensor)
                self._changed.notify_all()

    def wait(self, tensor: int | None = None) -> None:
        """Return when a tensor's KV is there or will not come, or that of all of them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left if tensor is None else tensor not in self._left)
