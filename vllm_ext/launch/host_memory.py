"""Host memory for KV: whether there is some, how much, and what the engine has to be for it."""

from __future__ import annotations

import logging
from typing import Any

from vllm_ext.config import ConfigError, ExtConfig
from vllm_ext.config.kv_tier import AUTO, BETWEEN, IN_STEP, LEADING, OFF, RETENTION
from vllm_ext.hooks import registry

logger = logging.getLogger("vllm.vllm_ext")


def with_host_memory(config: ExtConfig, given: object) -> ExtConfig:
    """Decide whether there is host memory for KV, where that is left to the system.

    Args:
        config: As the user has it.
        given: Another connector that was asked for, or None: an engine has one.

    Returns:
        The configuration with a number of GiB, ``auto``, or nothing.
    """
    from vllm.platforms import current_platform

    from vllm_ext import systems

    tier, by_name = config.kv_tier, config.kv_tier.gib is not None
    gib = tier.gib if by_name else systems.build(config).residency.tier_options.get("gib", 0.0)
    if gib == AUTO:
        if current_platform.is_cpu():
            return without_host_memory(config, "on vLLM's CPU backend copies take the model's cycles")
        if not by_name and (given is not None or tier.device_int8_share):
            return without_host_memory(config, "another connector, or kv_tier.device_int8_share, was asked for")
    return config.changed(kv_tier=tier.changed(gib=gib)) if gib else config


def without_host_memory(config: ExtConfig, reason: str) -> ExtConfig:
    """Return the configuration without a host tier, where its size was left to the system, and say why."""
    logger.info("no host memory is used for KV: %s; --kv-tier-gib N uses it anyway", reason)
    return config.changed(kv_tier=config.kv_tier.changed(gib=0.0))


def tier_connector(config: ExtConfig, given: object, replicas: int = 1) -> Any:
    """Return the connector of the host tier, as vLLM's configuration names it.

    Args:
        config: With a tier.
        given: Another connector that was asked for, or None.
        replicas: Engines that share this machine's memory.

    Raises:
        ConfigError: Another connector was asked for.
    """
    if given is not None:
        raise ConfigError("kv_tier.gib", config.kv_tier.gib, "not beside --kv-transfer-config; leave one of them out")
    registry.verify("kv-tier", *(["kv-disk"] if config.kv_tier.disk_dir else []))
    from vllm_ext import systems
    from vllm_ext.kv.connector.options import transfer_config
    from vllm_ext.kv.host.memory import spare_bytes

    return transfer_config(systems.build(config).tier(config.kv_tier), spare_bytes(replicas))


def prepare_tier(config: ExtConfig, vllm_config: Any) -> str:
    """Fit an engine to its host tier.

    Returns:
        Why what ``gib: auto`` may take is too little, to be built again without; else nothing.

    Raises:
        ConfigError: The model's KV, or this machine, does not go with it.
    """
    if not config.kv_tier.gib:
        return ""
    from vllm_ext.kv.connector import support

    support.refuse_model(vllm_config)
    support.refuse_size(vllm_config)
    support.choose_block_size(vllm_config)
    if config.kv_tier.gib == AUTO and (reason := support.too_small(vllm_config)):
        return reason
    if config.kv_tier.disk_dir:
        from vllm_ext.kv.disk.identity import note_model

        support.share_disk(vllm_config)
        note_model(vllm_config, config.kv_tier.disk_dir)
    return ""


def load_between_steps(config: ExtConfig) -> ExtConfig:
    """Have KV loaded between steps where loads within a step hold all of it up, unless those were asked for.

    On CUDA the host waits for them before the forward pass, and a step can't be a graph. Without them nothing can be
    loaded behind a missing block, so conversations are looked up from their front.

    Returns:
        The configuration with what will be done.
    """
    from vllm.platforms import current_platform

    from vllm_ext import systems

    if not config.kv_tier.gib or current_platform.is_cpu() or config.kv_tier.load == IN_STEP:
        return config
    tier = systems.build(config).tier(config.kv_tier)
    if tier.load == BETWEEN:
        return config
    unasked = config.kv_tier.load is None and tier.gaps == OFF  # nothing is lost that anybody named
    logger.log(
        logging.INFO if unasked else logging.WARNING,
        "KV is loaded between steps%s: on this device loads within a step would hold the whole step up; "
        "kv_tier.load=in-step has them all the same",
        "" if tier.gaps == OFF else ", and conversations are computed again from their first missing block on",
    )
    policy = RETENTION if tier.policy == LEADING else tier.policy
    return config.changed(kv_tier=config.kv_tier.changed(load=BETWEEN, gaps=OFF, policy=policy))
