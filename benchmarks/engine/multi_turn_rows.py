"""The rows of `multi_turn.py`: who keeps the KV of past turns, and where.

A part of multi_turn.py: it is run from there. A new row is one line of `ROWS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import engine_rows
from multi_turn_workload import ModelKv

from vllm_ext.config.attention import OWN
from vllm_ext.config.kv_tier import KvTierConfig
from vllm_ext.kv.host.geometry import TierGeometry

STATELESS, LRU, RETENTION, RETENTION_8 = "stateless", "tier-lru", "tier-retention", "tier-retention-8"
PENSIEVE, PENSIEVE_8 = "pensieve", "pensieve-8"
PREFIX_CACHE, RECORDS, PENSIEVE_RECORDS = "prefix-cache", "records", "pensieve-records"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to treat what past turns computed."""

    prefix_caching: bool = True
    """Whether blocks on the device may be used again."""

    tier: Mapping[str, Any] | None = None
    """Options of `kv_tier` beside ``gib``; None: no host tier, and vLLM's own scheduler."""

    own_kernel: bool = False
    """Whether our attention kernel serves all steps."""

    records: bool = False
    """Whether ``--int8-share`` of the device's blocks are records of 8 bits instead; with `own_kernel`."""

    system: str = "fcfs"
    """Of a row with a tier, records or our kernel."""

    baseline: bool = False
    """Whether it is upstream's: its scheduler, or its eviction policy over our copies."""

    by_default: bool = True
    """Whether it is measured without being asked for."""


_EARLY: Mapping[str, Any] = {"bits": 16, "store": "early"}
"""As vLLM's connector keeps KV."""

_RECORDS: Mapping[str, Any] = {"own_kernel": True, "records": True, "by_default": False}

ROWS: Mapping[str, Row] = {
    STATELESS: Row(prefix_caching=False, baseline=True),
    PREFIX_CACHE: Row(baseline=True),
    LRU: Row(tier={**_EARLY, "policy": "lru"}, baseline=True),
    "tier-arc": Row(tier={**_EARLY, "policy": "arc"}, baseline=True),
    RETENTION: Row(tier={**_EARLY, "policy": "retention"}),
    RETENTION_8: Row(tier={**_EARLY, "policy": "retention", "bits": 8}),
    **{
        f"tier-{policy}-ahead": Row(tier={**_EARLY, "policy": policy, "store": "ahead"}, by_default=False)
        for policy in ("lru", "tail")
    },
    PENSIEVE: Row(system="pensieve", tier={"bits": 16}),
    PENSIEVE_8: Row(system="pensieve", tier={"bits": 8}),
    f"{PENSIEVE}-gaps": Row(
        system="pensieve", tier={"bits": 16, "policy": "leading", "gaps": "fused"}, by_default=False
    ),
    f"{PREFIX_CACHE}-own-kernel": Row(own_kernel=True, by_default=False),
    RECORDS: Row(**_RECORDS),
    PENSIEVE_RECORDS: Row(**_RECORDS, system="pensieve"),
    **{
        f"{RETENTION}-{mode}": Row(tier={**_EARLY, "policy": "retention", option: mode}, by_default=False)
        for option, modes in {"store": ("ahead",), "load": ("in-step", "auto")}.items()
        for mode in modes
    },
}
"""All tiers get the same number of bytes, and all rows the same bytes on the device."""

DEFAULT = tuple(name for name, row in ROWS.items() if row.by_default)
QUICK = (STATELESS, LRU, RETENTION_8)


def engine_args(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings of a row: those that all have in common, and its own."""
    row = ROWS[name]
    found = {**engine_rows.engine_args(args), "enable_prefix_caching": row.prefix_caching}
    if row.tier is not None or row.own_kernel:
        found["scheduler_cls"] = row.system
        ours = {"kv_tier": tier_options(row, args)}
        if row.own_kernel:
            ours["attention"] = {"kernel": OWN}
        found["additional_config"] = {"vllm_ext": ours}
    return found


def tier_options(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """Return `kv_tier` of a row that has a tier or records."""
    if row.tier is not None:
        return {"gib": args.tier_gib, **row.tier}
    return {"device_int8_share": args.int8_share} if row.records else {}


def tier_tokens(name: str, args: argparse.Namespace, model: ModelKv) -> int | None:
    """Return how many tokens the tier of a row holds, by the arithmetic that the engine uses; None without a tier.

    Raises:
        ConfigError: the tier can't be had with these options.
    """
    row = ROWS[name]
    if row.tier is None:
        return None
    tier = KvTierConfig(**tier_options(row, args))
    layers = [SimpleNamespace(tokens_per_block=args.block_size, layer_names=range(model.num_layers))]
    config: Any = SimpleNamespace(
        worker_kv_bytes_per_block=args.block_size * model.bytes_per_token,
        model=SimpleNamespace(dtype=args.dtype),
        groups=layers,
        parallel=SimpleNamespace(dcp_size=1),
    )
    return int(tier.host_bytes // TierGeometry.of(config, tier.bits).chunk_bytes * args.block_size)


def chosen(text: str) -> list[str]:
    """Return the rows that a comma list names.

    Raises:
        ValueError: one of them is unknown, or none is named.
    """
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in ROWS:
            raise ValueError(f"{name}: must be one of {', '.join(ROWS)}")
    if not names:
        raise ValueError(f"{text!r}: must name at least one of {', '.join(ROWS)}")
    return names
