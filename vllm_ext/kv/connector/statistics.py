"""What a KV tier holds, what became of what it held, and what that cost: for the metrics and the admin endpoint.

Running totals are kept where things happen, and gathered here when somebody asks, between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ext.config.kv_tier import QUANTISED
from vllm_ext.kv.host.times import LoadStall, WorkerTimes

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import DirectionalTransferStats, TransferStats

    from vllm_ext.kv.connector.scheduler import TierScheduler
    from vllm_ext.kv.host.geometry import TierGeometry
    from vllm_ext.kv.host.manager import TierManager


@dataclass
class Copies:
    """Copies of one direction, of all workers together."""

    jobs: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, stats: DirectionalTransferStats) -> None:
        """Take over a report of vLLM's."""
        self.jobs += len(stats.sizes)
        self.num_bytes += stats.bytes
        self.seconds += stats.time


@dataclass
class TierAccount:
    """One engine's account of its tier.

    Args:
        tier: The scheduler's side.
        geometry: A worker's share of a chunk.
        num_workers: Workers, each of which keeps its share; they copy side by side.
    """

    tier: TierScheduler
    geometry: TierGeometry
    num_workers: int
    stores: Copies = field(default_factory=Copies)
    loads: Copies = field(default_factory=Copies)
    times: WorkerTimes = field(default_factory=WorkerTimes)
    """Of all workers together."""
    stall: LoadStall = field(default_factory=LoadStall)

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

    def observe(self, stats: TransferStats, times: WorkerTimes) -> None:
        """Take the workers' report of copies that ended."""
        self.stores.add(stats.store)
        self.loads.add(stats.load)
        self.times.add(times)

    def scheduled(self, num_tokens: int, now: float) -> None:
        """Note a step that computes so many tokens."""
        is_loading = not num_tokens and any(not job.is_store for job in self.tier._jobs.values())
        self.stall.scheduled(num_tokens, is_loading, now)

    def finished(self, num_tokens: int, has_requests: Callable[[], bool], now: float) -> None:
        """Note that the output of such a step arrived, and whether there will be a next one."""
        self.stall.finished(num_tokens)
        if self.stall.is_open and not has_requests():
            self.stall.end(now)

    # --- when somebody asks -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return everything, fit for JSON; seconds are those of one worker."""
        tally, prices = self.host.tally, self.tier.prices
        quantised = self.geometry.bits == QUANTISED
        return {
            "bits": self.geometry.bits,
            "store": self.tier.store,
            "chunk_tokens": prices.chunk_tokens,
            "chunk_bytes": self.chunk_bytes,
            "num_workers": self.num_workers,
            "host": self._host(),
            "disk": self._disk(),
            "idle_device_blocks": 0 if self.tier.stores is None else self.tier.stores.idle.num_blocks,
            "placed_chunks": tally.placed,
            "stored_chunks": tally.stored,
            "loaded_chunks": tally.loaded,
            "refused_chunks": tally.refused,
            "unsaved_chunks": 0 if self.tier.stores is None else self.tier.stores.unsaved,
            "gone_chunks": dict(tally.gone),
            **({} if self.tier.keeper is None else self.tier.keeper.branches.state()),
            "copied_bytes": {"store": self.stores.num_bytes, "load": self.loads.num_bytes},
            "copy_jobs": {
                "store": self.stores.jobs // self.num_workers,
                "load": self.loads.jobs // self.num_workers,
            },
            "copy_s": self._per_worker(self.stores.seconds, self.loads.seconds),
            "exposed_s": self._exposed_s(),
            "quantise_s": self._per_worker(
                self.times.store_codec_s if quantised else 0.0, self.times.load_codec_s if quantised else 0.0
            ),
            "bytes_per_s": {
                "store": prices.out.bytes_per_s * self.num_workers,
                "load": prices.back.bytes_per_s * self.num_workers,
            },
            "conversations": self._conversations(),
        }

    def _per_worker(self, store_s: float, load_s: float) -> dict[str, float]:
        return {"store": store_s / self.num_workers, "load": load_s / self.num_workers}

    def _exposed_s(self) -> dict[str, float]:
        waits = self._per_worker(self.times.store_wait_s, self.times.load_wait_s)
        return {**waits, "load": waits["load"] + self.stall.seconds}

    def _host(self) -> dict[str, int]:
        host = self.host
        return {
            "capacity_chunks": host.num_chunks,
            "capacity_bytes": host.num_chunks * self.chunk_bytes,
            "used_chunks": host.num_used,
            "used_bytes": host.num_used * self.chunk_bytes,
            "writing_chunks": host.num_writing,
            "reading_chunks": host.num_reading,
        }

    def _disk(self) -> dict[str, int] | None:
        disk: Any = getattr(self.tier.manager, "disk", None)
        if disk is None:
            return None
        files = disk.files
        return {"used_chunks": len(files), "used_bytes": files.used_bytes, "capacity_bytes": files.max_bytes}

    def _conversations(self) -> dict[str, int]:
        keeper = self.tier.keeper
        if keeper is None:
            return {}
        return {**keeper.states(), "expired": keeper.expired, "dropped": keeper.dropped}
