"""A real vLLM scheduler on a real KV cache manager, without weights, engine or GPU.

``make_scheduler`` builds upstream's scheduler or one of ours from a tiny local model directory; ``make_request``
builds what the front end would send it. Tests, benchmarks and the simulator share this one construction, so
that a policy is exercised by the code that serves, not by a model of it.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_ext.attention.support import chosen_kernel
from vllm_ext.config import KEY, parse
from vllm_ext.config.attention import OWN
from vllm_ext.config.errors import ConfigError
from vllm_ext.config.kv_tier import FUSED
from vllm_ext.kernels.kv_quant.format import ITEM_BYTES
from vllm_ext.kv.int8.geometry import SHARE, with_arenas
from vllm_ext.kv.partial_prefix.support import WORKERS
from vllm_ext.simulation.engine.token_runner import EOS_TOKEN_ID
from vllm_ext.systems import build

BlockHasher = Callable[[Request], list[BlockHash]]

SAME_NAMES = {
    "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "async_scheduling", "watermark",
}  # fmt: skip
"""Options of `make_config` that have the same names in descriptions and recordings of engines."""
VOCAB_SIZE = 4096
_HASH_ALGORITHM = "sha256"
_MAX_POSITIONS = 1 << 20
_MEMORY_BYTES_PER_S = 1e12
"""Of a device that is not there; nothing that is decided here must depend on how fast this machine is."""
_LAYERS, _CHANNELS = 32, 1024
"""Where nothing is known of the model: its layers, and the channels of keys and values of a token in one."""
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": _MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class KvShape:
    """The KV of a model that is not there, as a connector is told of it."""

    bytes_per_block: int
    """Of all layers."""
    layers: int = 1
    dtype: str = "auto"
    """As vLLM's ``cache_dtype``, or another type's name; ``auto``: the tiny model's."""


@functools.cache
def _model_dir() -> tempfile.TemporaryDirectory[str]:
    """Directory with the ``config.json`` of a one-layer Llama; written once per process, removed at its end."""
    directory = tempfile.TemporaryDirectory(prefix="vllm-ext-model-")
    Path(directory.name, "config.json").write_text(json.dumps(_MODEL))
    return directory


@functools.cache
def block_hasher(block_size: int = 16) -> BlockHasher:
    """The function that hashes a request's full blocks for prefix caching, as the engine core builds it."""
    hash_fn = get_hash_fn_by_name(_HASH_ALGORITHM)
    _init_hashing()
    hasher: BlockHasher = get_request_block_hasher(block_size, hash_fn)
    return hasher


@functools.cache
def _init_hashing() -> None:
    """Begin every chain of hashes alike in all processes: vLLM's beginning is random, and evictions may tie by hash."""
    hash_fn = get_hash_fn_by_name(_HASH_ALGORITHM)
    init_none_hash(hash_fn)
    kv_cache_utils.NONE_HASH = BlockHash(hash_fn("vllm_ext.simulation"))


def make_config(
    scheduler_cls: str | None = None,
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 512,
    async_scheduling: bool = False,
    enable_prefix_caching: bool = True,
    additional_config: Mapping[str, Any] | None = None,
    scheduling_policy: str = "fcfs",
    watermark: float = 0.0,
    kv_transfer_config: KVTransferConfig | None = None,
) -> VllmConfig:
    """The configuration an engine with these options would hand to its scheduler.

    Args:
        scheduler_cls: Name of a class, or a short name that the plugin resolves.
        num_blocks: KV blocks including vLLM's null block, so ``num_blocks - 1`` can be held.
        max_num_batched_tokens: Token budget of a step.
        async_scheduling: Whether the caller schedules a step before the previous one returned.
        additional_config: ``VllmConfig.additional_config``; our options are under ``"vllm_ext"``.
        kv_transfer_config: For a KV connector, of which the scheduler builds its own side.

    Raises:
        ValueError: vLLM refused a value; its message names the field.
    """
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        policy=scheduling_policy,
        watermark=watermark,
        scheduler_cls=scheduler_cls,
        async_scheduling=False,
    )
    config = VllmConfig(
        model_config=ModelConfig(
            model=_model_dir().name, skip_tokenizer_init=True, max_model_len=max_model_len, dtype="float32"
        ),
        scheduler_config=scheduler,
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
        parallel_config=ParallelConfig(worker_extension_cls=WORKERS[False] if _fuses_gaps(additional_config) else ""),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=kv_transfer_config,
        additional_config=dict(additional_config or {}),
    )
    # The CPU platform switches async scheduling off because its runner has no use for it; a fabricated one does.
    config.scheduler_config.async_scheduling = async_scheduling
    config.cache_config.num_gpu_blocks = num_blocks
    return config


