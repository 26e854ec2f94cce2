"""Workloads of `engine_compare.py` whose requests have objectives, in proportion to what this machine does when idle.

Before anything is compared, upstream's server serves prompts of several lengths one by one, and then as many short
requests at once as there are seats. From that follow the TTFT of an idle server, as a line over the prompt's length,
and the step of a full batch that nothing disturbs. An objective is a multiple of these, one per tier, times a factor of
the request's own, so that a slower machine gets looser objectives and the same difficulty. (Sarathi-Serve, section 5.1,
takes multiples of an undisturbed decode step in the same way: 5 for strict, 25 for relaxed.)

A part of engine_compare.py: it is run from there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import engine_rows
import numpy as np
from engine_workload import FIRST_ORDINARY_TOKEN, BenchRequest

from vllm_ext.datasets import Dataset, WorkloadRow
from vllm_ext.simulation.recorded import forced_length
from vllm_ext.simulation.workloads.synthetic import Lengths, LengthShape, UniformLengths

_SPREAD = 0.25
"""Standard deviation of the logarithm of a request's own factor."""
_ALONE_PROMPTS = (16, 64, 256, 512, 1024, 2048)
_ALONE_REPEATS = 4
_ALONE_OUTPUT, _FULL_OUTPUT = 4, 64
_FULL_PROMPT = 16
ALONE, FULL = "alone", "full"
FULL_TOKENS = 2 * (_FULL_PROMPT + _FULL_OUTPUT)
"""Of KV for each request of the full batch: with room to spare, so that nobody waits for memory."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A kind of client."""

    share: float
    """Of all requests."""
    prompt: Lengths
    """Prompt lengths."""
    output: Lengths
    """Output lengths."""
    ttft_times: float
    """TTFT objective, as a multiple of what an idle server takes for the prompt."""
    tbt_times: float
    """TBT objective, as a multiple of the undisturbed step of a full batch."""


TIERS: Mapping[str, Mapping[str, Tier]] = {
    engine_rows.MIXED_SLO: {
        "assistant": Tier(
            share=0.4,
            prompt=LengthShape(median=40, p90=120),
            output=LengthShape(median=40, p90=100),
            ttft_times=15,
            tbt_times=5,
        ),
        "chat": Tier(
            share=0.35,
            prompt=LengthShape(median=120, p90=300),
            output=LengthShape(median=80, p90=200),
            ttft_times=40,
            tbt_times=10,
        ),
        "document": Tier(
            share=0.25,
            prompt=LengthShape(median=900, p90=1500),
            output=LengthShape(median=40, p90=100),
            ttft_times=20,
            tbt_times=25,
        ),
    },
    engine_rows.MEMORY_BOUND: {
        "answer": Tier(
            share=1.0,
            prompt=UniformLengths(low=16, high=128),
            output=UniformLengths(low=64, high=512),
            ttft_times=200,
            tbt_times=25,
        ),
    },
}
"""By workload and name."""

_LARGER: Mapping[str, Any] = {
    "hf_overrides": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 2048,
    },
    "load_format": "dummy",
    "dtype": "bfloat16",
    "synthetic": "sharegpt-like",
    "length_scale": 1.0,
    "max_model_len": 1024,
    "max_output_tokens": 512,
}
"""A model whose prefill takes time, so that KV is worth something."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    engine_rows.LENGTHS: {},
    engine_rows.SWAPPING: _LARGER | {"loads": "1.3", "num_requests": 200, "max_num_seqs": 48, "num_gpu_blocks": 193},
    engine_rows.UNUSED_TIER: _LARGER | {"loads": "2", "num_requests": 200, "max_num_seqs": 24, "num_gpu_blocks": 513},
    engine_rows.MIXED_SLO: {
        "loads": "1.2",
        "num_requests": 400,
        "length_scale": 1.0,
        "max_model_len": 2048,
        "max_output_tokens": 256,
        "max_num_seqs": 16,
        "num_gpu_blocks": 512,
        "priority_by": "ttft-slo",
        "profile": "measure",
    },
    engine_rows.MEMORY_BOUND: {
        "loads": "2",
        "num_requests": 400,
        "history_requests": 100,
        "length_scale": 1.0,
        "max_model_len": 1024,
        "max_output_tokens": 512,
        "max_num_seqs": 96,
        "num_gpu_blocks": 385,
        "priority_by": "ttft-slo",
        "profile": "measure",
    },
}
"""Options of a workload where the command line says nothing. Memory-bound: a pool of 384 blocks of 32 tokens (vLLM
keeps one more to itself) holds about 34 average requests at their end, there are 96 seats, and at twice the capacity a
queue is there nearly from the first request to the last."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What an idle server of this machine does, in milliseconds."""

    ttft_base_ms: float
    """TTFT of an empty prompt."""
    ttft_ms_per_token: float
    """What each prompt token adds."""
    decode_step_ms: float
    """Median gap between tokens of a full batch without prefills."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < float("inf")):
                raise ValueError(f"{name}={value!r}: must be a number of milliseconds of at least 0")
        if not self.decode_step_ms or not self.ttft_base_ms + self.ttft_ms_per_token:
            raise ValueError(f"{self}: an idle server takes time")

    def idle_ttft_ms(self, prompt_tokens: int) -> float:
        """Return the TTFT of a prompt on an idle server."""
        return self.ttft_base_ms + self.ttft_ms_per_token * prompt_tokens


def dataset(workload: str, rows: int, seed: int) -> Dataset:
    """Make a workload; equal arguments give equal rows and an equal checksum. The tier is in a row's id."""
    tiers = TIERS[workload]
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(tiers), size=rows, p=[tier.share for tier in tiers.values()])
    made: list[WorkloadRow] = []
    for number, (name, tier) in enumerate(tiers.items()):
        count = int((chosen == number).sum())
        lengths = zip(tier.prompt.draw(rng, count, 1 << 20), tier.output.draw(rng, count, 1 << 20), strict=True)
        made += [
            WorkloadRow(source_id=f"{name}-{i}", prompt_tokens=p, output_tokens=o) for i, (p, o) in enumerate(lengths)
        ]
    digest = hashlib.sha256(json.dumps([(r.source_id, r.prompt_tokens, r.output_tokens) for r in made]).encode())
    name = f"synthetic {workload}, seed {seed}"
    return Dataset(name=name, format="synthetic", rows=tuple(made), sha256=digest.hexdigest())


