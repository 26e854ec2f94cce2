"""Cost model from measurements: a curve over the tokens of a step plus terms linear in the rest, and its fit.

The fit is non-negative, to relative errors, robust, and checked on steps that were held out.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from vllm_ext.config.model import first_problem
from vllm_ext.files import replaced
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.step_time import profile as profiles
from vllm_ext.step_time.least_squares import FOLDS, checked, robust
from vllm_ext.step_time.step_record import Record, is_record

FORMAT: Literal["vllm-ext step cost 1"] = "vllm-ext step cost 1"
_SHORTEST_S = 1e-6
_MIN_STEPS_PER_KNOT = 10
_ROUNDS = 8
_GAIN = 0.98
"""A curve must lower the validation error to this share of the straight line's to be taken."""

_Vector = NDArray[np.float64]
_Price = Annotated[FiniteFloat, Field(ge=0)]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StepCurve(_Data):
    """Coefficients of a step's time, none below 0, so that more work never costs less. Seconds per unit.

    time = base + slopes over knots(tokens) + per_request * requests + per_prefill_token * prefill tokens
         + per_sampled * sampled rows + per_decode_context * decode context + per_prefill_context * prefill context
         + per_pair * prefill pairs + per_decode * decodes + per_chunk_token * tokens of prefill rows

    The last two are the terms of `vllm_ext.step_time.runtime`, in place of those per request and per prefill token.
    """

    base_s: _Price
    knots: tuple[FiniteFloat, ...] = (0.0,)
    """Tokens of a step where a segment of the curve begins; the first is 0, the last segment has no end."""
    slopes: tuple[_Price, ...] = (0.0,)
    """Seconds per token within each segment."""
    per_request: _Price = 0.0
    per_prefill_token: _Price = 0.0
    """Per token beyond one of each request."""
    per_sampled: _Price = 0.0
    per_decode_context: _Price = 0.0
    per_prefill_context: _Price = 0.0
    per_pair: _Price = 0.0
    per_decode: _Price = 0.0
    per_chunk_token: _Price = 0.0
    """Per token of a prefill row, the first included."""

    @model_validator(mode="after")
    def _segments_are_a_curve(self) -> StepCurve:
        ascending = all(low < high for low, high in zip(self.knots, self.knots[1:], strict=False))
        if not self.knots or self.knots[0] != 0 or not ascending:
            raise ValueError(f"knots={self.knots!r}: must be finite, start at 0 and ascend")
        if len(self.knots) != len(self.slopes):
            raise ValueError(f"slopes={self.slopes!r}: one per knot is needed, {len(self.knots)}")
        return self


_LINEAR = tuple(name for name in StepCurve.model_fields if name not in ("base_s", "knots", "slopes"))
_FITTED = _LINEAR[:-2]


class FitQuality(_Data):
    """How a curve was fitted."""

    num_steps: int
    """Steps measured, those held out included."""
    median_error: float
    """Median of |predicted - measured| / measured over steps that were not fitted."""
    p90_error: float
    total_ratio: float = 1.0
    """Measured over predicted time of all those steps: above 1, what pauses add, which a robust fit leaves out."""
    source: str = ""
    """Model, device and run, for reports."""


class _File(_Data):
    format: Literal["vllm-ext step cost 1"] = FORMAT
    curve: StepCurve
    quality: FitQuality | None


