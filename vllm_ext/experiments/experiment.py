"""What a reproduction is, whom it compares, and what it finds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Workload
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from vllm_ext.experiments.runner import Runner


LIMITS: Mapping[str, int] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 2048}
"""Of engines of which an experiment says nothing else: figures do not follow vLLM's defaults."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """A system as it is compared: a line of a plot, or a row of a table."""

    name: str
    system: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of vllm_ext."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `EngineSpec` in which it differs from the others."""
    hardware: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `HardwareSpec` in which its device differs: bytes of a KV element."""
    cost: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `CostSpec` in which its steps take longer or shorter."""
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `WorkloadSpec` in which its clients differ: what they announce."""
    start: float = 1.0
    """First guess of the rate it sustains, relative to that of the experiment."""

    def spec(
        self, *, engine: Mapping[str, Any], hardware: HardwareSpec, workload: Mapping[str, Any], **more: Any
    ) -> SimulationSpec:
        """Return one run: what all variants share, and its own."""
        return SimulationSpec(
            engine=EngineSpec(system=self.system, options=dict(self.options), **{**LIMITS, **engine, **self.engine}),
            hardware=HardwareSpec(**{**hardware.model_dump(exclude_unset=True), **self.hardware}),
            workload=WorkloadSpec(**{**workload, **self.workload}),
            **{**more, "cost": CostSpec(**self.cost)} if self.cost else more,
        )


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A picture of the findings, drawn when they are written."""

    suffix: str
    """Added to the result's file name, e.g. ``-opt-13b-sharegpt``."""
    draw: Callable[[Path], None]
    """Writes the picture to a path."""


def line_plot(suffix: str, lines: Mapping[str, Iterable[tuple[float, float]]], **labels: Any) -> Plot:
    """Return a plot with a line per system through its points; ``labels`` as of `plots.lines`."""
    points = {name: list(found) for name, found in lines.items()}

    def draw(path: Path) -> None:
        from vllm_ext.report.plots import Series, lines

        series = [Series(label=n, x=[x for x, _ in p], y=[y for _, y in p]) for n, p in points.items() if p]
        lines(series, path, **labels)

    return Plot(suffix=suffix, draw=draw)


def bar_plot(suffix: str, groups: Sequence[str], heights: Mapping[str, Sequence[float]], **labels: Any) -> Plot:
    """Return a plot with a bar per system in each group; ``labels`` as of `plots.bars`."""

    def draw(path: Path) -> None:
        from vllm_ext.report.plots import bars

        bars(groups, heights, path, **labels)

    return Plot(suffix=suffix, draw=draw)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What an experiment measured."""

    tables: Sequence[Table]
    """As the paper would print them."""
    claims: Sequence[Claim]
    """The paper's figures beside ours, or what was to be reached."""
    metrics: Mapping[str, float]
    """Flat; names end in units."""
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """System -> the same keys as metrics."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings that shaped the measurement."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What was seen beside; git does not keep it."""
    plots: Sequence[Plot] = ()
    workload: Sequence[WorkloadSpec | Workload]
    """What was served; told by name, rows and checksum of its lengths."""


def flat(cells: Mapping[Any, Mapping[str, float]], where: Callable[..., str], own: Mapping[str, str]) -> dict[str, Any]:
    """Return ``metrics`` and ``baselines``, two fields of `Findings`.

    Args:
        cells: What was measured; the last part of a key is the system.
        where: From the other parts of a key to the beginning of a metric's name.
        own: Systems whose values are metrics -> what their names begin with; all others are baselines.
    """
    metrics: dict[str, float] = {}
    baselines: dict[str, dict[str, float]] = {}
    for (*place, system), cell in cells.items():
        into = metrics if system in own else baselines.setdefault(system, {})
        begin = own.get(system, "") + where(*place)
        into.update({begin + metric: value for metric, value in cell.items()})
    return {"metrics": metrics, "baselines": baselines}


def served(workloads: Sequence[WorkloadSpec | Workload]) -> tuple[str, int, str]:
    """Return name, rows and checksum of the lengths of workloads; those of the simulator are built."""
    built = [build(one) if isinstance(one, WorkloadSpec) else one for one in workloads]
    digests = [one.sha256 for one in built]
    digest = digests[0] if len(built) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return " and ".join(one.name for one in built), sum(one.rows for one in built), digest


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Something to find out by simulating: a figure of a paper, or a question of ours."""

    id: str
    """Name on the command line: ``alise-fig6``."""
    title: str
    """One line for the list: what is measured, or the question."""
    run: Callable[[Runner], Findings]
    paper: str = ""
    """Where the figure was published."""
    row: str = ""
    """Of the systems table: which row the paper's system is; others stand beside it under names of their own."""
    differences: Sequence[str] = ()
    """What is not as in the paper, and what that does to the comparison."""
    repeats: int = 1
    """Seeds that its figures need."""


class Paper:
    """A paper whose figures are measured again: a module of `vllm_ext.experiments.papers` defines it as ``PAPER``.

    Args:
        name: With its number or venue.
        row: As of each experiment.
        differences: Those of all its experiments.
    """

    def __init__(self, name: str, row: str, differences: Sequence[str]) -> None:
        self.row = row
        self.experiments: list[Experiment] = []
        self._name = name
        self._differences = differences

    def figure(
        self, id: str, where: str, title: str, differences: Sequence[str] | None = None, *, repeats: int = 1
    ) -> Callable[[Callable[[Runner], Findings]], Callable[[Runner], Findings]]:
        """Return a decorator that lists what measures a figure or table.

        Args:
            id: Name on the command line.
            where: In the paper.
            title: One line for the list.
            differences: In place of those of the paper.
            repeats: Seeds.
        """

        def listed(run: Callable[[Runner], Findings]) -> Callable[[Runner], Findings]:
            stated = self._differences if differences is None else differences
            paper = f"{self._name}, {where}"
            self.experiments.append(
                Experiment(id=id, paper=paper, title=title, row=self.row, differences=stated, run=run, repeats=repeats)
            )
            return run

        return listed
