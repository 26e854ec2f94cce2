"""Fitted costs: recover what generated the steps, stay monotone, survive outliers, and say what a file lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.simulation.cost.fitted import FitQuality, Fitted, StepCurve, fit_steps
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.step_time import profile as profiles
from vllm_ext.step_time.runtime import RuntimeModel, StepFeatures

CURVE = StepCurve(
    base_s=2e-3, knots=(0.0, 8.0, 64.0), slopes=(1e-3, 1e-4, 3e-4), per_request=1e-5, per_decode_context=1e-7,
    per_pair=1e-9,
)  # fmt: skip


def steps(count: int, seed: int = 1) -> list[StepShape]:
    """Decode batches of many sizes, every third with a chunk."""
    rng = np.random.default_rng(seed)
    shapes = []
    for index in range(count):
        decodes = int(2 ** rng.uniform(0, 8))
        shape = StepShape.of_decodes(decodes, int(rng.uniform(10, 2000)))
        chunk, held = int(rng.integers(1, 500)), int(rng.integers(0, 1000))
        shapes.append(shape if index % 3 else shape.plus(StepShape.of_chunk(chunk, held)))
    return shapes


def measured(shapes: list[StepShape], truth: Callable[[StepShape], float], noise: float, seed: int = 2) -> list[float]:
    rng = np.random.default_rng(seed)
    return [truth(shape) * float(np.exp(noise * rng.standard_normal())) for shape in shapes]


def largest_error(fitted: Fitted, truth: Callable[[StepShape], float]) -> float:
    return max(abs(fitted.device_s(s) - truth(s)) / truth(s) for s in steps(200, seed=9))


def test_exact_steps_are_recovered() -> None:
    shapes, truth = steps(400), Fitted(CURVE).device_s
    fitted = fit_steps(shapes, [truth(s) for s in shapes], source="made up")
    assert largest_error(fitted, truth) < 0.01
    assert fitted.quality is not None
    assert (fitted.quality.num_steps, fitted.quality.source) == (400, "made up")
    assert fitted.quality.median_error < 1e-3
    assert fitted.quality.total_ratio == pytest.approx(1, abs=0.01)


def test_a_straight_line_is_kept_where_a_curve_gains_nothing() -> None:
    line = Fitted(StepCurve(base_s=5e-3, slopes=(2e-4,), per_decode_context=1e-7)).device_s
    shapes = steps(400)
    assert fit_steps(shapes, measured(shapes, line, 0.03)).curve.knots == (0.0,)


def test_a_curve_beats_the_line_where_step_time_bends() -> None:
    """Time that jumps after 8 tokens and is flat before: what small batches on a CPU look like."""
    shapes, truth = steps(600), Fitted(CURVE).device_s
    fitted = fit_steps(shapes, measured(shapes, truth, 0.02))
    assert len(fitted.curve.knots) > 1
    assert largest_error(fitted, truth) < 0.06


def test_outliers_do_not_move_the_fit() -> None:
    """One step in ten takes 5 to 50 times as long: a paused process, a compilation."""
    shapes, truth = steps(600), Fitted(CURVE).device_s
    seconds = measured(shapes, truth, 0.02)
    rng = np.random.default_rng(3)
    for index in rng.choice(600, 60, replace=False):
        seconds[index] *= rng.uniform(5, 50)
    fitted = fit_steps(shapes, seconds)
    assert largest_error(fitted, truth) < 0.08
    assert fitted.quality is not None
    assert fitted.quality.median_error < 0.05
    assert fitted.quality.total_ratio > 2  # what the pauses took is not hidden


def test_the_reported_error_is_of_steps_the_fit_has_not_seen() -> None:
    """Every fifth step takes twice as long: only the held-out ones do, so the fit can't know and the error shows it."""
    shapes, truth = steps(300), Fitted(CURVE).device_s
    seconds = [truth(s) * (2 if index % 5 == 0 else 1) for index, s in enumerate(shapes)]
    quality = fit_steps(shapes, seconds).quality
    assert quality is not None
    assert quality.median_error == pytest.approx(0.5, abs=0.01)


def test_held_out_steps_do_not_touch_the_curve_and_fits_are_deterministic() -> None:
    shapes = steps(300)
    seconds = measured(shapes, Fitted(CURVE).device_s, 0.1)
    other = [time * (1.3 if index % 5 == 0 else 1) for index, time in enumerate(seconds)]
    assert fit_steps(shapes, other).curve == fit_steps(shapes, seconds).curve == fit_steps(shapes, seconds).curve


