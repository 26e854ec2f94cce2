"""Whether a server is better than another: paired ratios, their intervals, and the noise of an A/A pair beside them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vllm_ext.compare.observed import MEASURES, Measure, Observed, measured
from vllm_ext.report.intervals import Ratio, times_better

Kind = Literal["better", "worse", "same"]
_BLOCKS = 8
"""Of each run: requests that wait in the same queue share its length, so that they are drawn together."""
_PARTS = 10
"""Of prompts and of outputs by length, of whom it is said who pays."""
_PAYS_FROM = 1.05


def ratio(measure: Measure, ours: Sequence[Observed], base: Sequence[Observed], resamples: int = 1000) -> Ratio:
    """Compare two servers that served the same requests, run by run.

    The interval is of a paired bootstrap: blocks of neighbouring requests are drawn with replacement, the same of both
    (Kuensch 1989: what follows each other in a queue is not independent).

    Args:
        measure: What is compared.
        ours: A run for each repeat.
        base: The same requests on the baseline; requests that failed on either side are left out of both.
        resamples: Draws; 0 for the value alone.
    """
    from scipy import stats

    mine, theirs = Observed.joined(ours), Observed.joined(base)
    answered = ~(np.isnan(mine.e2e_s) | np.isnan(theirs.e2e_s))
    ends = np.cumsum([len(run.e2e_s) for run in ours])
    runs = [np.arange(start, end)[answered[start:end]] for start, end in zip([0, *ends], ends, strict=False)]
    blocks = [rows for run in runs for rows in np.array_split(run, _BLOCKS) if len(rows)]
    if not blocks:
        return Ratio(math.nan, 0.0, math.inf)

    def of(drawn: Any) -> float:
        rows = np.concatenate([blocks[int(at)] for at in drawn])
        return times_better(measure.of(mine[rows]), measure.of(theirs[rows]), higher=measure.higher)

    value = of(range(len(blocks)))
    if len(blocks) < 2 or not resamples:
        return Ratio(value, 0.0, math.inf)
    found = stats.bootstrap((np.arange(len(blocks)),), of, n_resamples=resamples, vectorized=False, axis=0,
                            method="percentile", random_state=np.random.default_rng(0))  # fmt: skip
    return Ratio(value, float(found.confidence_interval.low), float(found.confidence_interval.high))


def noise(measure: Measure, again: Sequence[Observed], base: Sequence[Observed]) -> Ratio:
    """Return how far the same server is from itself, and between which ratios it lies by chance.

    Of the repeats' logarithms the mean is known to be 0, so their mean square is the variance, and Student's t has a
    degree of freedom for each: of one repeat next to nothing is known.

    Args:
        measure: What is compared.
        again: A run for each repeat.
        base: The same requests on the same server.
    """
    from scipy import stats

    pairs = zip(again, base, strict=True)
    found = [ratio(measure, [one], [other], resamples=0).value for one, other in pairs]
    logs = [math.log(one) for one in found if 0 < one < math.inf]
    if not logs:
        return Ratio(math.nan, 0.0, math.inf)
    spread = math.sqrt(sum(one * one for one in logs) / len(logs))
    half = min(float(stats.t.ppf(0.975, len(logs))) * spread / math.sqrt(len(logs)), 50.0)
    return Ratio(math.exp(sum(logs) / len(logs)), math.exp(-half), math.exp(half))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is said of a server at a load, by a measure."""

    server: str
    load: float
    measure: str
    ratio: Ratio
    noise: Ratio
    """What the same server twice differed by in the same runs."""

    @property
    def kind(self) -> Kind:
        """``same`` where the interval holds 1, or chance alone gives such a ratio."""
        inside = self.noise.low <= self.ratio.value <= self.noise.high
        if inside or self.ratio.low <= 1 <= self.ratio.high or math.isnan(self.ratio.value):
            return "same"
        return "better" if self.ratio.value > 1 else "worse"


def verdicts(
    server: str, load: float, ours: Sequence[Observed], base: Sequence[Observed], again: Sequence[Observed]
) -> list[Verdict]:
    """Compare a server with the baseline, by every measure that both have.

    Args:
        server: Its name.
        load: At which.
        ours: A run for each repeat.
        base: The same of the baseline.
        again: The same of the baseline's twin.
    """
    names = set(measured(Observed.joined(ours))) & set(measured(Observed.joined(base)))
    return [
        Verdict(server=server, load=load, measure=name, ratio=ratio(one, ours, base), noise=noise(one, again, base))
        for name, one in MEASURES.items()
        if name in names
    ]


def who_pays(
    ours: Sequence[Observed], base: Sequence[Observed], classes: Mapping[str, Sequence[np.ndarray[Any, Any]]]
) -> Iterator[str]:
    """Yield a line for each part of the requests whose mean end-to-end latency is longer by more than a twentieth.

    Args:
        ours: A run for each repeat.
        base: The same requests on the baseline.
        classes: Further parts by name, such as tenants: for each run which rows belong to it.
    """
    mine, theirs = Observed.joined(ours), Observed.joined(base)
    answered = ~(np.isnan(mine.e2e_s) | np.isnan(theirs.e2e_s))
    parts = {name: np.concatenate([np.asarray(rows, bool) for rows in runs]) for name, runs in classes.items()}

    def slower(inside: Any) -> float:
        chosen = inside & answered
        return float(mine.e2e_s[chosen].mean() / theirs.e2e_s[chosen].mean()) if chosen.any() else 1.0

    for label, tokens in (("prompts", theirs.prompt_tokens), ("outputs", theirs.output_tokens)):
        edges = np.unique(np.quantile(tokens[answered], np.linspace(0, 1, _PARTS + 1)))
        tenths = [(low, high) for low, high in itertools.pairwise(edges)]
        inside_of = [
            (tokens > low if at else tokens >= low) & (tokens <= high) for at, (low, high) in enumerate(tenths)
        ]
        paying = [slower(inside) > _PAYS_FROM for inside in inside_of]
        for pays, run in itertools.groupby(range(len(tenths)), key=paying.__getitem__):
            together = [*run]
            if pays and len(together) < len(tenths):  # else everybody does, which the mean says
                low, high = tenths[together[0]][0], tenths[together[-1]][1]
                parts[f"{label} of {low:.0f} to {high:.0f} tokens"] = np.any([inside_of[at] for at in together], axis=0)
    for name, inside in parts.items():
        if (found := slower(inside)) > _PAYS_FROM:
            yield f"{name}: mean end-to-end latency {found:.2f} times as long"
