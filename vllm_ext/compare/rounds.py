"""The runs: each server in turn, in an order that rotates, until the answer is precise enough or the time is over."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext.compare.observed import MEAN, MEASURES, Floats, Observed, measured
from vllm_ext.compare.replay import observed
from vllm_ext.compare.servers import Backend, Row, Up
from vllm_ext.compare.tune import tuned
from vllm_ext.compare.verdict import Verdict, noise, ratio, verdicts
from vllm_ext.compare.watch import Timeline
from vllm_ext.demo.server import ServerError
from vllm_ext.files import replaced
from vllm_ext.report.foreign_cpu import ForeignCpu
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.requests import SimRequest, all_requests
from vllm_ext.simulation.workloads.spec import WorkloadSpec

LEAST_REPEATS, MOST_REPEATS = 2, 20
"""Of one repeat nobody knows what is chance."""
_WARM, _WARM_SEED = 60, 90_000
"""Requests before the first that count: code is compiled, and lengths have been seen, as on a server that runs."""
_WARM_LOAD, _FEWEST = 0.7, 10


class NoAnswer(RuntimeError):
    """There is nothing to compare with; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is compared, and how precisely."""

    baseline: Row
    twin: Row
    """The same, to see what chance does."""
    others: Sequence[Row]
    workload: WorkloadSpec
    """At any rate."""
    loads: Sequence[float]
    """Multiples of what the baseline carries."""
    requests: int
    """Of each run; of conversations, how many begin."""
    precision: float
    """Relative half width of the interval of the mean end-to-end latency's ratio that is enough."""
    budget_s: float
    seats: int = 256
    """Requests that vLLM runs at a time, where no row says otherwise."""
    rate_per_s: float | None = None
    """Of load 1; None: measured, by a backlog on the baseline."""

    @cached_property
    def unit(self) -> str:
        """What is counted by ``requests`` and by rates."""
        return "conversations" if build(self.workload).source.mean_turns > 1 else "requests"

    @property
    def rows(self) -> list[Row]:
        """All servers."""
        return [self.baseline, self.twin, *self.others]


@dataclass
class Cells:
    """Runs that ended, a file for each: the next comparison of the same goes on with the rest."""

    folder: Path
    of: str
    """What else a run depends on: model, flags of all, device."""

    def read(self, row: Row, workload: WorkloadSpec) -> dict[str, Any] | None:
        """Return a run that was kept, or None; a damaged file is none."""
        try:
            found = json.loads(self._path(row, workload).read_text(encoding="utf-8"))
            return {**found["run"], "kept": True} if isinstance(found["run"], dict) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, row: Row, workload: WorkloadSpec, run: Mapping[str, Any]) -> None:
        """Write a run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {"row": row.name, "flags": row.flags, "workload": workload.model_dump(mode="json"), "run": run}
        with replaced(self._path(row, workload)) as file:
            file.write(json.dumps(kept).encode())

    def _path(self, row: Row, workload: WorkloadSpec) -> Path:
        what = json.dumps([self.of, row.name, row.flags, row.url, workload.model_dump(mode="json")])
        return self.folder / f"{row.name}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What else was seen of a run."""

    foreign_cores: float
    """Cores that were busy with what is neither a server of ours nor its client."""
    tbt_s: Floats
    """Gaps between tokens, of all requests."""
    timeline: Timeline
    kept: bool
    """Whether an earlier command made it."""

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> Beside:
        """Read it from what was kept of a run."""
        gaps = np.asarray([gap for each in run["itls"] for gap in each], float)
        return cls(foreign_cores=float(run["foreign_cores"]), tbt_s=gaps, timeline=Timeline.of(run), kept="kept" in run)


