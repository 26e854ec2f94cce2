"""How large the tier is, and who keeps its books and copies: what vLLM's connector asks an OffloadingSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]
import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from vllm_ext.config_checks import ConfigError
from vllm_ext.config_kv import QUANTISED
from vllm_ext.kv.geometry import TierGeometry
from vllm_ext.kv.manager import TierManager
from vllm_ext.kv.options import BITS_KEY
from vllm_ext.kv.worker import TierWorker

if TYPE_CHECKING:
    from vllm_ext.kernels.kv_quant.format import PageLayout
    from vllm_ext.kv.codec import Codec

logger = init_logger("vllm.vllm_ext.kv")


class TierSpec(CPUOffloadingSpec):
    """Our tier.

    Attributes:
        layout: Of a page, set by the connector before the worker is asked for; needed with 8 bits only.
    """

    layout: PageLayout | None = None

    def __init__(self, config: OffloadingConfig) -> None:
        """Take vLLM's configuration.

        Raises:
            ConfigError: the tier holds no chunk, or this model's KV can't be quantised.
        """
        super().__init__(config)
        self.replicated_layout = False  # each worker keeps its own share
        self.geometry = TierGeometry.of(config, int(self.extra_config[BITS_KEY]))
        host_bytes = int(self.extra_config["cpu_bytes_to_use"])
        per_chunk = self.geometry.chunk_bytes * config.parallel.world_size
        self.num_chunks = host_bytes // per_chunk
        if not self.num_chunks:
            least = per_chunk / 2**30
            raise ConfigError("kv_tier.gib", host_bytes / 2**30, f"must be at least {least:.3g}, to hold one chunk")

    def get_manager(self) -> TierManager:
        """Return the scheduler's side."""
        if self._manager is None:
            self._manager = TierManager(
                self.num_chunks,
                cache_policy=self.eviction_policy,
                enable_events=self.kv_events_config.enable_kv_cache_events,
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker's side, with its memory.

        Raises:
            ConfigError: there is not enough memory.
            NotImplementedError: KV is not in the CPU's memory.
        """
        if self._worker is None:
            tensors = [cache.tensor for cache in kv_caches.tensors]
            if any(tensor.device.type != "cpu" for tensor in tensors):
                raise NotImplementedError("the KV tier copies KV of vLLM's CPU backend only, so far")
            pool = self._allocate()
            self._worker = TierWorker(
                self._codec(tensors, pool),
                [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs],
                blocks_per_chunk=self.blocks_per_chunk,
                chunk_bytes=self.geometry.chunk_bytes,
            )
        return self._worker

    def _codec(self, tensors: list[torch.Tensor], pool: torch.Tensor) -> Codec:
        from vllm_ext.kv.codec import QuantisedCodec, RawCodec  # imports numba: see `options`

        if self.geometry.bits != QUANTISED:
            return RawCodec(tensors, pool, self.geometry)
        if self.layout is None:
            raise RuntimeError("the layout of pages was not found out before the worker was built")
        return QuantisedCodec(tensors, pool, self.geometry, self.layout)

    def _allocate(self) -> torch.Tensor:
        wanted, free = self.num_chunks * self.geometry.chunk_bytes, psutil.virtual_memory().available
        if wanted > free:
            allowed = f"must be less: a worker's share is {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
            raise ConfigError("kv_tier.gib", int(self.extra_config["cpu_bytes_to_use"]) / 2**30, allowed)
        logger.info(
            "KV tier: %d chunks of %d blocks, %.2f GiB in this worker, %d bits",
            self.num_chunks, self.blocks_per_chunk, wanted / 2**30, self.geometry.bits,
        )  # fmt: skip
        return torch.empty(wanted, dtype=torch.uint8)
