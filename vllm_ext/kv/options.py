"""The tier's options in vLLM's terms.

Apart from the connector, since the front end needs nothing else of it. What copies is imported when a worker is built,
and not before: it imports numba, and vLLM's CPU platform looks into every module there is when a worker starts, and
trips over numba's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ext.config_kv import LATE, KvTierConfig

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

BITS_KEY = "vllm_ext_kv_tier_bits"
CHUNK_KEY = "vllm_ext_kv_tier_chunk_tokens"
LATE_KEY = "vllm_ext_kv_tier_late"
"""Keys of ``kv_connector_extra_config`` that carry ``kv_tier.bits``, ``.chunk_tokens``, and whether to store late."""


def transfer_config(tier: KvTierConfig) -> KVTransferConfig:
    """Return what ``--kv-transfer-config`` would have to say."""
    from vllm.config import KVTransferConfig

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
            CHUNK_KEY: tier.chunk_tokens,
            LATE_KEY: tier.store == LATE,
        },
    )
