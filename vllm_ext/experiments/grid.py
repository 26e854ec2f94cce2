"""Scenes x variants x seeds: what was measured, and what it is over a baseline's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Grid:
    """Metrics of each variant in each scene, one run per seed."""

    cells: Mapping[tuple[str, str], Sequence[Metrics]]
    """Scene and variant -> runs, in the order of their seeds; a variant has the same seeds as its baseline."""

    def values(self, scene: str, variant: str, metric: str) -> list[float]:
        """Return a metric of each seed's run."""
        return [float(metrics[metric]) for metrics in self.cells[scene, variant]]

    def mean(self, scene: str, variant: str, metric: str) -> float:
        """Return a metric's mean over the seeds."""
        return fmean(self.values(scene, variant, metric))

    def over(self, scene: str, variant: str, base: str, metric: str) -> list[float]:
        """Return a metric over the baseline's, seed by seed; a baseline of 0 counts as a billionth."""
        pairs = zip(self.values(scene, variant, metric), self.values(scene, base, metric), strict=True)
        return [ours / max(theirs, 1e-9) for ours, theirs in pairs]

    def means(self, metrics: Mapping[str, Iterable[str]]) -> dict[str, dict[str, float]]:
        """Return, by variant, the means of each scene's metrics as ``SCENE.METRIC``.

        Args:
            metrics: Scene -> its metrics.
        """
        found: dict[str, dict[str, float]] = {}
        for scene, variant in self.cells:
            named = {f"{scene}.{metric}": self.mean(scene, variant, metric) for metric in metrics[scene]}
            found.setdefault(variant, {}).update(named)
        return found


def with_extremes(values: Sequence[float], form: str = ".4g") -> str:
    """Return the mean of seeds with the least and the most, for a table."""
    return f"{fmean(values):{form}} ({min(values):{form}}..{max(values):{form}})"
