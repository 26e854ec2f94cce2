"""The rows of `engine_compare.py`: what each system is given, upstream's own settings, and who is compared by default.

A label is ``SYSTEM``, ``SYSTEM:VARIANT``, ``SYSTEM@STATE`` or ``SYSTEM:VARIANT@STATE``: a variant has options of its
own, a state says what its predictor of prompts knows at the start. A new variant is one line of `VARIANTS`. A part of
engine_compare.py: it is run from there.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Collection, Mapping
from typing import Any

from vllm_ext import systems

BASELINE = "upstream-fcfs"
PRIORITY = "upstream-priority"
UPSTREAM: Mapping[str, Mapping[str, Any]] = {
    BASELINE: {},
    PRIORITY: {"scheduling_policy": "priority"},
    "upstream-watermark": {"watermark": 0.05},
    "upstream-chunked": {"max_num_batched_tokens": 256},
}
"""vLLM alone: as it comes, with the requests' priorities, with 5 % of the KV pool kept free of admissions, and with
small prefill chunks, which is what it offers for the time between tokens."""


COLD, WARM = "cold", "warm"
"""States of a predictor: nothing learned, or what rows that are not measured teach."""
_PREEMPTING: Mapping[str, Any] = {"residency": {"choose": "recompute"}}
_SWAPPING: Mapping[str, Any] = {"residency": {"choose": "swap"}}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "defer": {"admission": {"preempt": False}},
    "recompute": _PREEMPTING,
    "swap-16": {**_SWAPPING, "kv_tier": {"bits": 16, "store": "early"}},
    "swap-8": {**_SWAPPING, "kv_tier": {"bits": 8, "store": "early"}},
    "swap-8-ahead": {**_SWAPPING, "kv_tier": {"bits": 8, "store": "ahead"}},
    "cost-8": {"residency": {"choose": "cost"}, "kv_tier": {"bits": 8, "store": "early"}},
    "cost-8-ahead": {"residency": {"choose": "cost"}, "kv_tier": {"bits": 8, "store": "ahead"}},
    "in-place-10": {"kv_tier": {"gib": 0.0, "device_int8_share": 0.1}},
    "in-place-20": {"kv_tier": {"gib": 0.0, "device_int8_share": 0.2}},
    "tier-early": {"kv_tier": {"bits": 16, "store": "early"}},
    "tier-ahead": {"kv_tier": {"bits": 16, "store": "ahead"}},
}
"""Options of ``vllm_ext`` by name; a tier gets its size from the command line.

The first four are the strategies of ALISE's figure 8; ``cost-8`` chooses among keeping, swapping and recomputing.
``swap-8`` copies KV as soon as a chunk is full, ``-ahead`` when its blocks are about to be needed. ``in-place-10`` has
no host memory, and records of 8 bits in a tenth of the device's, ``in-place-20`` in a fifth.
"""

LENGTHS, MIXED_SLO, MEMORY_BOUND = "lengths", "mixed-slo", "memory-bound"
SWAPPING, UNUSED_TIER = "swapping", "unused-tier"
WITH_OBJECTIVES = (MIXED_SLO, MEMORY_BOUND)
"""Workloads whose clients tell objectives; they make their own requests."""
PREEMPTED = "alise-published"
"""Whose preempted requests' KV is compared in `SWAPPING`."""
_OPTIONAL = "auto"
_ROWS = {
    LENGTHS: (BASELINE, PRIORITY, "fcfs", "alise", "alise@cold", "alise@warm", "oracle-alise"),
    MIXED_SLO: (
        *UPSTREAM,
        *("fcfs", "orca", "vllm-2023", "fastgen", "fastserve", "sarathi", "sarathi-static", "alise", "accelgen"),
        *("past-future", "aggressive", "conservative", _OPTIONAL),
    ),
    MEMORY_BOUND: (
        *(BASELINE, "upstream-watermark", "fcfs", "sarathi", "alise", "accelgen"),
        *("past-future", "aggressive", "conservative", _OPTIONAL),
    ),
    SWAPPING: (BASELINE, *(f"{PREEMPTED}:{name}" for name in VARIANTS if not name.startswith("tier-"))),
    UNUSED_TIER: (BASELINE, "fcfs", *(f"fcfs:{name}" for name in VARIANTS if name.startswith("tier-"))),
}
_QUICK_ROWS = {
    LENGTHS: (BASELINE, "oracle-alise"),
    MIXED_SLO: (BASELINE, "sarathi", "accelgen"),
    MEMORY_BOUND: (BASELINE, "aggressive", "past-future"),
    SWAPPING: (BASELINE, f"{PREEMPTED}:recompute", f"{PREEMPTED}:swap-8"),
    UNUSED_TIER: ("fcfs", "fcfs:tier-early"),
}
WORKLOADS = tuple(_ROWS)


def default_rows(workload: str, *, quick: bool) -> str:
    """Return the rows of a workload as a comma list; ``auto`` is one of them where it is registered."""
    rows = (_QUICK_ROWS if quick else _ROWS)[workload]
    return ",".join(row for row in rows if row != _OPTIONAL or row in systems.known())


def engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings common to all systems."""
    return {
        "block_size": args.block_size,
        "disable_log_stats": False,
        "dtype": args.dtype,
        "enable_prefix_caching": True,
        "enforce_eager": args.enforce_eager,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "hf_overrides": args.hf_overrides,
        "load_format": args.load_format,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "num_gpu_blocks_override": args.num_gpu_blocks,
        "seed": 0,
    }


def split(label: str, variants: Collection[str] = VARIANTS) -> tuple[str, str | None, str | None]:
    """Return system, variant and state of a label.

    Raises:
        ValueError: there is no such variant, or no such state.
    """
    named, at, state = label.partition("@")
    if at and state not in (COLD, WARM):
        raise ValueError(f"{label}: what follows @ must be {COLD} or {WARM}")
    system, colon, variant = named.partition(":")
    if colon and variant not in variants:
        raise ValueError(f"{label}: what follows : must be one of {', '.join(variants)}")
    return system, variant or None, state or None


def system_args(label: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings that make one system different from the others; what is asked for stays."""
    if label in UPSTREAM:
        return dict(UPSTREAM[label])
    system, variant, state = split(label)
    options = copy.deepcopy(args.ext_config)
    if systems.resolve(system).oracle:
        options["allow_oracle"] = True
    for section, values in copy.deepcopy(dict(VARIANTS[variant] if variant else {})).items():
        options[section] = {**values, **options.get(section, {})}
    if "kv_tier" in options:
        options["kv_tier"].setdefault("gib", args.tier_gib)
    sources = ["hint", "history"] if state is None else ["hint", "retrieval", "history"]
    options.setdefault("prediction", {}).setdefault("sources", sources)
    if state is not None:
        options.setdefault("predictor", {})
    return {"scheduler_cls": system, "additional_config": {"vllm_ext": options}}


def starts_from_profile(label: str) -> bool:
    """Whether a profile of step times is handed to a system: to all of ours whose policies may look at them."""
    return label not in UPSTREAM and split(label)[0] != "fcfs"
