"""Goals of `engine_compare.py` that compare a variant (engine_variants.py) with another row of the same repeat.

A part of engine_compare.py: it is run from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from engine_report import NORMALISED, Cell

from vllm_ext.observability.results import Goal

TOKENS = "throughput_tokens_per_s"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A goal: what a row's metric is, relative to another row's in the same repeat."""

    row: str
    other: str
    metric: str
    op: str
    goal: float

    @property
    def name(self) -> str:
        """Part of the goal's name."""
        return f"{self.metric}_over_{self.other.replace(':', '_').replace('-', '_')}"


PAIRS = (
    Pair(row="alise:swap-8", other="alise:defer", metric=NORMALISED, op="<=", goal=1.0),
    Pair(row="alise:swap-8", other="alise:recompute", metric=NORMALISED, op="<=", goal=1.0),
    Pair(row="alise:cost-8", other="alise:defer", metric=NORMALISED, op="<=", goal=1.0),
    Pair(row="alise:swap-8-ahead", other="alise:defer", metric=NORMALISED, op="<=", goal=1.0),
    Pair(row="alise:swap-8-ahead", other="alise:recompute", metric=NORMALISED, op="<=", goal=1.0),
    Pair(row="alise:cost-8-ahead", other="alise:defer", metric=NORMALISED, op="<=", goal=1.0),
    Pair(row="fcfs:tier-early", other="fcfs", metric=TOKENS, op=">=", goal=0.99),
    Pair(row="fcfs:tier-late", other="fcfs", metric=TOKENS, op=">=", goal=0.99),
    Pair(row="fcfs:tier-ahead", other="fcfs", metric=TOKENS, op=">=", goal=0.99),
)


def goals(cells: Sequence[Cell], note: str) -> list[Goal]:
    """Return the goals of `PAIRS` whose two rows were measured, for each load; the median over repeats."""
    found = {(cell.system, cell.load, cell.repeat): cell.metrics for cell in cells}
    judged = []
    for load in dict.fromkeys(cell.load for cell in cells):
        for pair in PAIRS:
            ratios = [
                metrics[pair.metric] / other[pair.metric]
                for (system, at, repeat), metrics in found.items()
                if (system, at) == (pair.row, load) and (other := found.get((pair.other, load, repeat)))
            ]
            if ratios:
                spread = f"ratio over repeats {min(ratios):.3f} to {max(ratios):.3f}"
                judged.append(
                    Goal(
                        metric=f"{pair.row}.load_{load:g}.{pair.name}",
                        value=median(ratios),
                        op=pair.op,
                        goal=pair.goal,
                        note=f"{note} {spread}".strip(),
                    )
                )
    return judged
