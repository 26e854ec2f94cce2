"""Workloads of our own making, for runs that have no data file: log-normal lengths like those of public data sets.

Medians and 90th percentiles are those of the public texts in words, times 4/3 for tokens; log-normal is an
approximation whose tails are cut at ``max_tokens``. The rows have lengths only, no text.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from vllm_ext.simulation.datasets import Dataset, WorkloadRow

_P90_IN_SIGMAS = 1.2815515655446004
"""90th percentile of the standard normal distribution."""


@dataclass(frozen=True, kw_only=True)
class LengthShape:
    """A log-normal length distribution by its median and 90th percentile, in tokens."""

    median: float
    """Half of the lengths are below this."""

    p90: float
    """Nine in ten lengths are below this."""

    def draw(self, rng: np.random.Generator, count: int, max_tokens: int) -> list[int]:
        """Draw whole lengths between 1 and max_tokens."""
        sigma = np.log(self.p90 / self.median) / _P90_IN_SIGMAS
        lengths = np.exp(rng.normal(np.log(self.median), sigma, size=count))
        return [int(n) for n in np.clip(np.rint(lengths), 1, max_tokens)]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Prompt and output lengths of a kind of traffic."""

    prompt: LengthShape
    """Prompt lengths."""

    output: LengthShape
    """Output lengths."""

    max_tokens: int
    """Cut for both, in tokens."""


PRESETS = {
    "alpaca-like": Preset(
        prompt=LengthShape(median=15, p90=28), output=LengthShape(median=48, p90=149), max_tokens=1024
    ),
    "sharegpt-like": Preset(
        prompt=LengthShape(median=17, p90=155), output=LengthShape(median=232, p90=485), max_tokens=2048
    ),
}


def generate(preset: str, *, rows: int, seed: int) -> Dataset:
    """Make a workload; equal arguments give equal rows and an equal checksum.

    Raises:
        ValueError: unknown preset or fewer than one row.
    """
    if preset not in PRESETS:
        raise ValueError(f"synthetic={preset!r}: must be one of {', '.join(PRESETS)}")
    if rows < 1:
        raise ValueError(f"rows={rows!r}: must be at least 1")
    shape, rng = PRESETS[preset], np.random.default_rng(seed)
    prompts = shape.prompt.draw(rng, rows, shape.max_tokens)
    outputs = shape.output.draw(rng, rows, shape.max_tokens)
    made = tuple(
        WorkloadRow(source_id=f"{preset}-{i}", prompt_tokens=p, output_tokens=o)
        for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    )
    digest = hashlib.sha256(json.dumps(list(zip(prompts, outputs, strict=True))).encode()).hexdigest()
    return Dataset(name=f"synthetic {preset}, seed {seed}", format="synthetic", rows=made, sha256=digest)
