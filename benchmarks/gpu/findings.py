"""What a benchmark has found so far, written after every cell, since its process may be ended. A part of benchmarks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import checkout  # noqa: F401 - before all that it makes importable
import on_gpu

from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Result, Workload, emit, machine, versions

T = TypeVar("T")
_ERROR_CHARS = 300


@dataclass(frozen=True, kw_only=True)
class PartialResult(Result):
    """A result that may lack cells, and says so."""

    complete: bool
    """Whether the benchmark came to its end."""
    wrong: Sequence[str]
    """What did not compute what it must."""
    failed: Mapping[str, str]
    """What could not be measured, and why."""


@dataclass(kw_only=True)
class Findings:
    """Metrics and failures of one run, as they come."""

    name: str
    command: str
    config: Mapping[str, Any]
    seed: int
    workload: Workload
    out: Path | None
    metrics: dict[str, float] = field(default_factory=dict)
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)
    machine: Mapping[str, Any] = field(default_factory=machine)
    """Asked once: to read and digest all sources takes longer than many a cell."""

    def attempt(self, what: str, work: Callable[[], T]) -> T | None:
        """Return what some work returns; None if it raises, and `failed` says why."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - it is reported, and the exit status tells
            self.failed[what] = _brief(error)
            print(f"{what} failed: {self.failed[what]}", file=sys.stderr, flush=True)
            return None

    def write(self) -> None:
        """Write what there is."""
        on_gpu.write(self.out, json.loads(self._result(complete=False).to_json()))

    def end(self, tables: Sequence[str]) -> int:
        """Print and write the whole; return the exit status."""
        emit(self._result(complete=True), tables, self.out)
        return on_gpu.status(wrong=bool(self.wrong), complete=not self.failed)

    def _result(self, *, complete: bool) -> PartialResult:
        return PartialResult(
            name=self.name, command=self.command, config=self.config, seed=self.seed, workload=self.workload,
            metrics=self.metrics, baselines=self.baselines, claims=self.claims, versions=self.versions,
            machine=self.machine, complete=complete, wrong=self.wrong, failed=self.failed,
        )  # fmt: skip


def _brief(error: Exception) -> str:
    """Return the first line, behind the error's type: a result refuses texts that begin with a path."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:_ERROR_CHARS]
