"""What the KV tier is refused for, and the blocks it wants, in the process the user sees.

What else is wrong a worker finds at start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.kv_tier import BLOCK_TOKENS, QUANTISED
from vllm_ext.kernels import native
from vllm_ext.kv.connector.options import TIER_KEY, tier_of
from vllm_ext.kv.host.memory import free_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig


logger = init_logger("vllm.vllm_ext.kv")

_LEAST_BLOCKS = 64
"""That a tier holds whose size nobody chose."""


def choose_block_size(vllm_config: VllmConfig) -> None:
    """Let KV blocks be of `BLOCK_TOKENS` unless ``--block-size`` was given or the model brings a size of its own.

    Blocks are what the tier keeps, and in 8 bits each has minima and scales of its own: small ones hold them for few
    tokens, and large ones are seldom full.
    """
    cache, model = vllm_config.cache_config, vllm_config.model_config
    if cache.user_specified_block_size or model.use_mla or model.is_hybrid:
        return
    logger.info("KV tier: blocks of %d tokens (--block-size says otherwise)", BLOCK_TOKENS)
    cache.block_size = BLOCK_TOKENS
    cache.user_specified_block_size = True  # or a worker's platform chooses again


def refuse_model(vllm_config: VllmConfig) -> None:
    """Raise ConfigError if this model's KV can't be kept, or not in the form that was asked for."""
    extra, is_mla = vllm_config.kv_transfer_config.kv_connector_extra_config, vllm_config.model_config.use_mla
    if is_mla and current_platform.is_cpu():
        allowed = "must be 0 for MLA models on vLLM's CPU backend, which can't go on from KV that it loads"
        raise ConfigError("kv_tier.gib", round(extra["cpu_bytes_to_use"] / 2**30, 3), allowed)
    if tier_of(extra).bits != QUANTISED:
        return
    if is_mla:
        allowed = "needs keys and values, and MLA keeps what both are made of; use 16"
        raise ConfigError("kv_tier.bits", QUANTISED, allowed)
    if current_platform.is_cpu():  # elsewhere no codec has to be compiled
        try:
            native.compiler_version()
        except native.CompilerMissing as error:
            raise ConfigError("kv_tier.bits", QUANTISED, f"needs a C++ compiler: {error}; or use 16") from error


def share_disk(vllm_config: VllmConfig) -> None:
    """Give each data-parallel engine its share of what may lie on disk, for vLLM copies the configuration to each.

    In its own copy an engine of a dense model can't see how many there are: vLLM has it say one.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    share = tier_of(extra).disk_gib / vllm_config.parallel_config.data_parallel_size
    extra[TIER_KEY] = {**extra[TIER_KEY], "disk_gib": share}


def too_small(vllm_config: VllmConfig) -> str:
    """Say why what ``gib: auto`` may take is not worth having, or nothing: it would hold only a few blocks.

    Blocks are taken to have keys and values for all of the model's layers, as no worker has said yet.
    """
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model, cache = vllm_config.model_config, vllm_config.cache_config
    item = kv_cache_dtype_str_to_dtype(cache.cache_dtype, model).itemsize
    parts = 1 if model.use_mla else 2
    of_token = parts * model.get_total_num_hidden_layers() * model.get_total_num_kv_heads() * model.get_head_size()
    block_bytes = of_token * item * cache.block_size
    may_take = vllm_config.kv_transfer_config.kv_connector_extra_config["cpu_bytes_to_use"]
    if may_take >= _LEAST_BLOCKS * block_bytes:
        return ""
    return f"{may_take / 2**30:.2f} GiB, 0.3 of what is free, would hold fewer than {_LEAST_BLOCKS} blocks"


def refuse_size(vllm_config: VllmConfig) -> None:
    """Raise ConfigError if this machine has less memory left than all its engines' workers will take together.

    A worker sees its own share only, and memory is taken when it is written to. Where workers may be on other machines
    each looks for itself when it starts.
    """
    parallel = vllm_config.parallel_config
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        return
    replicas = max(1, parallel.data_parallel_size_local)
    each = vllm_config.kv_transfer_config.kv_connector_extra_config["cpu_bytes_to_use"]
    if replicas * each > (free := free_bytes()):
        of_all = f" for each of {replicas} replicas" if replicas > 1 else ""
        allowed = f"must be less{of_all}: {free / 2**30:.3g} GiB are free, within what a container may take"
        raise ConfigError("kv_tier.gib", round(each / 2**30, 3), allowed)
