"""How the device's KV memory is divided into blocks, records of 8 bits, and scratch pages.

vLLM lays the layers of a model out one behind the other, each ``stride`` pages long. With an arena it uses fewer of
these as blocks, and leaves the stride as it is:

    | layer 0: blocks 0 ... B-1 | arena: records B, B+1, ... | layer 1: blocks | arena | ... | scratch |
    |<---------------------- stride ------------------------>|

A record holds one block of one layer. In every layer record ``B + i`` is the i-th one of that layer's arena, so that
ids below B name blocks, and all others records. Scratch pages serve all layers: a kernel that knows blocks only finds
there what a layer's records hold. Where only our kernel serves, which reads records, there are none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm_ext.config.errors import ConfigError
from vllm_ext.kernels.kv_quant.format import ITEM_BYTES, PageLayout, RecordFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheTensor

SHARE = "kv_tier.device_int8_share"


@dataclass(frozen=True, kw_only=True)
class ArenaGeometry:
    """The division of one worker's KV memory.

    Raises:
        ValueError: the arena holds no record.
    """

    num_blocks: int
    """vLLM's blocks, the null block among them; the id of the first record."""
    arena_pages: int
    """Pages behind the blocks of each layer."""
    scratch_pages: int
    """Pages behind the last layer; 0 where nothing is unpacked."""
    num_layers: int
    page_bytes: int
    """Bytes of one block of one layer."""
    record_bytes: int
    """Bytes of the same in 8 bits."""

    def __post_init__(self) -> None:
        if self.num_records < 1:
            allowed = f"must be enough for a record of {self.record_bytes} bytes"
            raise ValueError(f"arena_pages={self.arena_pages!r} of {self.page_bytes} bytes: {allowed}")

    @property
    def num_records(self) -> int:
        """Records that there are room for, as many in each layer."""
        return self.arena_pages * self.page_bytes // self.record_bytes

    @property
    def stride_pages(self) -> int:
        """Pages from the start of a layer to that of the next one."""
        return self.num_blocks + self.arena_pages

    @property
    def layer_bytes(self) -> int:
        """Bytes from the start of a layer to that of the next one."""
        return self.stride_pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers and the scratch pages."""
        return (self.num_layers * self.stride_pages + self.scratch_pages) * self.page_bytes

    @classmethod
    def of(cls, config: KVCacheConfig) -> ArenaGeometry | None:
        """Return the division that a configuration has been given; None: it has no arena."""
        if len(config.kv_cache_tensors) != 1 or len(config.kv_cache_groups) != 1:
            return None
        (tensor,), spec = config.kv_cache_tensors, config.kv_cache_groups[0].kv_cache_spec
        stride = tensor.layer_stride // tensor.block_stride
        if tensor.layer_stride % tensor.block_stride or stride <= config.num_blocks:
            return None
        return cls(
            num_blocks=config.num_blocks,
            arena_pages=stride - config.num_blocks,
            scratch_pages=tensor.size // tensor.block_stride - len(tensor.layers) * stride,
            num_layers=len(tensor.layers),
            page_bytes=tensor.block_stride,
            record_bytes=record_bytes(spec),
        )


def with_arenas(
    configs: Sequence[KVCacheConfig], share: float, max_model_len: int, *, unpacks: bool = True
) -> list[KVCacheConfig]:
    """Return all workers' configurations with a part of the pool as arena, in no more memory than before.

    Args:
        configs: Of all workers, with as many blocks each; they may have different numbers of layers.
        share: Of the pool that becomes arena, greater than 0 and less than 1.
        max_model_len: Tokens of the longest request, whose new tokens must find blocks.
        unpacks: Whether a kernel that knows blocks only may serve, and needs scratch pages.

    Raises:
        ConfigError: the model's KV can't be kept so, or one of the parts would be too small.
    """
    specs = [_only_spec(config, share) for config in configs]
    spec, pages = specs[0], configs[0].num_blocks
    layers = min(len(config.kv_cache_tensors[0].layers) for config in configs)
    page, record = spec.page_size_bytes, record_bytes(spec)
    arena, scratch = _divided(pages, layers, share, page, record if unpacks else None)
    stride = pages - -(-scratch // layers)
    needed = -(-max_model_len // spec.block_size) + 1
    if not arena:
        raise ConfigError(SHARE, share, f"must be more: of {pages} blocks it leaves none for an arena")
    if stride - arena < needed:
        allowed = (
            f"must be less, or --max-model-len shorter: of {pages} blocks it leaves {stride - arena}, and one request "
            f"of {max_model_len} tokens needs {needed}"
        )
        raise ConfigError(SHARE, share, allowed)
    return [
        replace(
            config,
            num_blocks=stride - arena,
            kv_cache_tensors=[_resized(tensor, stride, scratch) for tensor in config.kv_cache_tensors],
        )
        for config in configs
    ]


def record_bytes(spec: FullAttentionSpec) -> int:
    """Return the bytes of a record of one block of one layer; where a backend puts values in a page changes nothing."""
    layout = PageLayout.rows(spec.dtype, spec.num_kv_heads, spec.head_size, spec.block_size)
    size: int = RecordFormat(layout).record_bytes
    return size


def _divided(pages: int, layers: int, share: float, page: int, record: int | None) -> tuple[int, int]:
    """Return the pages of an arena that fit into a pool, and of scratch: one for each record, if its size is given."""
    stride = pages
    while stride > 0:
        arena = int(share * stride)
        scratch = 0 if record is None else arena * page // record
        if layers * stride + scratch <= layers * pages:
            return arena, scratch
        stride -= 1
    return 0, 0


def _only_spec(config: KVCacheConfig, share: float) -> FullAttentionSpec:
    """Return the one kind of KV that a worker has.

    Raises:
        ConfigError: it has others, or its pages are not what a record can be made of.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec) or len(config.kv_cache_tensors) != 1:
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs})) or "none"
        raise _refused(share, f"full attention in one group of layers that are alike; this model's KV is {kinds}")
    (spec,), (tensor,) = specs, config.kv_cache_tensors
    if not isinstance(spec, FullAttentionSpec) or type(spec).__name__ == "MLAAttentionSpec":
        raise _refused(share, "keys and values, and MLA keeps what both are made of")
    if spec.dtype not in ITEM_BYTES:
        kinds = ", ".join(str(kind).removeprefix("torch.") for kind in ITEM_BYTES)
        raise _refused(share, f"KV of type {kinds}, and this model's is {spec.dtype}")
    if spec.head_size != spec.head_size_v or spec.num_heads != spec.num_kv_heads:
        raise _refused(share, "keys and values of one shape")
    page = spec.page_size_bytes
    if tensor.block_stride != page or tensor.layer_stride != page * config.num_blocks or tensor.offset:
        raise _refused(share, "a KV cache layout with each layer's blocks together, as VLLM_KV_CACHE_LAYOUT=LBHNC has")
    return spec


def _resized(tensor: KVCacheTensor, stride: int, scratch: int) -> KVCacheTensor:
    page, layers = tensor.block_stride, len(tensor.layers)
    return replace(tensor, size=(layers * stride + scratch) * page, layer_stride=stride * page)


def _refused(share: float, needs: str) -> ConfigError:
    return ConfigError(SHARE, share, f"needs {needs}; use 0")
