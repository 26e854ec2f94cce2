"""What a reproduction is, what it finds, and what it is given to work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from vllm_ext.repro.bench import Bench


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One figure of a paper beside ours."""

    name: str
    """What is compared, e.g. ``opt-13b sharegpt: rate at 200 ms/token, alise / vllm-2023``."""
    paper: float
    """The paper's figure."""
    ours: float
    """What was measured here."""
    better: Literal["higher", "lower"] = "higher"
    """Which direction is an improvement; the claim is reproduced if ours is at least as good."""
    note: str = ""
    """Why they differ. Needed where ours falls short."""
    headline: bool = False
    """Whether this is the figure the paper is known by; it becomes a goal of the result."""

    @property
    def ratio(self) -> float:
        """Ours / paper's."""
        return self.ours / self.paper

    @property
    def reached(self) -> bool:
        """Whether ours is at least as good as the paper's."""
        return self.ours >= self.paper if self.better == "higher" else self.ours <= self.paper


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A picture of the findings, drawn when they are written."""

    suffix: str
    """Added to the result's file name, e.g. ``-opt-13b-sharegpt``."""
    draw: Callable[[Path], None]
    """Writes the picture to a path."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a reproduction measured."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    """The table, as the paper would print it."""
    claims: Sequence[Claim]
    metrics: Mapping[str, float]
    """Flat; names end in units."""
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """System -> the same keys as metrics."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings that shaped the measurement."""
    plots: Sequence[Plot] = ()
    workload_name: str
    workload_rows: int
    workload_sha256: str


@dataclass(frozen=True, kw_only=True)
class Study:
    """A reproduction: a module of `vllm_ext.repro.studies` defines one as ``STUDY``."""

    id: str
    """Name on the command line: ``alise-fig6``."""
    paper: str
    """Where the figure was published."""
    title: str
    """One line for the list."""
    row: str
    """Of the systems table: which row the paper's system is; others stand beside it under names of their own."""
    differences: Sequence[str]
    """What is not as in the paper, and what that does to the comparison."""
    run: Callable[[Bench], Findings]
