"""The runtime model: recovers what it is shown, survives what it should not believe, never predicts nonsense."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from vllm_ext.prediction.runtime import RuntimeModel, StepFeatures

TRUE = (8e-3, 5e-5, 4e-5, 4e-8, 2e-9)


class Steps:
    """Synthetic steps of a mixed batch and how long they take."""

    def __init__(self, seed: int = 0, scale: float = 1.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.scale = scale

    def features(self) -> StepFeatures:
        rng = self.rng
        prefill = int(rng.integers(1, 2048)) if rng.random() < 0.3 else 0
        return StepFeatures(
            int(rng.integers(1, 128)), prefill, int(rng.integers(100, 200_000)), prefill * float(rng.integers(1, 4000))
        )

    def duration(self, f: StepFeatures) -> float:
        raw = (1.0, f.num_requests, f.num_prefill_tokens, f.num_context_tokens, f.prefill_context)
        return self.scale * sum(c * x for c, x in zip(TRUE, raw, strict=True))

    def show(self, model: RuntimeModel, count: int, noise: float = 0.0) -> None:
        for _ in range(count):
            f = self.features()
            model.observe(f, self.duration(f) * (1 + noise * self.rng.standard_normal()))

    def error(self, model: RuntimeModel, count: int = 200) -> float:
        """Median relative error over new steps."""
        steps = [self.features() for _ in range(count)]
        return float(np.median([abs(model.step_time_s(f) / self.duration(f) - 1) for f in steps]))


def test_known_coefficients_are_recovered_from_noisy_steps() -> None:
    model, steps = RuntimeModel(), Steps()
    steps.show(model, 3000, noise=0.03)
    assert steps.error(model) < 0.03
    assert model.coefficients[2:4] == pytest.approx(TRUE[2:4], rel=0.15)
    assert model.prefill_s(1000) == pytest.approx(1000 * (TRUE[2] + TRUE[4] * 500), rel=0.1)


def test_the_reported_error_is_that_of_the_predictions() -> None:
    model, steps = RuntimeModel(), Steps()
    steps.show(model, 3000, noise=0.1)
    assert model.mean_abs_relative_error == pytest.approx(0.08, abs=0.04)


def test_the_reported_error_covers_what_clipping_does() -> None:
    """A coefficient that is fitted below zero is used as zero; the error users see must say so."""
    model, rng = RuntimeModel(), np.random.default_rng(0)

    def step() -> tuple[StepFeatures, float]:
        requests = int(rng.integers(1, 64))
        f = StepFeatures(requests, 0, int(requests * rng.integers(300, 700)))
        return f, 0.01 + 3e-4 * requests - 2e-7 * f.num_context_tokens

    for _ in range(5000):
        model.observe(*step())
    used = np.mean([abs(model.step_time_s(f) - t) / t for f, t in (step() for _ in range(300))])
    assert model.mean_abs_relative_error == pytest.approx(used, rel=0.5, abs=0.02)


def test_single_outliers_are_ignored() -> None:
    model, steps = RuntimeModel(), Steps()
    steps.show(model, 1000)
    before = model.coefficients
    for _ in range(9):
        model.observe(steps.features(), 60.0)
    assert model.coefficients == before
    for _ in range(200):
        steps.show(model, 5)
        model.observe(steps.features(), 60.0)
    assert steps.error(model) < 0.02


def test_a_compilation_in_the_first_steps_is_forgotten_soon() -> None:
    """The first steps of a server compile kernels and take seconds; ranks are computed from the first minute on."""
    model, steps = RuntimeModel(), Steps()
    for _ in range(3):
        model.observe(steps.features(), 30.0)
    steps.show(model, 500)
    assert steps.error(model) < 0.25


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0], ids=["10 times faster", "3 times slower", "30 times slower"])
def test_a_change_of_regime_is_followed_within_some_thousand_steps(scale: float) -> None:
    model = RuntimeModel()
    Steps().show(model, 5000)
    after = Steps(1, scale)
    after.show(model, 4000)
    assert after.error(model) < 0.2


def test_a_change_is_followed_after_a_long_time_without_prefills() -> None:
    """Hours of decoding say nothing about prefill; they must not make the model deaf to the rest."""
    model, steps = RuntimeModel(), Steps()
    for _ in range(20_000):
        f = steps.features()._replace(num_prefill_tokens=0, prefill_context=0.0)
        model.observe(f, steps.duration(f))
    after = Steps(1, 3.0)
    for _ in range(4000):
        f = after.features()._replace(num_prefill_tokens=0, prefill_context=0.0)
        model.observe(f, after.duration(f))
    errors = []
    for _ in range(100):
        f = after.features()._replace(num_prefill_tokens=0, prefill_context=0.0)
        errors.append(abs(model.step_time_s(f) / after.duration(f) - 1))
    assert np.median(errors) < 0.2


def test_identical_steps_do_not_blow_the_model_up() -> None:
    model, f = RuntimeModel(), StepFeatures(8, 0, 4000)
    for _ in range(100_000):
        model.observe(f, 0.02)
    assert model.step_time_s(f) == pytest.approx(0.02, rel=1e-3)
    assert np.isfinite(model._covariance).all()
    assert model.decode_s(100, 1000) == pytest.approx(2.0, rel=0.2)
    steps = Steps()
    steps.show(model, 2000)
    assert steps.error(model) < 0.2


def _falling(f: StepFeatures) -> float:
    return max(1e-4, 0.1 - 5e-7 * f.num_context_tokens)


@pytest.mark.parametrize(
    "duration",
    [_falling, lambda f: 1e-9, lambda f: 1e9, lambda f: 1e-12 * f.num_requests],
    ids=["falling with context", "tiny", "huge", "vanishing"],
)
def test_no_prediction_is_negative_or_endless(duration: Callable[[StepFeatures], float]) -> None:
    model, steps = RuntimeModel(), Steps()
    for _ in range(500):
        f = steps.features()
        model.observe(f, duration(f))
    for f in (steps.features(), StepFeatures(0, 0, 0), StepFeatures(10**6, 10**9, 10**12, 1e18)):
        assert 0 <= model.step_time_s(f) < math.inf
    assert all(c >= 0 for c in model.coefficients)
    for tokens in (1, 10**6):
        assert 0 < model.prefill_s(tokens) < math.inf
        assert 0 < model.decode_s(tokens, 10**6) < math.inf
    assert model.prefill_s(0) == 0


@pytest.mark.parametrize("duration", [0.0, -1.0, math.nan, math.inf])
def test_senseless_durations_are_ignored(duration: float) -> None:
    model = RuntimeModel()
    before = model.coefficients
    model.observe(StepFeatures(1, 0, 10), duration)
    assert (model.coefficients, model.num_observations) == (before, 0)


def test_the_same_steps_give_the_same_model() -> None:
    models = [RuntimeModel(), RuntimeModel()]
    for model in models:
        Steps(5).show(model, 500, noise=0.2)
    assert models[0].coefficients == models[1].coefficients


def test_more_tokens_never_take_less_time() -> None:
    model, steps = RuntimeModel(), Steps()
    steps.show(model, 500, noise=0.3)
    prefills = [model.prefill_s(n) for n in range(1, 3000, 97)]
    decodes = [model.decode_s(n, 500) for n in range(1, 3000, 97)]
    assert prefills == sorted(prefills)
    assert decodes == sorted(decodes)
    assert model.prefill_s(100, 5000) >= model.prefill_s(100, 0)


@pytest.mark.parametrize("coefficients", [(1.0,), (1, 2, 3, 4, math.nan), (1, 2, 3, 4, math.inf), ()])
def test_coefficients_must_be_five_finite_numbers(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="five finite"):
        RuntimeModel(coefficients)


def test_given_coefficients_are_the_start() -> None:
    assert RuntimeModel(TRUE).coefficients == pytest.approx(TRUE)
