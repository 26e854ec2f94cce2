"""Capacity: the highest rate of requests at which constraints hold, found by bisection.

The rate first doubles, or halves, until it has both a rate that meets the constraints and one that does not; then the
bracket is halved on a logarithmic scale down to the tolerance. All runs of a search have the same seed, so that
arrivals differ only by a factor on the time axis (common random numbers) and nearby rates compare fairly.

Bisection takes for granted that constraints met at a rate are met at every lower one. A run is a sample, so near the
capacity that need not be so: a percentile that few requests decide goes up and down with the rate. What is found is *a*
rate at which the answer changes. Hence the whole bracket is reported, with the metrics at both ends and every trial,
and ``probes`` looks at some rates above it; constraints met there again are reported, not followed. Longer runs and
``repeats`` narrow the doubt.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_ext.config.model import Flag
from vllm_ext.report.claim import COMPARISONS

Metrics = Mapping[str, float]
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
_SYNTAX = re.compile(r"\s*([A-Za-z_][^<>=\s]*)\s*(<=|>=|<|>)\s*([^<>=\s]+)\s*")
_DIGITS = 6
"""Significant digits of a rate: the same on every machine, and fit to be read."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A bound on a metric: ``metric op limit``, as `parse` reads it."""

    metric: str
    """Key in the metrics; its unit is part of it."""
    op: str
    """One of ``<=``, ``>=``, ``<``, ``>``."""
    limit: float
    """In the metric's unit; finite."""

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Read a constraint such as ``tbt_p99_ms<=100`` or ``scheduling_delay_p50_s < 2``.

        Raises:
            ValueError: the text is none.
        """
        match = _SYNTAX.fullmatch(text)
        with contextlib.suppress(ValueError):
            if match is not None and math.isfinite(limit := float(match[3])):
                return cls(metric=match[1], op=match[2], limit=limit)
        raise ValueError(
            f"constraint={text!r}: must be a metric, one of {', '.join(COMPARISONS)}, and a finite number, "
            "as in 'tbt_p99_ms<=100'"
        )

    def meets(self, metrics: Mapping[str, float]) -> bool:
        """Whether the metrics of a run keep to the bound; those of a run in which nothing finished never do.

        Raises:
            ValueError: requests finished, but the metrics don't have this one.
        """
        if self.metric in metrics:
            return bool(COMPARISONS[self.op](metrics[self.metric], self.limit))
        if not metrics.get("requests"):
            return False
        near = get_close_matches(self.metric, metrics, n=3) or sorted(metrics)
        raise ValueError(
            f"metric={self.metric!r} of a constraint: the run did not measure it; it has {', '.join(near)}"
        )

    def __str__(self) -> str:
        short = f"{self.limit:g}"
        return f"{self.metric}{self.op}{short if float(short) == self.limit else repr(self.limit)}"


class CapacitySpec(BaseModel):
    """How to search."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    start_per_s: Annotated[float | None, Flag("--start-rate")] = Field(default=None, gt=0)
    """Rate tried first; None: the base description's."""
    min_per_s: Annotated[float, Flag("--min-rate")] = Field(default=0.01, gt=0)
    """Below this rate nobody looks."""
    max_per_s: Annotated[float, Flag("--max-rate")] = Field(default=1000.0, gt=0)
    """Above this rate nobody looks."""
    growth: Annotated[float, Flag()] = Field(default=2.0, gt=1)
    """Factor between rates until there is a bracket."""
    tolerance: Annotated[float, Flag()] = Field(default=0.05, ge=1e-3)
    """The bracket's ends differ by this share of the lower one at most."""
    probes: Annotated[int, Flag()] = Field(default=0, ge=0)
    """Rates tried above the bracket, each higher by the tolerance or 5 %, whichever is more."""

    @model_validator(mode="after")
    def _ordered(self) -> CapacitySpec:
        if not self.min_per_s < self.max_per_s:
            raise ValueError(f"min_per_s={self.min_per_s!r}: must be below max_per_s={self.max_per_s!r}")
        return self


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One rate that was tried."""

    rate_per_s: float
    metrics: Metrics
    violated: tuple[str, ...]
    """Constraints that do not hold; none: the rate is sustained."""


class Found(Enum):
    """How a search ended."""

    BRACKET = "found"
    """The capacity lies between two rates."""
    NEVER_MET = "never met"
    """Not even the lowest rate meets the constraints."""
    ALWAYS_MET = "always met"
    """Even the highest rate meets them: the capacity is not below it."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Where a search ended."""

    found: Found
    lower: Trial | None
    """The highest rate tried at which the constraints held; None if never."""
    upper: Trial | None
    """The lowest rate tried above it, at which they did not hold; None if always met."""
    trials: tuple[Trial, ...]
    """All rates in the order they were tried."""

    @property
    def rate_per_s(self) -> float | None:
        """The capacity in requests/s: the lower end of the bracket; None if the constraints were never met."""
        return None if self.lower is None else self.lower.rate_per_s

    @property
    def met_above(self) -> tuple[float, ...]:
        """Rates above the bracket at which the constraints held again: there is more noise than tolerance."""
        if self.upper is None:
            return ()
        above = (t.rate_per_s for t in self.trials if t.rate_per_s > self.upper.rate_per_s and not t.violated)
        return tuple(sorted(above))


