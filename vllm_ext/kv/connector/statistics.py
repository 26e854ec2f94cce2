"""What a KV tier holds, what became of what it held, and what that cost: for the metrics and the admin endpoint.

Running totals are kept where things happen, and gathered here when somebody asks, between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ext.config.kv_tier import QUANTISED
from vllm_ext.kv.host.report import DIRECTIONS, per_direction

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferStats

    from vllm_ext.kv.connector.scheduler import TierScheduler
    from vllm_ext.kv.host.geometry import TierGeometry
    from vllm_ext.kv.host.manager import TierManager
    from vllm_ext.kv.host.report import WorkerReport


@dataclass
class TierAccount:
    """One engine's account of its tier; what is kept by direction is the sum over all workers.

    Args:
        tier: The scheduler's side.
        geometry: A worker's share of a chunk.
        num_workers: Workers, each of which keeps its share; they copy side by side.
    """

    tier: TierScheduler
    geometry: TierGeometry
    num_workers: int
    copy_jobs: dict[str, int] = field(default_factory=per_direction)
    copied_bytes: dict[str, int] = field(default_factory=per_direction)
    copy_s: dict[str, float] = field(default_factory=per_direction)
    wait_s: dict[str, float] = field(default_factory=per_direction)
    codec_s: dict[str, float] = field(default_factory=per_direction)
    stalled_s: float = 0.0
    """How long the engine had requests, and could do nothing but wait until their KV was loaded.

    Loads go on between steps, while others compute. Where there are no others, the engine makes empty steps: the time
    from one to the next counts, unless an earlier step still computes.
    """
    _stalled_since: float | None = None
    _computing: int = 0
    """Steps under way that compute something."""

    @property
    def host(self) -> TierManager:
        """The books of host memory."""
        manager: Any = self.tier.manager
        found: TierManager = getattr(manager, "host", manager)
        return found

    @property
    def chunk_bytes(self) -> int:
        """Host memory of a chunk, in all workers together."""
        return self.geometry.chunk_bytes * self.num_workers

    # --- while the engine runs --------------------------------------------------------------------------------------

    def observe(self, stats: TransferStats, report: WorkerReport) -> None:
        """Take the workers' report of copies that ended."""
        for direction in DIRECTIONS:
            copies = getattr(stats, direction)
            self.copy_jobs[direction] += len(copies.sizes)
            self.copied_bytes[direction] += copies.bytes
            self.copy_s[direction] += copies.time
            self.wait_s[direction] += report.wait_s[direction]
            self.codec_s[direction] += report.codec_s[direction]

    def scheduled(self, num_tokens: int, now: float) -> None:
        """Note a step that computes so many tokens."""
        self._end_stall(now)
        if num_tokens:
            self._computing += 1
        elif not self._computing and any(not job.is_store for job in self.tier._jobs.values()):
            self._stalled_since = now

    def finished(self, num_tokens: int, has_requests: Callable[[], bool], now: float) -> None:
        """Note that the output of such a step arrived, and whether there will be a next one."""
        self._computing -= num_tokens > 0
        if self._stalled_since is not None and not has_requests():
            self._end_stall(now)

    def _end_stall(self, now: float) -> None:
        if self._stalled_since is not None:
            self.stalled_s += now - self._stalled_since
            self._stalled_since = None

    # --- when somebody asks -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return everything, fit for JSON; seconds are those of one worker."""
        host, keeper, prices = self.host, self.tier.keeper, self.tier.prices
        tally, workers = host.tally, self.num_workers
        waited = self._per_worker(self.wait_s)
        return {
            "bits": self.geometry.bits,
            "store": self.tier.store,
            "chunk_tokens": prices.chunk_tokens,
            "chunk_bytes": self.chunk_bytes,
            "num_workers": workers,
            "host": {
                "capacity_chunks": host.num_chunks,
                "capacity_bytes": host.num_chunks * self.chunk_bytes,
                "used_chunks": host.num_used,
                "used_bytes": host.num_used * self.chunk_bytes,
                "writing_chunks": host.num_writing,
                "reading_chunks": host.num_reading,
            },
            "disk": self._disk(),
            "idle_device_blocks": 0 if self.tier.stores is None else self.tier.stores.idle.num_blocks,
            "placed_chunks": tally.placed,
            "stored_chunks": tally.stored,
            "loaded_chunks": tally.loaded,
            "refused_chunks": tally.refused,
            "unsaved_chunks": 0 if self.tier.stores is None else self.tier.stores.unsaved,
            "gone_chunks": dict(tally.gone),
            **({} if keeper is None else keeper.branches.state()),
            "copied_bytes": dict(self.copied_bytes),
            "copy_jobs": {direction: jobs // workers for direction, jobs in self.copy_jobs.items()},
            "copy_s": self._per_worker(self.copy_s),
            "exposed_s": {**waited, "load": waited["load"] + self.stalled_s},
            "quantise_s": self._per_worker(self.codec_s if self.geometry.bits == QUANTISED else per_direction()),
            "bytes_per_s": {"store": prices.out.bytes_per_s * workers, "load": prices.back.bytes_per_s * workers},
            "conversations": (
                {} if keeper is None else {**keeper.states(), "expired": keeper.expired, "dropped": keeper.dropped}
            ),
        }

    def _per_worker(self, seconds: dict[str, float]) -> dict[str, float]:
        return {direction: total / self.num_workers for direction, total in seconds.items()}

    def _disk(self) -> dict[str, int] | None:
        if (disk := getattr(self.tier.manager, "disk", None)) is None:
            return None
        files = disk.files
        return {"used_chunks": len(files), "used_bytes": files.used_bytes, "capacity_bytes": files.max_bytes}
