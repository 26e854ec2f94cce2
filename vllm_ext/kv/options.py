"""The tier's options in vLLM's terms.

Apart from the connector, since the front end needs nothing else of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ext.config.kv_tier import LEADING, RETENTION, KvTierConfig

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

BITS_KEY = "vllm_ext_kv_tier_bits"
STORE_KEY = "vllm_ext_kv_tier_store"
LOAD_KEY = "vllm_ext_kv_tier_load"
COPIES_KEY = "vllm_ext_kv_tier_copies"
FREE_KEY = "vllm_ext_kv_tier_free_fraction"
KEEPER_KEY = "vllm_ext_kv_tier_conversations"
DISK_DIR_KEY = "vllm_ext_kv_tier_disk_dir"
DISK_BYTES_KEY = "vllm_ext_kv_tier_disk_bytes"
MODEL_KEY = "vllm_ext_kv_tier_model"
"""Keys of ``kv_connector_extra_config`` that carry the options that vLLM does not know."""


def transfer_config(tier: KvTierConfig) -> KVTransferConfig:
    """Return what ``--kv-transfer-config`` would have to say.

    Args:
        tier: The options; what they leave open is as it is by default.

    Raises:
        ConfigError: the directory on disk can't be written.
    """
    from vllm.config import KVTransferConfig

    tier = tier.resolved({})
    if tier.disk_dir:
        from vllm_ext.kv.disk.folder import check_writable

        check_writable(tier.disk_dir)
    return KVTransferConfig(
        kv_connector="TieredConnector",
        kv_connector_module_path="vllm_ext.kv.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "spec_name": "TierSpec",
            "spec_module_path": "vllm_ext.kv.spec",
            "cpu_bytes_to_use": tier.host_bytes,
            "eviction_policy": tier.policy,
            "offload_prompt_only": tier.prompt_only,
            BITS_KEY: tier.bits,
            STORE_KEY: tier.store,
            LOAD_KEY: tier.load,
            COPIES_KEY: tier.copies,
            FREE_KEY: tier.free_fraction,
            KEEPER_KEY: {
                "ttl_s": tier.ttl_s,
                "pin_share": tier.pin_share,
                "salt_share": tier.salt_share,
                "returns": tier.returns,
            },
            DISK_DIR_KEY: tier.disk_dir,
            DISK_BYTES_KEY: tier.disk_bytes,
        },
    )


def keep_from_the_front(transfer: KVTransferConfig) -> None:
    """Let conversations shrink from their tails where gaps can't be crossed: without its front all of one is lost."""
    extra = transfer.kv_connector_extra_config
    if extra["eviction_policy"] == LEADING:
        extra["eviction_policy"] = RETENTION