def search(
    settings: CapacitySpec,
    start_per_s: float,
    violated: Callable[[Metrics], Sequence[str]],
    run: Callable[[float], Generator[Asked, Answer, Metrics]],
) -> Generator[Asked, Answer, Capacity]:
    """Search the capacity; yields what the runs ask for, and returns what was found.

    Args:
        settings: How to search; its ``start_per_s`` wins over the other.
        start_per_s: Rate tried first; moved between the limits if it lies outside.
        violated: Returns the constraints that metrics do not meet.
        run: Runs at a rate; what it raises, if the run failed, ends the search.
    """
    trials: list[Trial] = []
    lower = upper = None

    def attempt(rate: float) -> Generator[Asked, Answer, Trial]:
        metrics = yield from run(rate)
        trials.append(Trial(rate_per_s=rate, metrics=metrics, violated=tuple(violated(metrics))))
        return trials[-1]

    rate = min(max(settings.start_per_s or start_per_s, settings.min_per_s), settings.max_per_s)
    while lower is None or upper is None:
        trial = yield from attempt(rate)
        if trial.violated:
            upper = trial
            if rate <= settings.min_per_s:
                break
            rate = max(_rounded(rate / settings.growth), settings.min_per_s)
        else:
            lower = trial
            if rate >= settings.max_per_s:
                break
            rate = min(_rounded(rate * settings.growth), settings.max_per_s)
    if lower is None or upper is None:
        found = Found.NEVER_MET if lower is None else Found.ALWAYS_MET
        return Capacity(found=found, lower=lower, upper=upper, trials=tuple(trials))

    while upper.rate_per_s > lower.rate_per_s * (1 + settings.tolerance):
        trial = yield from attempt(_rounded(math.sqrt(lower.rate_per_s * upper.rate_per_s)))
        lower, upper = (lower, trial) if trial.violated else (trial, upper)

    tried = {trial.rate_per_s for trial in trials}
    for number in range(1, settings.probes + 1):
        rate = _rounded(upper.rate_per_s * (1 + max(settings.tolerance, 0.05)) ** number)
        if rate not in tried and rate <= settings.max_per_s:
            yield from attempt(rate)
    return Capacity(found=Found.BRACKET, lower=lower, upper=upper, trials=tuple(trials))


def expected_runs(settings: CapacitySpec) -> int:
    """Return about how many runs a search takes, for progress bars: two until there is a bracket, then the halving."""
    halvings = math.log2(math.log(settings.growth) / math.log1p(settings.tolerance))
    return 2 + max(0, math.ceil(halvings)) + settings.probes


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")
