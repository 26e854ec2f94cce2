"""Ratios to vLLM with their intervals, and what the goals make of them. A part of ordering.py."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean

from ordering_scenes import ANOTHERS, MEASURES, PREDICTED, TUNED, Measure, Scene

from vllm_ext.report.claim import Claim
from vllm_ext.report.intervals import Compared, interval
from vllm_ext.report.table import Table

Cells = Mapping[tuple[str, float, str, int], Mapping[str, float]]
"""Workload, load, system and seed -> metrics."""
_BY_NAME = {measure.name: measure for measure in MEASURES}
_JUDGED = ("alise", "alise, lengths within 30 %", PREDICTED, ANOTHERS, "auto", "auto, predicted")
_E2E_LEAST = {"chat": 1.7, "alpaca": 1.15, "azure": 1.3}
_POINTS = {1.0: 20.0, 1.1: 30.0}
_FLOORS = {"mean e2e": 0.98, "mean TTFT": 0.98, "longest gap": 0.98, "mean normalised": 0.97}
_TAIL_WORSE, _TAIL_WORSE_AT_1 = 1.1, 1.5


Found = Mapping[tuple[str, float, str, str], Compared]
"""Workload, load, system and name of the measure."""


def kind(name: str) -> str:
    """Return how a measure is compared: by the ``ratio``, or by the difference in ``points``."""
    return "points" if _BY_NAME[name].points else "ratio"


def _one(measure: Measure, ours: float, tuned: float) -> float:
    """Return the difference in points, or the logarithm of the ratio."""
    if measure.points:
        return 100 * (ours - tuned)
    ratio = math.log((tuned + measure.floor) / (ours + measure.floor))
    return -ratio if measure.higher else ratio


def compare(cells: Cells) -> dict[tuple[str, float, str, str], Compared]:
    """Return every measure of every system but vLLM."""
    pairs: dict[tuple[str, float, str, str], list[float]] = defaultdict(list)
    for (workload, load, system, seed), metrics in cells.items():
        if system != TUNED:
            tuned = cells[workload, load, TUNED, seed]
            for one in MEASURES:
                pairs[workload, load, system, one.name].append(_one(one, metrics[one.metric], tuned[one.metric]))
    return {key: interval(found, points=_BY_NAME[key[3]].points) for key, found in pairs.items()}


def means(found: Found) -> dict[tuple[float, str, str], float]:
    """Return geometric means (of points: means) over the workloads, by load, system and measure."""
    groups: dict[tuple[float, str, str], list[float]] = defaultdict(list)
    for (_, load, system, name), one in found.items():
        groups[load, system, name].append(one.value if _BY_NAME[name].points else math.log(one.value))
    return {key: mean(v) if _BY_NAME[key[2]].points else math.exp(mean(v)) for key, v in groups.items()}


def tables(found: Found, over: Mapping[tuple[float, str, str], float], systems: Sequence[str]) -> list[str]:
    """Return a table per cell with intervals, and one per load of the means over workloads."""
    texts = []
    for workload, load in dict.fromkeys(key[:2] for key in found):
        rows: list[list[object]] = [
            [one.name, *(_shown(found[workload, load, system, one.name]) for system in systems)] for one in MEASURES
        ]
        texts.append(f"\n{workload} at {load:g}, x tuned, above 1 is better\n{Table(['', *systems], rows)}")
    for load in dict.fromkeys(key[0] for key in over):
        rows = [[one.name, *(over[load, system, one.name] for system in systems)] for one in MEASURES]
        texts.append(f"\nall workloads at {load:g}, geometric mean\n{Table(['', *systems], rows)}")
    return texts


def _shown(one: Compared) -> str:
    return f"{one.value:.3g}" if one.low == one.high else f"{one.value:.3g} [{one.low:.3g}, {one.high:.3g}]"


def worst(found: Found, systems: Sequence[str]) -> str:
    """Return a table of the worst cell of each system in what has a floor."""
    rows = []
    for system in systems:
        row: list[object] = [system]
        for name in _FLOORS:
            value, workload, load = _least(found, system, name)
            row.append(f"{value:.3g} ({workload} at {load:g})")
        rows.append(row)
    return f"\nworst cells\n{Table(['system', *_FLOORS], rows)}"


def _least(found: Found, system: str, name: str) -> tuple[float, str, float]:
    return min((one.value, key[0], key[1]) for key, one in found.items() if key[2:] == (system, name))


def claims(found: Found, scenes: Mapping[str, Scene]) -> list[Claim]:
    """Hold what ships to its goals, as far as the cells were measured.

    The goals in the mean are of the real predictor's lengths; without one they judge what history alone gives.
    """
    wanted: list[Claim] = []

    def hold(metric: str, value: float, least: float) -> None:
        note = "" if value >= least else f"missed by {least - value:.3g}"
        wanted.append(Claim(name=metric, value=round(value, 4), op=">=", goal=least, facts=note))

    for system in _JUDGED:
        cells = {key: one.value for key, one in found.items() if key[2] == system}
        if not cells:
            continue
        for (workload, load, _, name), value in cells.items():
            group = scenes[workload].group
            if (load, name) == (1.0, "mean e2e") and group in _E2E_LEAST:
                hold(f"{system}, {workload} at 1: mean e2e, x tuned", value, _E2E_LEAST[group])
        for load, points in _POINTS.items():
            on_time = [v for key, v in cells.items() if key[1] == load and key[3] == "share on time"]
            if on_time:
                hold(f"{system} at {load:g}: share on time, points more than tuned", mean(on_time), points)
        for name, least in _FLOORS.items():
            value, workload, load = _least(found, system, name)
            hold(f"{system}: worst cell of {name}, x tuned ({workload} at {load:g})", value, least)
        tails = {key: v for key, v in cells.items() if key[3] == "P99 e2e"}
        early = [v for key, v in tails.items() if key[1] <= 0.9]
        at_1 = [math.log(v) for key, v in tails.items() if key[1] == 1.0]
        if early:
            hold(f"{system} up to 0.9: worst P99 e2e, x tuned", min(early), round(1 / _TAIL_WORSE, 4))
        if at_1:
            hold(
                f"{system} at 1: P99 e2e, geometric mean x tuned", math.exp(mean(at_1)), round(1 / _TAIL_WORSE_AT_1, 4)
            )
    return wanted