def tier_of(source_id: str) -> str:
    """Return the name of a request's tier."""
    return source_id.rpartition("-")[0]


def objectives(
    requests: Sequence[BenchRequest], workload: str, calibration: Calibration, *, scale: float, seed: int
) -> list[dict[str, float]]:
    """Return the hints of each request: ``ttft_slo_ms`` and ``tbt_slo_ms``.

    Args:
        requests: Of the workload.
        workload: Whose tiers they are of.
        calibration: What the multiples are of.
        scale: Factor on all objectives.
        seed: Of the requests' own factors.
    """
    tiers = TIERS[workload]
    own = np.exp(np.random.default_rng(seed).normal(0.0, _SPREAD, size=(len(requests), 2)))
    found = []
    for request, (for_ttft, for_tbt) in zip(requests, own, strict=True):
        tier = tiers[tier_of(request.source_id)]
        ttft_ms = calibration.idle_ttft_ms(len(request.prompt_token_ids)) * tier.ttft_times * for_ttft * scale
        tbt_ms = calibration.decode_step_ms * tier.tbt_times * for_tbt * scale
        found.append({"ttft_slo_ms": round(float(ttft_ms), 3), "tbt_slo_ms": round(float(tbt_ms), 3)})
    return found


def phases(*, vocab_size: int, max_prompt_tokens: int, seats: int, seed: int) -> list[dict[str, Any]]:
    """Return what an idle server serves to be calibrated by; see `engine_cell`."""
    rng = np.random.default_rng(seed)
    lengths = sorted({min(length, max_prompt_tokens) for length in _ALONE_PROMPTS})

    def request(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
        ids = [int(token) for token in rng.integers(FIRST_ORDINARY_TOKEN, vocab_size, size=prompt_tokens)]
        return {
            "prompt_token_ids": ids,
            "output_tokens": output_tokens,
            "max_tokens": output_tokens + 1,
            "extra_args": forced_length.extra_args(output_tokens),
            "arrival_s": 0.0,
        }

    alone = [request(n, _ALONE_OUTPUT) for _ in range(_ALONE_REPEATS) for n in lengths]
    return [
        {"name": ALONE, "requests": alone, "one_by_one": True},
        {"name": FULL, "requests": [request(_FULL_PROMPT, _FULL_OUTPUT) for _ in range(seats)]},
    ]


def calibrate(alone: Sequence[Mapping[str, Any]], full: Sequence[Mapping[str, Any]]) -> Calibration:
    """Reduce what an idle server did: a line through the medians of each prompt length, and the median gap.

    Args:
        alone: What came back of requests that were served one by one.
        full: The same of a full batch.
    """
    by_length: dict[int, list[float]] = {}
    for got in alone:
        by_length.setdefault(got["prompt_tokens"], []).append((got["token_times_s"][0] - got["sent_s"]) * 1000)
    medians = {tokens: median(values) for tokens, values in sorted(by_length.items())}
    slope, base = 0.0, next(iter(medians.values()))
    if len(medians) > 1:
        slope, base = (float(value) for value in np.polyfit(list(medians), list(medians.values()), 1))
    if slope < 0 or base < 0:  # noise of a busy machine; long prompts are measured best
        longest = max(medians)
        slope, base = (medians[longest] / longest, 0.0) if base < 0 else (0.0, medians[longest])
    gaps = np.concatenate([np.diff(got["token_times_s"]) for got in full])
    return Calibration(ttft_base_ms=base, ttft_ms_per_token=slope, decode_step_ms=float(np.median(gaps)) * 1000)