@dataclass
class Found:
    """What came of a comparison."""

    rate_per_s: float = 0.0
    """Of load 1."""
    runs: dict[tuple[str, float], dict[int, Observed]] = field(default_factory=dict)
    """Server and load -> repeat -> its run."""
    offered: dict[tuple[float, int], Sequence[SimRequest]] = field(default_factory=dict)
    flags: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of servers that were tuned."""
    beside: dict[tuple[str, float], dict[int, Beside]] = field(default_factory=dict)
    """Server and load -> repeat -> what else was seen of its run."""
    failed: dict[str, str] = field(default_factory=dict)
    """Servers that did not start, or ended, and why."""
    stopped: str = ""
    """Why there are no more repeats."""

    @property
    def foreign_cores(self) -> float:
        """Cores that others kept busy, in the run in which it was most."""
        return max((one.foreign_cores for each in self.beside.values() for one in each.values()), default=0.0)

    def pairs(self, server: str, asked: Asked, load: float) -> tuple[list[int], list[list[Observed]]]:
        """Return the repeats that a server, the baseline and its twin have of a load, and the runs of each."""
        names = (server, asked.baseline.name, asked.twin.name)
        each = [self.runs.get((name, load), {}) for name in names]
        repeats = sorted(set(each[0]) & set(each[1]) & set(each[2]))
        return repeats, [[runs[at] for at in repeats] for runs in each]

    def whole_repeats(self, asked: Asked) -> Found:
        """Return it without a repeat that some servers lack, as after Ctrl-C: their means would be of other requests.

        Of a load without a whole repeat, and of a server that failed, all is kept that there is.
        """
        kept = Found(self.rate_per_s, offered=self.offered, flags=self.flags, failed=self.failed, stopped=self.stopped)
        going = [row.name for row in asked.rows if row.name not in self.failed]
        for load in asked.loads:
            whole = set.intersection(*(set(self.runs.get((name, load), {})) for name in going))
            for key in ((row.name, load) for row in asked.rows):
                for at, run in self.runs.get(key, {}).items():
                    if at in whole or not whole:
                        kept.runs.setdefault(key, {})[at] = run
                        kept.beside.setdefault(key, {})[at] = self.beside[key][at]
        return kept

    def verdicts(self, asked: Asked) -> Iterator[Verdict]:
        """Yield what is said of each server but the baseline and its twin."""
        for row in asked.others:
            for load in asked.loads:
                repeats, (ours, base, again) = self.pairs(row.name, asked, load)
                if repeats:
                    yield from verdicts(row.name, load, ours, base, again)


@dataclass
class _Left:
    """How much is left to do."""

    asked: Asked
    now: Callable[[], float]
    began_s: float

    @property
    def is_over(self) -> bool:
        """Whether the time is."""
        return self.now() - self.began_s > self.asked.budget_s

    def told(self, found: Found, made: int) -> str:
        """Say how many runs are needed at least, and how long that takes.

        Args:
            found: What there is.
            made: Runs that were made by now; those that had been kept took no time.
        """
        rows = [row.name for row in self.asked.rows if row.name not in found.failed]
        done = sum(len(runs) for (name, _), runs in found.runs.items() if name in rows)
        needed = LEAST_REPEATS * len(rows) * len(self.asked.loads) - done
        spent_s = self.now() - self.began_s
        if needed <= 0:
            return f"at most {_minutes(self.asked.budget_s - spent_s)} more"
        return f"{needed} more runs at least" + (f", some {_minutes(needed * spent_s / made)}" if made else "")


def _minutes(seconds: float) -> str:
    return f"{max(seconds, 0.0) / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 0.0):.0f} s"


def compare(
    backend: Backend, cells: Cells, asked: Asked, tell: Callable[[str], None], found: Found,
    now: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Run until it is enough.

    Args:
        backend: Where servers come from.
        cells: What was run before, and gets what is run.
        asked: What is compared.
        tell: Gets a line for each run.
        found: Gets what came of it, so that an interruption loses nothing.
        now: Seconds, for the budget.

    Raises:
        NoAnswer: the baseline failed.
    """
    up = Up(backend)
    try:
        _rounds(up, cells, asked, tell, found, now)
    except ServerError as error:  # of others it is noted, and the rest goes on
        raise NoAnswer(f"the baseline failed: {error}") from error
    finally:
        up.stop()


