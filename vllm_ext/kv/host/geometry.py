"""How many bytes a chunk takes in host memory: what both sides of the connector must agree upon.

The scheduler's process decides how many chunks there are, and never sees a tensor; a worker sees the tensors, and lays
chunks out. Both begin here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.kv_tier import QUANTISED
from vllm_ext.kernels.kv_quant.format import ITEM_BYTES, PageLayout, RecordFormat

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class TierGeometry:
    """A worker's share of a chunk: one block. With 8 bits it is a record for each tensor of KV, all of one size."""

    bits: int
    chunk_bytes: int
    """Of one worker's share, a multiple of 64."""
    record_bytes: int
    """Of one tensor's part of it, with 8 bits; otherwise 0: parts may differ, and lie one after the other."""

    @classmethod
    def of(cls, config: OffloadingConfig, bits: int) -> TierGeometry:
        """Return what vLLM's offloading configuration leads to.

        Raises:
            ConfigError: the KV of this model can't be quantised.
        """
        if bits != QUANTISED:
            return cls(bits=bits, chunk_bytes=_aligned(config.worker_kv_bytes_per_block), record_bytes=0)
        record = _record_format(config).record_bytes
        return cls(bits=bits, chunk_bytes=_num_tensors(config) * record, record_bytes=record)


def _record_format(config: OffloadingConfig) -> RecordFormat:
    """Return a format with as many values and channels as the model's; where they lie in a page is not known here."""
    dtype = getattr(torch, config.model.dtype, None)
    sizes = sorted({group.tokens_per_block for group in config.groups})
    if not isinstance(dtype, torch.dtype) or dtype not in ITEM_BYTES:
        kinds = ", ".join(str(kind).removeprefix("torch.") for kind in ITEM_BYTES)
        raise _refused(f"needs KV of type {kinds}, and this model's is {config.model.dtype}")
    if len(sizes) > 1 or config.parallel.dcp_size > 1:
        raise _refused(f"needs KV blocks of one size, whole on each worker; this model's have {sizes} tokens")
    page_bytes, rest = divmod(config.worker_kv_bytes_per_block, _num_tensors(config))
    channels, odd = divmod(page_bytes, ITEM_BYTES[dtype] * sizes[0])
    if rest or odd or channels % 2:
        raise _refused("needs layers with K and V of one shape, which this model does not have")
    return RecordFormat(PageLayout.rows(dtype, 1, channels // 2, sizes[0]))


def _num_tensors(config: OffloadingConfig) -> int:
    return max(len(group.layer_names) for group in config.groups)  # layers of different groups share memory


def _refused(why: str) -> ConfigError:
    return ConfigError("kv_tier.bits", QUANTISED, f"{why}; use 16")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