def _fuses_gaps(additional_config: Mapping[str, Any] | None) -> bool:
    """Whether the options ask for it; what is in an engine's way is not in that of a model that is not there."""
    given = (additional_config or {}).get(KEY)
    if not given:
        return False
    options = parse(given)
    return build(options).tier(options.kv_tier).gaps == FUSED


def _int8_share(additional_config: Mapping[str, Any] | None) -> float:
    """Return the share of the KV memory that the options want for records of 8 bits."""
    given = (additional_config or {}).get(KEY)
    return parse(given).kv_tier.device_int8_share if given else 0.0


def make_kv_cache_config(num_blocks: int, block_size: int, kv_shape: KvShape | None = None) -> KVCacheConfig:
    """One full-attention group over ``num_blocks`` blocks (one of which is vLLM's null block).

    Args:
        kv_shape: What a connector takes the KV for; None: one layer, as the tiny model has.
    """
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=32, dtype=torch.float32)
    layers = [f"layer.{number}" for number in range(1 if kv_shape is None else kv_shape.layers)]
    groups = [KVCacheGroupSpec(layers, spec)]
    tensors = []
    if kv_shape is not None:
        page, size = kv_shape.bytes_per_block // kv_shape.layers, num_blocks * kv_shape.bytes_per_block
        tensors = [KVCacheTensor(size, layers, layer_stride=num_blocks * page, block_stride=page)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def _with_arena(
    config: KVCacheConfig, share: float, max_model_len: int, *, bytes_per_block: int = 0, layers: int = _LAYERS,
    dtype: str = "bfloat16", unpacks: bool = True,
) -> KVCacheConfig:  # fmt: skip
    """Return the configuration of an engine that keeps a share of its KV memory for records.

    Args:
        config: One group of full attention, with as many blocks as the memory would hold.
        share: Of the memory.
        max_model_len: Tokens of the longest request.
        bytes_per_block: Of all layers; 0: nothing is known.
        layers: Of the model.
        dtype: Of its KV.
        unpacks: Whether a kernel that knows blocks only may serve.

    Raises:
        ConfigError: the memory can't be divided so.
    """
    (group,) = config.kv_cache_groups
    block_size, kind = group.kv_cache_spec.block_size, getattr(torch, dtype, None)
    if kind not in ITEM_BYTES:
        raise ConfigError(SHARE, share, f"needs KV of 16 or 32 bits, and this model's is {dtype}; use 0")
    page = (bytes_per_block or layers * block_size * _CHANNELS * ITEM_BYTES[kind]) // layers
    channels = page // (2 * block_size * ITEM_BYTES[kind])
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=channels, dtype=kind)
    names = [f"layer.{number}" for number in range(layers)]
    stride = config.num_blocks * spec.page_size_bytes
    tensor = KVCacheTensor(layers * stride, names, layer_stride=stride, block_stride=spec.page_size_bytes)
    whole = replace(config, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(names, spec)])
    (divided,) = with_arenas([whole], share, max_model_len, unpacks=unpacks)
    return divided


