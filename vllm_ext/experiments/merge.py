"""Findings of one experiment made one: of several seeds, and of drawn and of real lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from vllm_ext.experiments.experiment import Findings
from vllm_ext.report.claim import Claim, PaperClaim
from vllm_ext.report.intervals import half_width

_LEAST_FOR_STUDENT = 3
"""Two values give an interval of 13 times their spread, which every figure would lie in: they are told as they are."""
_REAL = ", real lengths"
REAL_LENGTHS = "real_lengths"
"""Of a result's configuration: files whose lengths were served beside the drawn ones."""


def merged(found: Mapping[int, Findings]) -> Findings:
    """Return what several seeds found, as one.

    Figures are means over the seeds, and so are metrics that all have; others are named after the first seed, of which
    tables, pictures and what is said beside a figure are. A paper's figure gets Student's 95 % interval, of two seeds
    both values.

    Args:
        found: By seed, at least one, of the same experiment.
    """
    (seed, first), others = next(iter(found.items())), [*found.values()][1:]
    if not others:
        return first
    every = [first, *others]
    rows = {name: [one.baselines.get(name, {}) for one in every] for name in first.baselines}
    return replace(
        first,
        metrics=_means([one.metrics for one in every], seed),
        baselines={name: _means(values, seed) for name, values in rows.items()},
        claims=[_merged(claims) for claims in _by_name(every)],
        config={**first.config, "seeds": [*found]},
        details={**first.details, "by_seed": {str(seed): dict(one.metrics) for seed, one in found.items()}},
        tables=[replace(table, title=f"{table.title}; seed {seed}".removeprefix("; "))
                for table in first.tables],
    )  # fmt: skip


def beside(drawn: Findings, real: Findings, files: Iterable[str]) -> Findings:
    """Return what drawn lengths gave, with tables and claims of the real ones behind it.

    What is equal in both is not repeated: no file has a part in it.

    Args:
        drawn: What is told first.
        real: The same experiment's.
        files: Names of those that were served; none if the experiment serves none of them.
    """
    tables = [replace(table, title=(table.title + _REAL).removeprefix(", "))
              for table in real.tables if table not in drawn.tables]  # fmt: skip
    claims = [replace(claim, name=claim.name + _REAL, headline=False)
              for claim in real.claims if claim not in drawn.claims]  # fmt: skip
    metrics = {f"real lengths: {name}": value
               for name, value in real.metrics.items() if drawn.metrics.get(name) != value}  # fmt: skip
    return replace(
        drawn, tables=[*drawn.tables, *tables], claims=[*drawn.claims, *claims],
        metrics={**drawn.metrics, **metrics}, config={**drawn.config, REAL_LENGTHS: sorted(files)},
    )  # fmt: skip


def _means(of: Sequence[Mapping[str, float]], seed: int) -> dict[str, float]:
    """Return the means of what all seeds have, and what only the first one has, whose number is ``seed``."""
    common = set(of[0]).intersection(*of)
    return {name: fmean(one[name] for one in of) for name in of[0] if name in common} | {
        f"seed {seed}: {name}": value for name, value in of[0].items() if name not in common
    }


def _by_name(every: Sequence[Findings]) -> Iterable[list[Claim]]:
    named = [{claim.name: claim for claim in one.claims} for one in every]
    return ([each[name] for each in named] for name in named[0] if all(name in each for each in named))


def _merged(claims: Sequence[Claim]) -> Claim:
    values = [claim.value for claim in claims]
    middle, first = fmean(values), claims[0]
    if not isinstance(first, PaperClaim):
        return replace(first, value=middle)
    half = half_width(values)
    ends = (middle - half, middle + half) if len(values) >= _LEAST_FOR_STUDENT else (min(values), max(values))
    ours, tuned = ([getattr(claim, name) for claim in claims] for name in ("ours", "tuned"))
    return replace(first, value=middle, interval=ends, ours=_mean(ours), tuned=_mean(tuned))


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of what every seed has."""
    found = [value for value in values if value is not None]
    return fmean(found) if len(found) == len(values) else None
