"""The offline fit: true coefficients despite wild steps, errors by regime, and what the steps could not tell."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from vllm_ext.step_time.fit import fit
from vllm_ext.step_time.runtime import DEFAULT, Coefficients, RuntimeModel, StepFeatures

from .runtime_steps import TRUE, Steps

Measured = list[tuple[StepFeatures, float]]


def profiled(count: int = 2000, *, seed: int = 0, noise: float = 0.05, wild: float = 0.0) -> Measured:
    """Steps of all regimes; a share ``wild`` of them three to thirty times too long or too short."""
    steps = Steps(seed)
    rng = np.random.default_rng(seed + 1000)
    rows = []
    for _ in range(count):
        f = steps.features()
        if f.num_prefill_tokens and rng.random() < 0.4:
            f = f._replace(num_decodes=0)
        factor = math.exp(rng.choice([-1, 1]) * rng.uniform(math.log(3), math.log(30))) if rng.random() < wild else 1.0
        rows.append((f, steps.noisy(f, noise) * factor))
    return rows


def plain(steps: Measured) -> Coefficients:
    """Non-negative least squares on relative errors, the fit that was here before."""
    scale = np.array([1.0, 1e2, 1e3, 1e5, 1e6])
    features = np.array([(1.0, *f) / scale / d for f, d in steps])
    return Coefficients(*(nnls(features, np.ones(len(steps)))[0] / scale).tolist())


def off(found: Sequence[float]) -> float:
    """Largest relative error of a coefficient."""
    return max(abs(f / t - 1) for f, t in zip(found, TRUE, strict=True))


def test_without_noise_the_coefficients_are_exact() -> None:
    result = fit(profiled(200, noise=0.0))
    assert result.coefficients == pytest.approx(TRUE, rel=1e-3)
    assert result.p90_error < 1e-3


@pytest.mark.parametrize("wild", [0.05, 0.1])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_wild_steps_do_not_move_the_coefficients_as_they_move_plain_least_squares(wild: float, seed: int) -> None:
    steps = profiled(seed=seed, wild=wild)
    assert off(fit(steps).coefficients) < 0.08
    assert off(plain(steps)) > 0.4


@pytest.mark.parametrize("factor", [0.05, 3.0, 1000.0])
def test_wild_steps_to_one_side_do_not_move_the_coefficients(factor: float) -> None:
    steps = [(f, d * (factor if i % 11 == 0 else 1)) for i, (f, d) in enumerate(profiled())]
    assert off(fit(steps).coefficients) < 0.08


def test_a_few_prefills_that_fit_badly_are_no_outliers() -> None:
    """All 40 prefills of a profile take half longer or shorter than a straight line says; they still set its slope."""
    steps: Measured = [(f._replace(num_prefill_tokens=0, prefill_context=0.0), 0.0) for f, _ in profiled(2000)]
    steps = [(f, Steps().duration(f) * (1 + 0.01 * (-1) ** i)) for i, (f, _) in enumerate(steps)]
    for i in range(40):
        f = StepFeatures(0, 1000 + 100 * i, 1000 + 100 * i, 0.0)
        steps.insert(50 * i + 1, (f, Steps().duration(f) * (1.5 if i % 2 else 0.67)))
    assert fit(steps).coefficients.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.2)


def test_the_errors_are_those_of_the_steps_held_out() -> None:
    steps = profiled(noise=0.1, wild=0.05)
    result = fit(steps)
    model = RuntimeModel(result.coefficients)
    errors = [abs(model.step_time_s(f) - d) / d for f, d in steps[::5]]
    assert result.num_steps == len(steps)
    assert result.median_error == pytest.approx(float(np.median(errors)))
    assert result.p90_error == pytest.approx(float(np.quantile(errors, 0.9)))


def test_errors_are_told_by_kind_of_step() -> None:
    """Prefills that take twice what the rest says: their own error shows it, the median of all would hide it."""
    steps = []
    for f, d in profiled(noise=0.01):
        prefill_only = f.num_prefill_tokens and not f.num_decodes
        steps.append((f, d * (2 if prefill_only and f.num_prefill_tokens < 700 else 1)))
    result = fit(steps)
    by_name = {regime.name: regime for regime in result.regimes}
    assert list(by_name) == ["decode", "prefill", "mixed"]
    held = [f for f, _ in steps[::5]]
    assert by_name["decode"].num_steps == sum(not f.num_prefill_tokens for f in held)
    assert by_name["mixed"].num_steps == sum(f.num_prefill_tokens > 0 and f.num_decodes > 0 for f in held)
    assert sum(regime.num_steps for regime in result.regimes) == len(held)
    assert by_name["decode"].median_error < 0.03
    assert by_name["prefill"].p90_error > 0.3
    assert result.median_error < 0.03


def test_a_full_profile_determines_every_coefficient() -> None:
    terms = fit(profiled()).terms
    assert [term.name for term in terms] == list(Coefficients._fields)
    assert [term.name for term in terms if not term.determined] == []
    assert terms[0].num_steps == 1600, "four fifths of all steps have the base"


def test_a_term_that_no_step_has_keeps_its_default_and_is_told() -> None:
    steps = [(f._replace(num_prefill_tokens=0, prefill_context=0.0), d) for f, d in profiled()]
    result = fit([(f, Steps().duration(f)) for f, _ in steps])
    told = {term.name: (term.num_steps, term.determined) for term in result.terms}
    assert told["prefill_token_s"] == told["pair_s"] == (0, False)
    assert told["decode_s"][1] is True
    assert result.coefficients.prefill_token_s == DEFAULT.prefill_token_s
    assert result.coefficients.decode_s == pytest.approx(TRUE.decode_s, rel=0.01)


def test_terms_that_only_come_together_are_not_determined() -> None:
    """Every request has 500 tokens: nothing tells the price of a request from that of its context."""
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(500):
        f = StepFeatures(n := int(rng.integers(1, 64)), 0, 500 * n)
        steps.append((f, Steps().duration(f) * math.exp(0.03 * rng.standard_normal())))
    told = {term.name: term.determined for term in fit(steps).terms}
    assert (told["base_s"], told["decode_s"], told["context_token_s"]) == (True, False, False)


def test_a_term_of_a_handful_of_steps_is_not_determined() -> None:
    steps = [(f._replace(num_prefill_tokens=0, prefill_context=0.0), 0.0) for f, _ in profiled(500)]
    steps[1] = (StepFeatures(4, 512, 4096, 512 * 256.0), 0.0)
    told = {term.name: term for term in fit([(f, Steps().duration(f)) for f, _ in steps]).terms}
    assert told["prefill_token_s"].num_steps == 1
    assert not told["prefill_token_s"].determined


@given(st.integers(0, 1000), st.floats(0, 1), st.floats(1e-6, 1e3))
def test_the_fit_is_finite_and_never_negative(seed: int, wild: float, scale: float) -> None:
    result = fit([(f, d * scale) for f, d in profiled(60, seed=seed, wild=wild)])
    assert all(math.isfinite(c) and c >= 0 for c in result.coefficients)
    assert all(math.isfinite(term.uncertainty) and term.uncertainty >= 0 for term in result.terms)
    assert math.isfinite(result.p90_error)


@given(st.floats(1e-3, 1e3))
def test_a_machine_of_another_speed_has_coefficients_of_that_speed(scale: float) -> None:
    steps = profiled(300)
    base = fit(steps).coefficients
    scaled = fit([(f, d * scale) for f, d in steps]).coefficients
    assert scaled == pytest.approx([scale * c for c in base], rel=1e-3)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="49 steps were measured, at least 50"):
        fit(profiled(49))


@pytest.mark.parametrize("duration", [0.0, -1.0, math.nan, math.inf])
def test_a_duration_that_is_none_is_refused(duration: float) -> None:
    steps = profiled(60)
    steps[7] = (steps[7][0], duration)
    with pytest.raises(ValueError, match=r"seconds\[7\]=.*finite and greater than 0"):
        fit(steps)