@pytest.mark.parametrize(
    ("count", "seconds", "message"),
    [
        (49, [1.0] * 49, "49 steps were measured, at least 50"),
        (60, [1.0] * 59, "60 shapes but 59 durations"),
        (60, [1.0] * 59 + [0.0], r"seconds\[59\]=0.0: must be finite and greater than 0"),
        (60, [float("nan")] + [1.0] * 59, r"seconds\[0\]=nan"),
    ],
)
def test_steps_that_can_not_be_fitted_are_refused(count: int, seconds: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_steps(steps(count), seconds)


NOISY = fit_steps(steps(300), measured(steps(300), Fitted(CURVE).device_s, 0.5))


@given(
    st.integers(1, 500),
    st.integers(0, 10**6),
    st.integers(0, 100),
    st.integers(0, 10**5),
    st.sampled_from([CURVE, NOISY]),
)
def test_more_work_never_costs_less(
    tokens: int, context: int, more_tokens: int, more_context: int, model: StepCurve | Fitted
) -> None:
    fitted = model if isinstance(model, Fitted) else Fitted(model)
    less = StepShape(1, tokens, 0, 1, context, context, float(context))
    more = StepShape(
        1, tokens + more_tokens, 0, 1, context + more_context, context + more_context, float(context + more_context)
    )
    assert fitted.device_s(more) >= fitted.device_s(less) * (1 - 1e-12)


def test_a_curve_is_its_segments_by_hand() -> None:
    """2 ms + 8 * 1 ms + 56 * 0.1 ms + 36 * 0.3 ms for 100 tokens of one request (10 us)."""
    shape = StepShape(1, 100, 0, 1, 0, 0, 0.0)
    assert Fitted(CURVE).device_s(shape) == pytest.approx(2e-3 + 8e-3 + 5.6e-3 + 10.8e-3 + 1e-5)


def test_a_saved_fit_is_loaded_as_it_was(tmp_path: Path) -> None:
    fitted = Fitted(CURVE, FitQuality(num_steps=100, median_error=0.01, p90_error=0.1, source="m on d"))
    path = tmp_path / "deep" / "cost.json"
    fitted.save(path)
    loaded = Fitted.load(path, host_step_s=1e-3)
    assert (loaded.curve, loaded.quality) == (fitted.curve, fitted.quality)
    assert loaded.host_s(steps(1)[0]) == 1e-3
    assert [p.name for p in path.parent.iterdir()] == ["cost.json"]


def test_a_profile_predicts_as_the_runtime_model_does(tmp_path: Path) -> None:
    profile = profiles.Profile(
        model="org/m", device="D", vllm_version="0.32.0", coefficients=(1e-3, 2e-5, 3e-5, 4e-8, 5e-10), num_steps=100,
        median_error=0.02, p90_error=0.1,
    )  # fmt: skip
    path = tmp_path / "p.json"
    profiles.save(profile, path)
    fitted, model = Fitted.load(path), RuntimeModel(profile.coefficients)
    for shape in steps(50):
        context = shape.decode_context_tokens + shape.prefill_context_tokens
        features = StepFeatures(shape.num_decodes, shape.num_prefill_tokens, context, shape.prefill_pairs)
        assert fitted.device_s(shape) == pytest.approx(model.step_time_s(features))
    assert fitted.quality is not None
    assert fitted.quality.source == "org/m on D, vLLM 0.32.0"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged, not a JSON file"),
        ("[]", "holds no step cost"),
        ('{"format": 99}', "has format 99, this version reads 3"),
        ('{"format": "99"}', "format='99': must be"),
        ('{"format": "vllm-ext step cost 1"}', "lacks or has a wrong field: field 'curve': Field required"),
        ('{"format": 1}', "has format 1, this version reads 3: run `vllm-ext profile` again"),
        ('{"format": 2}', "lacks or has a wrong field"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong_and_left_alone(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"cost\.json.*{message}"):
        Fitted.load(path)
    assert path.read_text(encoding="utf-8") == content


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("base_s", -1.0, r"curve\.base_s': .*greater than or equal to 0 .found -1"),
        ("per_pair", "x", r"curve\.per_pair': .*valid number .found 'x'"),
        ("slopes", [0.1], "slopes=.*one per knot is needed, 3"),
        ("knots", [0.0, 9.0, 9.0], "knots=.*ascend"),
        ("surplus", 1, "surplus"),
    ],
)
def test_a_wrong_field_in_a_file_is_named(field: str, value: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    Fitted(CURVE).save(path)
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["curve"][field] = value
    path.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Fitted.load(path)


def test_constant_costs_are_constant() -> None:
    cost = Fitted.constant(0.5, host_step_s=0.25)
    assert {(cost.device_s(s), cost.host_s(s)) for s in steps(5)} == {(0.5, 0.25)}
