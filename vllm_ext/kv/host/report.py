"""What a worker of the tier tells the scheduler's side beside vLLM's own report: what failed, and what took time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec


STORE, LOAD = DIRECTIONS = ("store", "load")


def per_direction() -> dict[str, Any]:
    """Return sums by `DIRECTIONS` that nothing was added to."""
    return dict.fromkeys(DIRECTIONS, 0)


@dataclass(slots=True)
class WorkerReport:
    """Of one worker since its last report, or the sum over several; times are in seconds, by `DIRECTIONS`."""

    chunks: set[int] = field(default_factory=set)
    """Chunks that hold nothing that may be read."""
    blocks: set[int] = field(default_factory=set)
    """Blocks of the device that a load did not fill."""
    load_jobs: set[int] = field(default_factory=set)
    """Loads that did not fill all of their blocks."""
    wait_s: dict[str, float] = field(default_factory=per_direction)
    """The step stood still while copies were begun, and waited for: stores if it writes into their blocks, loads if
    they are for the step itself."""
    codec_s: dict[str, float] = field(default_factory=per_direction)
    """Copies were made. With 8 bits that is (de)quantisation: on the CPU, quantising and copying are one pass."""

    @classmethod
    def of_failed(
        cls, job_id: int, device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec, *, is_load: bool
    ) -> WorkerReport:
        """Return the report of a job that failed: no chunk of it may be read, and no block of a load."""
        chunks = set(host.block_ids.tolist())
        return cls(chunks, set(device.block_ids.tolist()), {job_id}) if is_load else cls(chunks)

    def add(self, more: WorkerReport) -> None:
        """Take over another report."""
        self.chunks |= more.chunks
        self.blocks |= more.blocks
        self.load_jobs |= more.load_jobs
        for direction in DIRECTIONS:
            self.wait_s[direction] += more.wait_s[direction]
            self.codec_s[direction] += more.codec_s[direction]