def _rounds(
    up: Up, cells: Cells, asked: Asked, tell: Callable[[str], None], found: Found, now: Callable[[], float]
) -> None:  # fmt: skip
    left = _Left(asked, now, now())
    asked = _within_context(up, cells, asked)
    found.rate_per_s = asked.rate_per_s or _capacity(up, cells, asked, tell)
    others = [_tuned(up, cells, asked, found, row, tell) if row.tune else row for row in asked.others]
    asked = replace(asked, others=others)
    for repeat in range(MOST_REPEATS):
        shift = repeat % len(asked.rows)
        for row in [*asked.rows[shift:], *asked.rows[:shift]]:
            if row.name not in found.failed:
                if left.is_over:
                    found.stopped = f"the time was over after {repeat} repeats"
                    return
                _served(
                    up, cells, asked, lambda text: tell(f"{text} ({left.told(found, up.made)})"), found, row, repeat
                )
        if repeat + 1 >= LEAST_REPEATS and all(
            _precise(found, asked, row, load) for row in asked.others for load in asked.loads
        ):
            found.stopped = f"all intervals are within {100 * asked.precision:g} % after {repeat + 1} repeats"
            return
    found.stopped = f"{MOST_REPEATS} repeats"


def _served(
    up: Up, cells: Cells, asked: Asked, tell: Callable[[str], None], found: Found, row: Row, repeat: int
) -> None:  # fmt: skip
    """Run all loads of a repeat on a server, which is started only where one of them is not there yet."""
    try:
        for load, requests, run in _runs(up, cells, asked, found.rate_per_s, row, asked.loads, repeat):
            one = observed(run, requests)
            found.offered[load, repeat] = requests
            found.runs.setdefault((row.name, load), {})[repeat] = one
            found.beside.setdefault((row.name, load), {})[repeat] = Beside.of(run)
            failed = f", {one.failed} failed" if one.failed else ""
            mean = measured(one).get(MEAN, float("nan"))
            tell(f"repeat {repeat + 1}, {row.name} at {load:g}: mean e2e {mean:.4g} s{failed}")
    except ServerError as error:
        if row not in asked.others:
            raise
        found.failed[row.name] = str(error)
        tell(f"{row.name}: {error}")


def _runs(
    up: Up, cells: Cells, asked: Asked, rate_per_s: float, row: Row, loads: Sequence[float], repeat: int
) -> Iterator[tuple[float, list[SimRequest], dict[str, Any]]]:  # fmt: skip
    """Yield load, requests and run, behind a warm-up where one of them is not there yet."""
    workloads = {load: workload_at(asked, load * rate_per_s, repeat) for load in loads}
    if any(cells.read(row, workload) is None for workload in workloads.values()):
        up.server(row).serve(_warming(asked, rate_per_s))
    for load, workload in workloads.items():
        yield load, all_requests(build(workload)), _run(up, cells, row, workload)


