"""The tier's options in vLLM's terms.

Apart from the connector, since the front end needs nothing else of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_ext.config.kv_tier import AUTO, LEADING, OFF, RETENTION, KvTierConfig

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

TIER_KEY = "vllm_ext_kv_tier"
"""Key of ``kv_connector_extra_config`` that carries the options that vLLM does not know: those of `KvTierConfig`."""


def transfer_config(tier: KvTierConfig, spare_bytes: int = 2**62) -> KVTransferConfig:
    """Return what ``--kv-transfer-config`` would have to say.

    Args:
        tier: The options; what they leave open is as it is by default.
        spare_bytes: Most host memory that is taken where that is not said; twice the device's KV at most
            (`vllm_ext.kv.connector.spec.TierSpec`).

    Raises:
        ConfigError: the directory on disk can't be written.
    """
    from vllm.config import KVTransferConfig

    tier = tier.resolved({})
    if tier.disk_dir:
        from vllm_ext.kv.disk.files import check_writable

        check_writable(tier.disk_dir)
    return KVTransferConfig(
        kv_connector="TieredConnector",
        kv_connector_module_path="vllm_ext.kv.connector.tiered",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "spec_name": "TierSpec",
            "spec_module_path": "vllm_ext.kv.connector.spec",
            "cpu_bytes_to_use": spare_bytes if tier.gib == AUTO else tier.host_bytes,
            "eviction_policy": tier.policy,
            "offload_prompt_only": tier.prompt_only is True,
            TIER_KEY: tier.model_dump(),
        },
    )


def tier_of(extra_config: Mapping[str, Any]) -> KvTierConfig:
    """Return the options that a ``kv_connector_extra_config`` carries, with nothing left open.

    Raises:
        ConfigError: it was written by hand, with something that is not allowed.
    """
    return KvTierConfig(**extra_config.get(TIER_KEY, {})).resolved({})


def keep_from_the_front(transfer: KVTransferConfig) -> None:
    """Let conversations shrink from their tails where gaps can't be crossed: without its front all of one is lost."""
    extra = transfer.kv_connector_extra_config
    if extra["eviction_policy"] == LEADING:
        extra["eviction_policy"] = RETENTION
        extra[TIER_KEY] = tier_of(extra).changed(policy=RETENTION, gaps=OFF).model_dump()
