"""Synthetic steps of a known runtime model."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from vllm_ext.step_time.runtime import Coefficients, RuntimeModel, StepFeatures

TRUE = Coefficients(base_s=8e-3, decode_s=5e-5, prefill_token_s=4e-5, context_token_s=4e-8, pair_s=2e-9)


class Steps:
    """Steps of mixed batches and how long they take."""

    def __init__(self, seed: int = 0, scale: float = 1.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.scale = scale

    def features(self) -> StepFeatures:
        rng = self.rng
        prefill = int(rng.integers(1, 2048)) if rng.random() < 0.3 else 0
        return StepFeatures(
            int(rng.integers(1, 128)), prefill, int(rng.integers(100, 200_000)), prefill * float(rng.integers(1, 4000))
        )

    def decode_only(self) -> StepFeatures:
        return self.features()._replace(num_prefill_tokens=0, prefill_context=0.0)

    def duration(self, f: StepFeatures) -> float:
        return self.scale * sum(c * x for c, x in zip(TRUE, (1.0, *f), strict=True))

    def noisy(self, f: StepFeatures, noise: float) -> float:
        """The duration with a log-normal error of that standard deviation."""
        return self.duration(f) * math.exp(noise * self.rng.standard_normal())

    def show(self, model: RuntimeModel, count: int, noise: float = 0.0) -> None:
        for _ in range(count):
            f = self.features()
            model.observe(f, self.noisy(f, noise))

    def error(self, model: RuntimeModel, count: int = 200, kind: Callable[[], StepFeatures] | None = None) -> float:
        """Median relative error over new steps."""
        steps = [(kind or self.features)() for _ in range(count)]
        return float(np.median([abs(model.step_time_s(f) / self.duration(f) - 1) for f in steps]))