def make_scheduler(
    scheduler_cls: str | type[Scheduler] | None = None,
    *,
    log_stats: bool = True,
    v2_model_runner: bool = False,
    kv_shape: KvShape | None = None,
    **options: Any,
) -> Scheduler:
    """Build a scheduler as the engine core does.

    Args:
        scheduler_cls: A class, ``"package.module.Class"``, or a short name that the plugin resolves; None is
            upstream's AsyncScheduler (correct with and without async scheduling).
        log_stats: As the engine core's.
        v2_model_runner: Produce outputs for vLLM's V2 runner (resumed requests travel as new ones).
        kv_shape: What a connector takes the model's KV for; None: the tiny model's.
        options: Of `make_config`.

    Returns:
        The scheduler; its class decides what policies run. Nothing is started.

    Raises:
        ValueError: vLLM or the scheduler refused a value.
    """
    config = make_config(scheduler_cls if isinstance(scheduler_cls, str) else None, **options)
    if kv_shape is not None:
        config.cache_config.cache_dtype = kv_shape.dtype
    cls: Any = scheduler_cls or AsyncScheduler
    if isinstance(cls, str):
        cls = config.scheduler_config.get_scheduler_cls()
    block_size = config.cache_config.block_size
    kv_cache_config = make_kv_cache_config(config.cache_config.num_gpu_blocks, block_size, kv_shape)
    if share := _int8_share(config.additional_config):
        known = {"unpacks": chosen_kernel(config) != OWN, **({} if kv_shape is None else vars(kv_shape))}
        kv_cache_config = _with_arena(kv_cache_config, share, config.model_config.max_model_len, **known)
        config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    scheduler: Scheduler = cls(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=block_size,
        log_stats=log_stats,
    )
    scheduler.use_v2_model_runner = v2_model_runner
    holding = getattr(scheduler, "holding", None)
    if holding is not None:
        holding.price(_MEMORY_BYTES_PER_S)
    return scheduler


def make_request(
    req_id: str,
    prompt_tokens: int | Sequence[int],
    *,
    max_tokens: int = 16,
    arrival_time: float = 0.0,
    extra_args: Mapping[str, Any] | None = None,
    priority: int = 0,
    session_id: str | None = None,
    cache_salt: str | None = None,
    hasher: BlockHasher | None = None,
    end_token_id: int = EOS_TOKEN_ID,
) -> Request:
    """Build a request as the engine core receives it.

    Args:
        prompt_tokens: The prompt's token ids, or its length (then the ids are 100, 101, ...).
        max_tokens: Bound on the output; the true length belongs to the runner.
        arrival_time: In seconds, on the clock the scheduler is given.
        extra_args: What a client sends as ``vllm_xargs``, e.g. ``{"osl": 12}``.
        hasher: ``block_hasher(block_size)`` when prefix caching is on, None when it is off.
        end_token_id: The token that ends it.
    """
    tokens = list(range(100, 100 + prompt_tokens)) if isinstance(prompt_tokens, int) else list(prompt_tokens)
    return Request(
        request_id=req_id,
        prompt_token_ids=tokens,
        sampling_params=greedy(max_tokens, extra_args, end_token_id),
        pooling_params=None,
        arrival_time=arrival_time,
        priority=priority,
        session_id=session_id,
        cache_salt=cache_salt,
        block_hasher=hasher,
    )


def make_requests(
    prefix: str,
    count: int,
    prompt_tokens: int,
    max_tokens: int,
    *,
    extra_args: Mapping[str, Any] | None = None,
    hasher: BlockHasher | None = None,
    first_token: int = 100,
) -> Iterator[Request]:
    """Build many like requests fast: ``prefix0``, ``prefix1``, ... share prompt and sampling parameters."""
    params, tokens = greedy(max_tokens, extra_args), list(range(first_token, first_token + prompt_tokens))
    for number in range(count):
        yield Request(
            request_id=f"{prefix}{number}",
            prompt_token_ids=tokens,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=hasher,
        )


def greedy(
    max_tokens: int, extra_args: Mapping[str, Any] | None = None, end_token_id: int = EOS_TOKEN_ID
) -> SamplingParams:
    """Return the sampling parameters of a request that takes the likeliest tokens, up to an end token."""
    extra = dict(extra_args) if extra_args is not None else None
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, extra_args=extra)
    params.update_from_generation_config({}, end_token_id)
    return params
