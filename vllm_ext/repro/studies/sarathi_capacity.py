"""Capacity as Sarathi-Serve measures it, and what its Figures 9 and 10 make of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from vllm_ext.repro.bench import Bench, Metrics, RunFailed
from vllm_ext.repro.studies import sarathi as base
from vllm_ext.repro.study import Claim, Findings, Plot
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.capacity import Capacity, CapacitySpec, search

K = TypeVar("K", bound=Hashable)

DELAY_LIMIT_S = 2.0
"""Median scheduling delay above which a load is not sustained (section 5.1)."""


def violated(metrics: Metrics, slo_ms: float) -> list[str]:
    """Return which of the paper's two limits do not hold."""
    limits = {"tbt_p99_ms": slo_ms, "scheduling_delay_p50_s": DELAY_LIMIT_S}
    return [name for name, limit in limits.items() if metrics[name] > limit]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The highest rate at which both limits held."""

    rate_per_s: float
    metrics: Metrics
    """At that rate."""
    limited_by: tuple[str, ...]
    """What did not hold at the next rate tried above it."""


def capacities(
    bench: Bench,
    specs: Mapping[K, Callable[[float], SimulationSpec]],
    slo_ms: Mapping[K, float],
    start_per_s: Mapping[K, float],
    *,
    tolerance: float,
) -> dict[K, Found]:
    """Find the capacity of each; all searches take their steps together, so that their runs are done in parallel.

    Args:
        bench: Runs simulations.
        specs: From a rate to the description of the run.
        slo_ms: Limits of P99 TBT.
        start_per_s: Rates tried first.
        tolerance: Relative width of the last bracket.

    Raises:
        RunFailed: a simulation raised, or the limits are never met, or always.
    """
    searches: dict[K, Generator[float, Metrics, Capacity]] = {}
    asked: dict[K, float] = {}
    found: dict[K, Found] = {}
    for key, start in start_per_s.items():
        settings = CapacitySpec(start_per_s=start, min_per_s=1e-3, max_per_s=1e3, growth=1.6, tolerance=tolerance)
        searches[key] = search(settings, start, partial(violated, slo_ms=slo_ms[key]))
        asked[key] = next(searches[key])
    while asked:
        measured = bench.metrics({key: specs[key](rate) for key, rate in asked.items()})
        for key, metrics in measured.items():
            base.refuse_fallbacks(metrics, _name(key))
            try:
                asked[key] = searches[key].send(metrics)
            except StopIteration as stop:
                del asked[key]
                found[key] = _bracketed(stop.value, _name(key))
    return {key: found[key] for key in specs}


def _name(key: Hashable) -> str:
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _bracketed(capacity: Capacity, name: str) -> Found:
    lower, upper = capacity.lower, capacity.upper
    if lower is None or upper is None:
        raise RunFailed(f"{name}: the limits are {capacity.found.value} between 0.001 and 1000 requests/s")
    return Found(rate_per_s=lower.rate_per_s, metrics=lower.metrics, limited_by=upper.violated)


class Cell(NamedTuple):
    """One group of bars."""

    model: str
    dataset: str
    slo: str

    def __str__(self) -> str:
        return f"{self.model} {self.dataset} {self.slo}"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A ratio of capacities that the paper states."""

    paper: float
    model: str
    over: str
    """The system below the line."""
    dataset: str | None = None
    """None: the largest over both."""
    slos: tuple[str, ...] = ()
    """None: the largest over all."""
    lowest: bool = False
    """The smallest instead."""
    headline: bool = False
    where: str = ""
    """Where the paper says so."""
    why: str = ""
    """Why ours may fall short."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Everything a figure's capacities were measured for."""

    found: Mapping[tuple[Cell, str], Found]
    cells: Sequence[Cell]

    def rate(self, cell: Cell, system: str) -> float:
        """Return a capacity in requests/s, NaN if not measured; of the tuned vLLM, that of its better budget."""
        names = (name for c, name in self.found if c == cell and name.split(" (")[0] == system)
        return max((self.found[cell, name].rate_per_s for name in names), default=math.nan)

    def ratio(self, cell: Cell, over: str, system: str = base.PAPERS) -> float:
        """Return the capacity of a system in that of another."""
        return self.rate(cell, system) / self.rate(cell, over)

    def cells_of(self, published: Published) -> list[Cell]:
        """Return what was measured of what a published ratio speaks of."""
        return [
            cell
            for cell in self.cells
            if cell.model == published.model
            and published.dataset in (None, cell.dataset)
            and (not published.slos or cell.slo in published.slos)
        ]

    def claim(self, published: Published, system: str) -> Claim:
        """Set a published ratio beside ours, where `cells_of` has any."""
        cells = self.cells_of(published)
        choose = min if published.lowest else max
        cell = choose(cells, key=lambda c: self.ratio(c, published.over, system))
        of = " ".join(filter(None, (published.model, published.dataset, "/".join(published.slos))))
        extent = "" if len(cells) == 1 else ", lowest" if published.lowest else ", up to"
        where = f" ({published.where})" if published.where else ""
        return Claim(
            name=f"{of}: capacity of {system} / {published.over}{extent}{where}",
            paper=published.paper,
            ours=self.ratio(cell, published.over, system),
            headline=published.headline and system == base.PAPERS,
            note=f"{self._numbers(cell, system, published.over)}. {published.why}".rstrip(". "),
        )

    def _numbers(self, cell: Cell, *systems: str) -> str:
        said = []
        for system in systems:
            found = self.found[cell, system]
            limits = {"tbt_p99_ms": "P99 TBT", "scheduling_delay_p50_s": "delay"}
            by = " and ".join(limits[name] for name in found.limited_by)
            said.append(f"{system} {found.rate_per_s:.3g}/s, limited by {by}")
        return f"{cell.dataset} {cell.slo}: {'; '.join(said)}"