class Fitted:
    """Cost model over a `StepCurve`. The measured steps are whole steps unless their host time was taken off."""

    def __init__(self, curve: StepCurve, quality: FitQuality | None = None, host_step_s: float = 0.0) -> None:
        self.curve = curve
        self.quality = quality
        self.engine = profiles.EngineKey()
        """What was measured, as far as it is known."""
        self.notes: list[str] = []
        """What is wrong with the measurement, a part of a line each."""
        self._host_step_s = host_step_s
        at_knot = [curve.base_s]
        for low, high, slope in zip(curve.knots, curve.knots[1:], curve.slopes, strict=False):
            at_knot.append(at_knot[-1] + slope * (high - low))
        self._segments = list(zip(at_knot, curve.slopes, curve.knots, strict=True))
        self._coefficients = [getattr(curve, name) for name in _LINEAR]

    def device_s(self, shape: StepShape) -> float:
        """Return the predicted duration of a step, in seconds."""
        requests, tokens, decodes, sampled, decode_context, prefill_context, pairs = shape
        (per_request, per_prefill, per_sampled, per_decode_context, per_context, per_pair,
         per_decode, per_chunk_token) = self._coefficients  # fmt: skip
        segments = self._segments
        segment = 0 if len(segments) == 1 else bisect_right(self.curve.knots, tokens) - 1
        at_knot, slope, knot = segments[segment]
        time = (
            at_knot
            + slope * (tokens - knot)
            + per_request * requests
            + per_prefill * (tokens - requests)
            + per_sampled * sampled
            + per_decode_context * decode_context
            + per_context * prefill_context
            + per_pair * pairs
            + per_decode * decodes
            + per_chunk_token * (tokens - decodes)
        )
        return time if time > _SHORTEST_S else _SHORTEST_S

    def host_s(self, shape: StepShape) -> float:  # noqa: ARG002 - as any cost model's
        """Return the engine core's own time per step beside what was fitted, in seconds."""
        return self._host_step_s

    @classmethod
    def constant(cls, step_s: float, host_step_s: float = 0.0) -> Fitted:
        """A server whose steps all take equally long: queueing theory knows its waiting times."""
        return cls(StepCurve(base_s=step_s), host_step_s=host_step_s)

    @classmethod
    def from_profile(cls, profile: profiles.Profile, host_step_s: float = 0.0) -> Fitted:
        """Build from what ``vllm-ext profile`` measured. Its steps are whole steps of a synchronous engine.

        The profile counts a chunk's pairs without half a chunk's diagonal, which is below what its fit resolves.
        """
        price = profile.coefficients
        curve = StepCurve(
            base_s=price.base_s,
            per_decode=price.decode_s,
            per_chunk_token=price.prefill_token_s,
            per_decode_context=price.context_token_s,
            per_prefill_context=price.context_token_s,
            per_pair=price.pair_s,
        )
        quality = FitQuality(
            num_steps=profile.num_steps,
            median_error=profile.median_error,
            p90_error=profile.p90_error,
            source=f"{profile.model} on {profile.device}, vLLM {profile.vllm_version}",
        )
        made = cls(curve, quality, host_step_s)
        made.engine = profile.key
        absent = [term.name for term in profile.terms if not term.num_steps]
        unsure = [term.name for term in profile.terms if term.num_steps and not term.determined]
        made.notes += [f"no steps tell {', '.join(absent)}: defaults are taken"] if absent else []
        made.notes += [f"too few or too like steps tell {', '.join(unsure)}"] if unsure else []
        return made

    def save(self, path: Path) -> None:
        """Write curve and quality atomically; a file that is there is replaced whole or left alone.

        Raises:
            OSError: it can't be written.
        """
        with replaced(path) as file:
            file.write(_File(curve=self.curve, quality=self.quality).model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, path: Path, host_step_s: float = 0.0) -> Fitted:
        """Read a file written by `save` or by ``vllm-ext profile``, or fit the steps that ``--ext-step-record`` wrote.

        Raises:
            OSError: there is no such file, or it can't be read.
            ValueError: it is neither, or damaged; the message names file and field. The file is left alone.
        """
        try:
            text = path.read_text(encoding="utf-8")
            if is_record(text):
                record = Record.read(path)
                made = cls.from_profile(record.profile(), host_step_s)
                made.notes += record.notes()
                return made
            raw: Any = json.loads(text)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: damaged, not a JSON file ({error})") from error
        if not isinstance(raw, dict):
            raise ValueError(f"{path}: holds no step cost and no runtime profile")
        if isinstance(raw.get("format"), int):  # a profile, of whatever version
            return cls.from_profile(profiles.load(path), host_step_s)
        if raw.get("format") != FORMAT:
            raise ValueError(f"{path}: format={raw.get('format')!r}: must be {FORMAT!r}, or a `vllm-ext profile` file")
        try:
            found = _File.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(f"{path}: lacks or has a wrong field: {first_problem(error)}") from error
        return cls(found.curve, found.quality, host_step_s)


