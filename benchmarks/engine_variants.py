"""Variants of our systems in `engine_compare.py`: what becomes of preempted KV, and a host tier that is on but unused.

A label is ``SYSTEM``, ``SYSTEM:VARIANT`` or ``SYSTEM:VARIANT@STATE`` (see engine_predictor.py). A part of
engine_compare.py: it is run from there. A new variant is one line of `VARIANTS`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

_PREEMPTING: Mapping[str, Any] = {"admission": {"priced": False}}
"""As published: whenever a better job waits, and not only where it pays."""
_SWAPPING: Mapping[str, Any] = {**_PREEMPTING, "residency": {"choose": "swap"}}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "defer": {"admission": {"preempt": False}},
    "recompute": _PREEMPTING,
    "swap-16": {**_SWAPPING, "kv_tier": {"bits": 16, "store": "early"}},
    "swap-8": {**_SWAPPING, "kv_tier": {"bits": 8, "store": "early"}},
    "swap-8-late": {**_SWAPPING, "kv_tier": {"bits": 8, "store": "late"}},
    "swap-8-ahead": {**_SWAPPING, "kv_tier": {"bits": 8, "store": "ahead"}},
    "cost-8": {"kv_tier": {"bits": 8, "store": "early"}},
    "cost-8-ahead": {"kv_tier": {"bits": 8, "store": "ahead"}},
    "tier-early": {"kv_tier": {"bits": 16, "store": "early"}},
    "tier-late": {"kv_tier": {"bits": 16, "store": "late"}},
    "tier-ahead": {"kv_tier": {"bits": 16, "store": "ahead"}},
}
"""Options of ``vllm_ext`` by name; a tier gets its size from the command line.

The first four are the strategies of ALISE's figure 8; ``cost-8`` chooses among keeping, swapping and recomputing.
``swap-8`` copies KV as soon as a chunk is full, ``-late`` when its request is preempted, or seen to be soon, ``-ahead``
when its blocks are about to be needed.
"""

SWAPPING_ROWS = (
    "alise:defer",
    "alise:recompute",
    "alise:swap-16",
    "alise:swap-8",
    "alise:swap-8-late",
    "alise:swap-8-ahead",
    "alise:cost-8",
    "alise:cost-8-ahead",
)
UNUSED_ROWS = ("fcfs", "fcfs:tier-early", "fcfs:tier-late", "fcfs:tier-ahead")


def split(label: str, variants: Collection[str] = VARIANTS) -> tuple[str, str | None]:
    """Return system and variant of a label without its predictor's state.

    Raises:
        ValueError: there is no such variant.
    """
    system, colon, variant = label.partition(":")
    if colon and variant not in variants:
        raise ValueError(f"{label}: what follows : must be one of {', '.join(variants)}")
    return system, variant or None


def add_options(variant: str | None, options: dict[str, Any], tier_gib: float) -> None:
    """Merge a variant's options into ``options`` of ``vllm_ext``; what is there already stays."""
    for section, values in copy.deepcopy(dict(VARIANTS[variant] if variant else {})).items():
        options[section] = {**values, **options.get(section, {})}
    if "kv_tier" in options:
        options["kv_tier"].setdefault("gib", tier_gib)
