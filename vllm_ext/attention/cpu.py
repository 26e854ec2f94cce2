"""The attention backend ``CUSTOM`` on the CPU: vLLM's ``CPU_ATTN``, with our kernel where it serves."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_ext.attention.counts import COUNTS
from vllm_ext.attention.measure import Sizes, measured_plan, paged
from vllm_ext.attention.plan import Kernel, KernelPlan, Kind
from vllm_ext.attention.records import HearsOfRecords, UnpacksRecords, note_reads, records_behind
from vllm_ext.attention.support import FIELD, layer_obstacle, layers_kernel, refuse_what_comes_later
from vllm_ext.config.attention import AUTO, OWN
from vllm_ext.config.errors import ConfigError
from vllm_ext.kernels import native
from vllm_ext.kernels.paged_attention import Ranges, cpu
from vllm_ext.kv.int8.worker import current

logger = logging.getLogger("vllm.vllm_ext")


@dataclasses.dataclass
class CpuMetadata(CPUAttentionMetadata):
    """Of a step, with what our kernel reads where it serves it."""

    kernel: Kernel = Kernel.STOCK
    ranges: Ranges | None = None
    is_counted: bool = False


class CpuImpl(UnpacksRecords, CPUAttentionBackendImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take vLLM's arguments; raises nothing: what our kernel can't do the builder finds in `obstacle`."""
        super().__init__(*args, **kwargs)
        self.plan = KernelPlan.all(Kernel.STOCK, "not chosen yet")
        self.obstacle = layer_obstacle(
            alibi=self.alibi_slopes is not None,
            sinks=self.sinks is not None,
            kv_cache_dtype=self.kv_cache_dtype,
            attn_type=self.attn_type,
        )
        self._attend: cpu.CpuAttention | None = None
        self._bound_to: tuple[int, bool] | None = None

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write K and V of a step's tokens, as vLLM's; see there."""
        if self.plan.writer is Kernel.STOCK:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        else:
            cpu.write(key, value, self._bound(kv_cache).kv, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CpuMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, as vLLM's; see there."""
        if attn_metadata is not None and not attn_metadata.is_counted:
            attn_metadata.is_counted = True
            _count(attn_metadata, kv_cache)
        if attn_metadata is None or attn_metadata.ranges is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"{FIELD}: fused quantisation of outputs needs stock")
        count = attn_metadata.num_actual_tokens
        self._bound(kv_cache)(query[:count], attn_metadata.ranges, output[:count])
        return output

    def _bound(self, kv_cache: torch.Tensor) -> cpu.CpuAttention:
        """Return our kernel for this layer's cache: made once, and again after a sleep that moved the cache."""
        records = records_behind(kv_cache)
        wanted = kv_cache.data_ptr(), records is not None
        if self._attend is None or self._bound_to != wanted:
            self._attend = cpu.CpuAttention(
                paged(kv_cache, records),
                self.num_heads,
                scale=self.scale,
                window=max(0, self.sliding_window),
                softcap=self.logits_soft_cap,
            )
            self._bound_to = wanted
        return self._attend


class CpuBuilder(HearsOfRecords, CPUAttentionMetadataBuilder):
    """Builds a step's metadata for the kernel that serves it, and chooses the kernels at start."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        """Choose which kernel serves what, and say so in the log.

        Raises:
            ConfigError: ours was asked for, and can't serve a layer or does not compile.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        impls = [layer.impl for layer in layers.values()]
        self.plan = self._choose(*layers_kernel(vllm_config, (impl.obstacle for impl in impls)))
        for impl in impls:
            impl.plan = self.plan
        self.check_pages(layers.values())
        logger.info("%s", self.plan.describe("CPU_ATTN"))

    def _choose(self, kernel: str, obstacle: str | None) -> KernelPlan:
        if kernel == OWN:
            return KernelPlan.all(Kernel.OWN, f"{FIELD}={OWN}, {_arithmetic()}")
        if kernel == AUTO and obstacle is None:
            return self._faster()
        return KernelPlan.all(Kernel.STOCK, obstacle or f"{FIELD}={kernel}")

    def _faster(self) -> KernelPlan:
        sizes = Sizes(self.dtype, self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, self.isa)
        try:
            return measured_plan(sizes)
        except (native.CompilerMissing, native.CompileError) as error:
            logger.warning("attention: vLLM's kernel serves all steps: %s", native.brief(error))
            return KernelPlan.all(Kernel.STOCK, "ours does not compile")

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CpuMetadata:
        """Build the metadata of a step, as vLLM's; see there."""
        common = common_attn_metadata
        metadata = self._built(common_prefix_len, common, fast_build)
        note_reads(metadata, common.seq_lens, self.block_size, unpack=metadata.kernel is Kernel.STOCK)
        return metadata

    def _built(self, common_prefix_len: int, common: Any, fast_build: bool) -> CpuMetadata:
        kernel = self.plan.serves[Kind.of(common.max_query_len)]
        if kernel is Kernel.STOCK:
            found = super().build(common_prefix_len, common, fast_build)
            fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
            return CpuMetadata(**fields)
        refuse_what_comes_later(common.causal)
        return CpuMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            kernel=kernel,
            ranges=Ranges.from_block_table(common.query_start_loc, common.seq_lens, common.block_table_tensor),
        )


class CpuBackend(CPUAttentionBackend):
    """vLLM's backend for the CPU, with our kernel where it serves."""

    @staticmethod
    def get_name() -> str:
        """Return the name of vLLM's slot for backends of others."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CpuImpl]:
        """Return what computes attention."""
        return CpuImpl

    @staticmethod
    def get_builder_cls() -> type[CpuBuilder]:
        """Return what builds a step's metadata."""
        return CpuBuilder


def _arithmetic() -> str:
    """Return the instructions that our kernel uses here.

    Raises:
        ConfigError: it does not compile.
    """
    try:
        name: str = cpu.arithmetic()
    except (native.CompilerMissing, native.CompileError) as error:
        raise ConfigError(FIELD, OWN, f"must be stock or auto: {native.brief(error)}") from error
    return name


def _count(step: CpuMetadata, kv_cache: torch.Tensor) -> None:
    """Count a step, once for all layers."""
    num_blocks, block_size = kv_cache.shape[0], kv_cache.shape[2]
    int8, at_hand = 0, current()
    if at_hand is not None and at_hand.reads:
        at = torch.arange(step.block_table.shape[1]) * block_size
        held = (step.seq_lens[:, None] - at).clamp(0, block_size)  # tokens of each block
        int8 = int(held[step.block_table >= num_blocks].sum())
    COUNTS.add(step.kernel, int(step.seq_lens.sum()), str(kv_cache.dtype).removeprefix("torch."), int8)
