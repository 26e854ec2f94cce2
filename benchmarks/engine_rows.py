"""The rows of `engine_compare.py`: what each system is given, upstream's own settings, and who is compared by default.

A part of engine_compare.py: it is run from there.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from typing import Any

import engine_predictor
import engine_variants

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

LENGTHS, MIXED_SLO, MEMORY_BOUND = "lengths", "mixed-slo", "memory-bound"
SWAPPING, UNUSED_TIER = "swapping", "unused-tier"
WITH_OBJECTIVES = (MIXED_SLO, MEMORY_BOUND)
"""Workloads whose clients tell objectives; they make their own requests."""
_OPTIONAL = "auto"
_ROWS = {
    LENGTHS: (BASELINE, PRIORITY, "fcfs", "alise", "alise@cold", "alise@warm", "oracle-alise"),
    MIXED_SLO: (
        *UPSTREAM,
        "fcfs",
        "orca",
        "vllm-2023",
        "fastgen",
        "fastserve",
        "sarathi",
        "sarathi-static",
        "alise",
        "accelgen",
        "past-future",
        "aggressive",
        "conservative",
        _OPTIONAL,
    ),
    MEMORY_BOUND: (
        BASELINE,
        "upstream-watermark",
        "fcfs",
        "sarathi",
        "alise",
        "accelgen",
        "past-future",
        "aggressive",
        "conservative",
        _OPTIONAL,
    ),
    SWAPPING: (BASELINE, *engine_variants.SWAPPING_ROWS),
    UNUSED_TIER: (BASELINE, *engine_variants.UNUSED_ROWS),
}
_QUICK_ROWS = {
    LENGTHS: (BASELINE, "oracle-alise"),
    MIXED_SLO: (BASELINE, "sarathi", "accelgen"),
    MEMORY_BOUND: (BASELINE, "aggressive", "past-future"),
    SWAPPING: (BASELINE, "alise:recompute", "alise:swap-8"),
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


def system_args(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings that make one system different from the others."""
    if system in UPSTREAM:
        return dict(UPSTREAM[system])
    options = copy.deepcopy(args.ext_config)
    name = engine_predictor.system_of(system)
    if systems.resolve(name).oracle:
        options["allow_oracle"] = True
    engine_variants.add_options(engine_predictor.variant_of(system), options, args.tier_gib)
    engine_predictor.choose_sources(system, options)
    return {"scheduler_cls": name, "additional_config": {"vllm_ext": options}}


def starts_from_profile(system: str) -> bool:
    """Whether a profile of step times is handed to a system: to all of ours whose policies may look at them."""
    return system not in UPSTREAM and engine_predictor.system_of(system) != "fcfs"
