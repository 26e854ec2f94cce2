"""Cost model from measurements: a curve over the tokens of a step plus terms linear in the rest."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vllm_ext.observability.files import replaced
from vllm_ext.prediction import profile as profiles
from vllm_ext.simulation.step_shape import StepShape

FORMAT = "vllm-ext step cost 1"
_SHORTEST_S = 1e-6


@dataclass(frozen=True, kw_only=True)
class StepCurve:
    """Coefficients of a step's time, none below 0, so that more work never costs less. Seconds per unit.

    time = base + slopes over knots(tokens) + per_request * requests + per_prefill_token * prefill tokens
         + per_sampled * sampled rows + per_decode_context * decode context + per_prefill_context * prefill context
         + per_pair * prefill pairs + per_decode * decodes + per_chunk_token * tokens of prefill rows

    The last two are the terms of `vllm_ext.prediction.runtime`, in place of those per request and per prefill token.
    """

    base_s: float
    knots: tuple[float, ...] = (0.0,)
    """Tokens of a step where a segment of the curve begins; the first is 0, the last segment has no end."""
    slopes: tuple[float, ...] = (0.0,)
    """Seconds per token within each segment."""
    per_request: float = 0.0
    per_prefill_token: float = 0.0
    """Per token beyond one of each request."""
    per_sampled: float = 0.0
    per_decode_context: float = 0.0
    per_prefill_context: float = 0.0
    per_pair: float = 0.0
    per_decode: float = 0.0
    per_chunk_token: float = 0.0
    """Per token of a prefill row, the first included."""

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name not in ("knots", "slopes")):
            _check_coefficient(name, getattr(self, name))
        for slope in self.slopes:
            _check_coefficient("slopes", slope)
        ascending = all(low < high for low, high in zip(self.knots, self.knots[1:], strict=False))
        if not self.knots or self.knots[0] != 0 or not ascending or not math.isfinite(self.knots[-1]):
            raise ValueError(f"knots={self.knots!r}: must be finite, start at 0 and ascend")
        if len(self.knots) != len(self.slopes):
            raise ValueError(f"slopes={self.slopes!r}: one per knot is needed, {len(self.knots)}")


@dataclass(frozen=True, kw_only=True)
class FitQuality:
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


class Fitted:
    """Cost model over a `StepCurve`. The measured steps are whole steps unless their host time was taken off."""

    def __init__(self, curve: StepCurve, quality: FitQuality | None = None, host_step_s: float = 0.0) -> None:
        self.curve = curve
        self.quality = quality
        self._host_step_s = host_step_s
        at_knot = [curve.base_s]
        for low, high, slope in zip(curve.knots, curve.knots[1:], curve.slopes, strict=False):
            at_knot.append(at_knot[-1] + slope * (high - low))
        self._at_knot = at_knot
        self._linear = len(curve.knots) == 1
        self._coefficients = (curve.per_request, curve.per_prefill_token, curve.per_sampled,
                              curve.per_decode_context, curve.per_prefill_context, curve.per_pair,
                              curve.per_decode, curve.per_chunk_token)  # fmt: skip

    def device_s(self, shape: StepShape) -> float:
        """Return the predicted duration of a step, in seconds."""
        requests, tokens, decodes, sampled, decode_context, prefill_context, pairs = shape
        (per_request, per_prefill, per_sampled, per_decode_context, per_context, per_pair,
         per_decode, per_chunk_token) = self._coefficients  # fmt: skip
        segment = 0 if self._linear else bisect_right(self.curve.knots, tokens) - 1
        time = (
            self._at_knot[segment]
            + self.curve.slopes[segment] * (tokens - self.curve.knots[segment])
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
        return cls(curve, quality, host_step_s)

    def save(self, path: Path) -> None:
        """Write curve and quality atomically; a file that is there is replaced whole or left alone.

        Raises:
            OSError: it can't be written.
        """
        quality = None if self.quality is None else asdict(self.quality)
        text = json.dumps({"format": FORMAT, "curve": asdict(self.curve), "quality": quality}, indent=1)
        with replaced(path) as file:
            file.write(text.encode())

    @classmethod
    def load(cls, path: Path, host_step_s: float = 0.0) -> Fitted:
        """Read a file written by `save` or by ``vllm-ext profile``.

        Raises:
            OSError: there is no such file, or it can't be read.
            ValueError: it is neither, or damaged; the message names file and field. The file is left alone.
        """
        try:
            raw: Any = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: damaged, not a JSON file ({error})") from error
        if not isinstance(raw, dict):
            raise ValueError(f"{path}: holds no step cost and no runtime profile")
        if isinstance(raw.get("format"), int):  # a profile, of whatever version
            return cls.from_profile(profiles.load(path), host_step_s)
        if raw.get("format") != FORMAT:
            raise ValueError(f"{path}: format={raw.get('format')!r}: must be {FORMAT!r}, or a `vllm-ext profile` file")
        try:
            curve = raw["curve"]
            shape = StepCurve(**{**curve, "knots": tuple(curve["knots"]), "slopes": tuple(curve["slopes"])})
            quality = None if raw["quality"] is None else FitQuality(**raw["quality"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: lacks or has a wrong field: {error}") from error
        return cls(shape, quality, host_step_s)


def _check_coefficient(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value!r}: must be a finite number of at least 0")
