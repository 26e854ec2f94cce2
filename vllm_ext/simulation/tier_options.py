"""Which KV connector a simulated engine has, and what it takes the model's KV for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig

from vllm_ext.config import parse
from vllm_ext.config_checks import ConfigError
from vllm_ext.config_kv import KvTierConfig
from vllm_ext.kv.options import transfer_config
from vllm_ext.simulation.harness import KvShape
from vllm_ext.systems import build

if TYPE_CHECKING:
    from vllm_ext.simulation.cost.spec import HardwareSpec
    from vllm_ext.simulation.spec import EngineSpec, KvOffloadSpec

TIER_KEY = "kv_tier"
_DTYPES = {1: "fp8", 2: "bfloat16", 4: "float32"}


def connector_options(engine: EngineSpec, hardware: HardwareSpec | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `make_scheduler` is told of a connector: nothing, vLLM's with ``kv_offload``, ours with ``kv_tier``.

    Args:
        engine: The settings.
        hardware: Says how large a block is.
        options: The engine's, with its system: which form of KV that wants.

    Raises:
        ValueError: (ConfigError included) both are asked for, the hardware is not known, or the host's memory is
            smaller than one chunk.
    """
    tier, offload = tier_config(engine), engine.kv_offload
    if tier is None:
        if offload is None:
            return {}
        block_bytes = kv_bytes_per_block(_known(hardware, "kv_offload"), engine.block_size)
        return {"kv_transfer_config": upstream_config(offload, block_bytes), "kv_shape": KvShape(block_bytes)}
    if offload is not None:
        allowed = "must be left out beside kv_offload, which is vLLM's own connector: an engine has one connector"
        raise ConfigError(TIER_KEY, engine.options[TIER_KEY], allowed)
    shape = _tier_shape(_known(hardware, TIER_KEY), engine.block_size)
    config = transfer_config(build(parse(options)).tier(tier))
    config.engine_id = "simulated"  # vLLM's default is a random number
    return {"kv_transfer_config": config, "kv_shape": shape}


def _known(hardware: HardwareSpec | None, asked: str) -> HardwareSpec:
    if hardware is None:
        raise ValueError(f"hardware=None: needed for {asked}, to know the size of a block")
    return hardware


def tier_config(engine: EngineSpec) -> KvTierConfig | None:
    """Return the options of our tier; None if there is none.

    Raises:
        ConfigError: an option is unknown, or its value can't be; or it asks for a disk, which is not simulated.
    """
    given = engine.options.get(TIER_KEY)
    if given is None:
        return None
    tier: KvTierConfig = parse({TIER_KEY: given}).kv_tier
    if tier.disk_dir:
        raise ConfigError("kv_tier.disk_dir", tier.disk_dir, "must be left out in a simulation, which has no disk")
    return tier if tier.gib else None


def upstream_config(offload: KvOffloadSpec, block_bytes: int) -> KVTransferConfig:
    """Return what ``--kv-transfer-config`` would say of vLLM's own connector.

    Args:
        block_bytes: KV of one block on all devices together.

    Raises:
        ValueError: the host memory is smaller than one chunk.
    """
    chunk_bytes = block_bytes * offload.blocks_per_chunk
    if offload.cpu_bytes < chunk_bytes:
        raise ValueError(f"cpu_bytes={offload.cpu_bytes!r}: must hold at least one chunk of {chunk_bytes} bytes")
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        engine_id="simulated",
        kv_connector_extra_config={
            "cpu_bytes_to_use": offload.cpu_bytes,
            "eviction_policy": offload.policy,
            "offload_prompt_only": offload.offload_prompt_only,
            "blocks_per_chunk": offload.blocks_per_chunk,
        },
    )


def device_block_bytes(hardware: HardwareSpec, block_size: int) -> int:
    """Return the bytes of one block of ``block_size`` tokens on one device."""
    model = hardware.resolve_model()
    return block_size * model.kv_bytes_per_token(hardware.kv_dtype_bytes, hardware.tensor_parallel)


def kv_bytes_per_block(hardware: HardwareSpec, block_size: int) -> int:
    """Return the bytes of one block of ``block_size`` tokens on all devices together."""
    return device_block_bytes(hardware, block_size) * hardware.tensor_parallel


def _tier_shape(hardware: HardwareSpec, block_size: int) -> KvShape:
    """Return the KV of all devices as one worker's: as many layers more, each of a device's heads.

    So a chunk takes the same bytes, records of 8 bits and their padding included, and one simulated worker reports for
    all: the devices of a group copy side by side and are through together.
    """
    return KvShape(
        kv_bytes_per_block(hardware, block_size),
        layers=hardware.resolve_model().layers * hardware.tensor_parallel,
        dtype=_DTYPES.get(hardware.kv_dtype_bytes, f"of {hardware.kv_dtype_bytes} bytes"),
    )