SHOWN = (base.ORCA, base.VLLM_2023, base.VLLM, base.TUNED, base.PAPERS, base.SARATHI, base.ORACLE)
PAPER_SYSTEMS = (base.ORCA, base.VLLM_2023, base.PAPERS, base.SARATHI)
COMPARED = (base.VLLM_2023, base.ORCA, base.TUNED)
"""What Sarathi-Serve's capacity is divided by in the table."""


def measure(
    bench: Bench,
    panels: Sequence[base.Panel],
    published: Sequence[Published],
    *,
    requests: int,
    slos: Sequence[str] = base.TABLE_3,
    slos_of_paper_systems: Sequence[str] = (),
) -> Findings:
    """Measure a figure: all systems on all panels, both data sets and all objectives.

    Args:
        bench: Runs simulations. If ``quick``: the last panel, the second data set and the first objectives only, and
            traces of 48 requests, too short a queue to compare systems by.
        panels: Models and their hardware.
        published: What the paper says of them.
        requests: Length of a trace.
        slos: Objectives.
        slos_of_paper_systems: Objectives under which only the systems that the paper compares are measured.
    """
    tolerance, datasets = 0.05, list(base.DATASETS)
    if bench.quick:
        panels, requests, slos_of_paper_systems = panels[-1:], 48, ()
        tolerance, datasets = 0.3, datasets[-1:]
    specs: dict[tuple[Cell, str], Callable[[float], SimulationSpec]] = {}
    slo_ms: dict[tuple[Cell, str], float] = {}
    start: dict[tuple[Cell, str], float] = {}
    cells = [
        Cell(p.model, dataset, slo) for p in panels for dataset in datasets for slo in (*slos, *slos_of_paper_systems)
    ]
    by_model = {p.model: p for p in panels}
    for cell in cells:
        panel = by_model[cell.model]
        for one in base.contenders(panel, cell.dataset, cell.slo):
            if cell.slo in slos_of_paper_systems and one.name not in PAPER_SYSTEMS:
                continue
            key = (cell, one.name)
            specs[key] = partial(_spec, one, panel, cell.dataset, requests=requests, seed=bench.seed)
            slo_ms[key] = panel.slo_ms(cell.slo)
            start[key] = one.start * panel.rate_per_s[cell.dataset]
    figure = Figure(found=capacities(bench, specs, slo_ms, start, tolerance=tolerance), cells=cells)
    compared = [p for p in published if figure.cells_of(p)]
    return Findings(
        header=("capacity, requests/s", *SHOWN, *(f"{base.PAPERS} / {over}" for over in COMPARED)),
        rows=[_row(figure, cell) for cell in cells],
        claims=[figure.claim(p, system) for p in compared for system in (base.PAPERS, base.SARATHI)],
        metrics=_metrics(figure, base.PAPERS),
        baselines={name: _metrics(figure, name) for name in SHOWN if name != base.PAPERS},
        config={
            "requests": requests,
            "tolerance": tolerance,
            "scheduling_delay_p50_limit_s": DELAY_LIMIT_S,
            "tbt_p99_limit_ms": {f"{cell.model} {cell.slo}": by_model[cell.model].slo_ms(cell.slo) for cell in cells},
            "limited_by": {f"{cell} {name}": list(f.limited_by) for (cell, name), f in figure.found.items()},
        },
        plots=[Plot(suffix=f"-{name.split('_')[0]}", draw=partial(_draw, figure, name)) for name in datasets],
        **base.workload(),
    )


def _spec(
    contender: base.Contender, panel: base.Panel, dataset: str, rate_per_s: float, *, requests: int, seed: int
) -> SimulationSpec:
    return base.spec(contender, panel, dataset, rate_per_s, requests=requests, seed=seed)


def _row(figure: Figure, cell: Cell) -> list[object]:
    ratios = (figure.ratio(cell, over) for over in COMPARED)
    return [str(cell), *(figure.rate(cell, name) for name in SHOWN), *ratios]


def _metrics(figure: Figure, system: str) -> dict[str, float]:
    return {
        f"{cell.model}.{cell.dataset}.{cell.slo}.capacity_requests_per_s": rate
        for cell in figure.cells
        if not math.isnan(rate := figure.rate(cell, system))
    }


def _draw(figure: Figure, dataset: str, path: Path) -> None:
    from vllm_ext.observability.plots import bars

    cells = [cell for cell in figure.cells if cell.dataset == dataset]
    bars(
        [f"{cell.model}, {cell.slo}" for cell in cells],
        {name: [figure.rate(cell, name) for cell in cells] for name in SHOWN},
        path,
        ylabel="capacity (requests/s)",
        title=f"{dataset} lengths, simulated",
    )