def fit_steps(shapes: Sequence[StepShape], seconds: Sequence[float], source: str = "") -> Fitted:
    """Fit a cost model to recorded steps.

    Every fifth step is held out for the errors that are reported, every fifth of another phase for the choice between a
    straight line and a curve over the tokens of a step (knots at powers of two); the choice is then fitted to all but
    the first. Steps far off, such as a paused process, weigh less and less.

    Args:
        shapes: The steps.
        seconds: What each took, in seconds.
        source: Model, device and run, for reports.

    Raises:
        ValueError: too few steps, lengths that differ, or a duration that is not finite and positive.

    Source: ALISE, eqs. 3-5; non-negative least squares because no term of a step can take less than no time.
    """
    if len(shapes) != len(seconds):
        raise ValueError(f"{len(shapes)} shapes but {len(seconds)} durations: each step needs both")
    durations = checked(seconds)
    work = np.asarray(shapes, dtype=np.float64)  # [steps, 7]
    fold = np.arange(len(work)) % FOLDS
    knots = _choose_knots(work[fold > 0], durations[fold > 0], fold[fold > 0] == 1)
    found = _fit(work[fold > 0], durations[fold > 0], knots)
    measured, predicted = durations[fold == 0], _features(work[fold == 0], knots) @ found
    errors = np.abs(predicted - measured) / measured
    quality = FitQuality(
        num_steps=len(work),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        total_ratio=float(measured.sum() / max(predicted.sum(), 1e-12)),
        source=source,
    )
    base_s, *others = map(float, found)
    slopes, linear = tuple(others[: len(knots)]), others[len(knots) :]
    curve = StepCurve(base_s=base_s, knots=knots, slopes=slopes, **dict(zip(_FITTED, linear, strict=True)))
    return Fitted(curve, quality)


def _choose_knots(work: _Vector, durations: _Vector, validation: NDArray[np.bool_]) -> tuple[float, ...]:
    """Return the knots of the curve, or of a straight line if the curve does not predict the validation steps better.

    Compared by mean error with the worst tenth cut off: a median alone would not see what a tail of large steps gains.
    """
    train, check = ~validation, validation
    straight, bent = (0.0,), _knots(work[train, 1])

    def error(knots: tuple[float, ...]) -> float:
        predicted = _features(work[check], knots) @ _fit(work[train], durations[train], knots)
        errors = np.sort(np.abs(predicted - durations[check]) / durations[check])
        return float(errors[: max(1, int(0.9 * len(errors)))].mean())

    if len(bent) == 1:
        return straight
    return bent if error(bent) < _GAIN * error(straight) else straight


def _knots(tokens: _Vector) -> tuple[float, ...]:
    """Return 0 and the powers of two that split the steps so that enough of them lie in every segment."""
    knots = [0.0]
    power = 1.0
    while power < tokens.max():
        inside = np.count_nonzero((tokens > knots[-1]) & (tokens <= power))
        if inside >= _MIN_STEPS_PER_KNOT and np.count_nonzero(tokens > power) >= _MIN_STEPS_PER_KNOT:
            knots.append(power)
        power *= 2
    return tuple(knots)


def _fit(work: _Vector, durations: _Vector, knots: tuple[float, ...]) -> _Vector:
    """Return one coefficient per feature, in seconds."""
    one_kind = np.zeros(len(work), dtype=np.int64)
    return robust(_features(work, knots), durations, one_kind, huber_rounds=_ROUNDS).theta


def _features(work: _Vector, knots: tuple[float, ...]) -> _Vector:
    """Return the terms of `StepCurve` that are fitted, shape [steps, 7 + knots].

    Each segment's column is the tokens within it.
    """
    requests, tokens, _, sampled, decode_context, prefill_context, pairs = work.T
    ends = (*knots[1:], np.inf)
    segments = [np.clip(tokens, low, high) - low for low, high in zip(knots, ends, strict=True)]
    rest = [requests, tokens - requests, sampled, decode_context, prefill_context, pairs]
    return np.stack([np.ones_like(tokens), *segments, *rest], axis=1)