def _tuned(up: Up, cells: Cells, asked: Asked, found: Found, row: Row, tell: Callable[[str], None]) -> Row:
    """Return a row with the best of vLLM's own flags, searched on requests that no repeat has."""

    def attempt(one: Row, loads: Sequence[float], part: int) -> dict[float, dict[str, float]]:
        some = replace(asked, requests=max(asked.requests // part, _FEWEST))
        try:
            runs = [*_runs(up, cells, some, found.rate_per_s, one, loads, MOST_REPEATS)]
        except ServerError as error:
            tell(f"{one.name} with {' '.join(one.flags)}: {error}")
            return {}
        values = {load: measured(observed(run, requests)) for load, requests, run in runs}
        shown = ", ".join(f"{each.get(MEAN, float('nan')):.4g} s at {load:g}" for load, each in values.items())
        tell(f"{one.name} with {' '.join(one.flags) or 'no flags'}: mean e2e {shown}")
        return values

    best = tuned(row, asked.seats, attempt, tell)
    found.flags[row.name] = best.flags
    return best


def _run(up: Up, cells: Cells, row: Row, workload: WorkloadSpec) -> dict[str, Any]:
    """Return a run that was kept, else make it and keep it."""
    if (kept := cells.read(row, workload)) is None:
        server, others = up.server(row), ForeignCpu()
        kept = {**server.serve(workload), "foreign_cores": others.cores()}
        up.made += 1
        cells.keep(row, workload, kept)
    return kept


def workload_at(asked: Asked, rate_per_s: float, repeat: int) -> WorkloadSpec:
    """Return the requests of a repeat: the next ones of a file, else others of the same kind."""
    base = asked.workload
    values: dict[str, Any] = {"num_requests": asked.requests, "rate_per_s": float(f"{rate_per_s:.6g}")}
    size = build(base).source.size
    if size is not None and base.sample == "file-order":
        room = max(1, size - base.skip_requests - asked.requests + 1)
        values["skip_requests"] = base.skip_requests + repeat * asked.requests % room
    return WorkloadSpec.model_validate({**base.model_dump(), **values, "seed": base.seed + repeat})


def _warming(asked: Asked, rate_per_s: float) -> WorkloadSpec:
    first = workload_at(asked, _WARM_LOAD * rate_per_s, 0)
    enough = math.ceil(_WARM / build(first).source.mean_turns)
    return WorkloadSpec.model_validate({
        **first.model_dump(), "num_requests": min(enough, asked.requests), "think_s": 0.0,
        "seed": asked.workload.seed + _WARM_SEED,
    })  # fmt: skip


def _within_context(up: Up, cells: Cells, asked: Asked) -> Asked:
    """Return what is asked with requests that fit into the model's context, of which the baseline is asked once."""
    if asked.workload.max_model_len is not None:
        return asked
    row, nothing = asked.baseline, asked.workload.model_copy(update={"num_requests": 0})
    if (kept := cells.read(row, nothing)) is None:
        kept = {"max_model_len": up.server(row).max_model_len}
        cells.keep(row, nothing, kept)
    context = {"max_model_len": kept["max_model_len"]}
    return replace(asked, workload=asked.workload.model_copy(update=context))


def _capacity(up: Up, cells: Cells, asked: Asked, tell: Callable[[str], None]) -> float:
    """Return what the baseline ends per second of a backlog, between its first and last tenth.

    Of conversations, whose clients then do not think, as many as these requests come from.
    """
    row = asked.baseline
    backlog = WorkloadSpec.model_validate({
        **workload_at(asked, 1.0, 0).model_dump(), "arrivals": "at-once", "rate_per_s": None, "cv": 1.0,
        "think_s": 0.0,
    })  # fmt: skip
    requests = all_requests(build(backlog))
    run = observed(_run(up, cells, row, backlog), requests)
    ends = np.sort(run.arrival_s + run.e2e_s)
    ends = ends[~np.isnan(ends)]
    if len(ends) < _FEWEST:
        raise NoAnswer(f"the baseline answered {len(ends)} of {len(requests)} requests that were sent at once")
    first, last = len(ends) // 10, len(ends) - 1 - len(ends) // 10
    begun = len({one.meta["session"].number for one in requests})
    rate = (last - first) / max(float(ends[last] - ends[first]), 1e-9) * begun / len(requests)
    tell(f"{row.name} carries {rate:.4g} {asked.unit}/s")
    return rate


def _precise(found: Found, asked: Asked, row: Row, load: float) -> bool:
    if row.name in found.failed:
        return True
    repeats, (ours, base, again) = found.pairs(row.name, asked, load)
    if not repeats or noise(MEASURES[MEAN], again, base).half_width > asked.precision:
        return False
    return ratio(MEASURES[MEAN], ours, base).half_width <= asked.precision
