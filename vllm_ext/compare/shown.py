"""What people read of a comparison: a table, verdicts in words, and a page with charts."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_ext.compare.observed import MEAN, ON_TIME, P99, Observed, pooled
from vllm_ext.compare.rounds import Asked, Beside, Found
from vllm_ext.compare.verdict import Verdict, who_pays
from vllm_ext.report import page, plots
from vllm_ext.report.results import Result
from vllm_ext.report.table import Table

_COLUMNS = (MEAN, P99, "mean TTFT", "P90 TTFT", "mean TPOT", "P99 longest gap", "mean normalised")
_OF_OBJECTIVES = (ON_TIME, "goodput")
COUNTED = {"preemptions": "preemptions", "cached": "prompt in cache"}
"""What servers count, and how it is headed; of tokens of prompts, the share that was found in a KV cache."""
_SPREAD = {
    "ttft_s": "time to first token",
    "tbt_s": "time between tokens",
    "e2e_s": "end-to-end latency",
    "normalised_s": "end-to-end latency per output token",
}
"""What is drawn as a distribution: of requests, but of `Beside` the times between all tokens."""


_HARDLY = 0.1
"""Share of the time with a queue below which no order gains much; as of `vllm_ext:load_waiting_share`."""
_LOST = 0.01
"""Share of the requests that may fail on a server, and not on the baseline, without its being told worse."""
_MOST_TENANTS, _OF_A_TENANT, _TENANT_CHARS = 32, 20, 12
"""Tenants that are looked at, those who send most; how many requests make a mean; and what is shown of a name."""


class _Told(NamedTuple):
    """What is said of a server at a load."""

    where: str
    said: str
    kind: str
    paying: list[str]


@dataclass(frozen=True)
class Shown:
    """A comparison to be read."""

    asked: Asked
    found: Found
    verdicts: Sequence[Verdict]
    notes: Sequence[str] = ()
    """What else must be known: the clock, others on the machine."""

    @property
    def wanted(self) -> str:
        """The measure that decides."""
        return ON_TIME if self.asked.workload.tiers else MEAN

    def is_better(self, server: str) -> bool:
        """Whether a server is better at a load by what is wanted, and at none worse by that, the tail, or failures."""
        if any(self._loses(server, load) for load in self.asked.loads):
            return False
        mine = [one for one in self.verdicts if one.server == server]
        kinds = [one.kind for one in mine if one.measure in (self.wanted, P99)]
        return "worse" not in kinds and any(one.kind == "better" for one in mine if one.measure == self.wanted)

    def table(self) -> Table:
        """Return a row for each server at each load."""
        columns = [*_COLUMNS, *(_OF_OBJECTIVES if self.asked.workload.tiers else ())]
        rows = []
        for load in self.asked.loads:
            for row in self.asked.rows:
                if runs := self._runs(row.name, load):
                    values, failed = pooled(runs), sum(run.failed for run in runs)
                    shown = [values.get(name) for name in columns]
                    counted = [self.counted(row.name, load, name) for name in COUNTED]
                    rows.append([load, row.name, len(runs), failed, *counted, *shown])
        title = f"load 1 is {self.found.rate_per_s:.4g} {self.asked.unit}/s; latencies in seconds"
        return Table(["load", "server", "repeats", "failed", *COUNTED.values(), *columns], rows, title=title)

    def by_class(self) -> Table | None:
        """Return the share of each class of service that met its objectives; None without two classes."""
        names = self._classes()
        rows = []
        for load in self.asked.loads:
            for row in self.asked.rows:
                runs = self.found.runs.get((row.name, load), {})
                offered = [one for repeat in runs for one in self.found.offered[load, repeat]]
                if runs:
                    met = Observed.joined([*runs.values()]).on_time
                    shares = [float(met[np.array([one.tier == name for one in offered])].mean()) for name in names]
                    rows.append([load, row.name, *shares])
        if len(names) < 2 or not rows:
            return None
        return Table(["load", "server", *names], rows, title="share that met all of its objectives, by class")

    def words(self) -> Iterator[str]:
        """Yield what is said of each server, which flags to set, and what failed."""
        for row in self.asked.others:
            for told in self._told[row.name]:
                yield f"{told.where}: {told.said}"
                yield from (f"  who pays: {line}" for line in told.paying)
            flags = self.found.flags.get(row.name, row.flags)
            if flags and self.is_better(row.name):
                yield f"  set these flags: {shlex.join(flags)}"
        yield from self.notes
        for name, (first, *more) in ((name, why.splitlines()) for name, why in self.found.failed.items()):
            yield f"{name} failed: {first} {more[-1].strip() if more else ''}".rstrip()
        yield f"stopped: {self.found.stopped}"

    def page(self, made: Result) -> page.Page:
        """Return it as a page."""
        verdicts = []
        for told in (one for each in self._told.values() for one in each):
            verdicts.append(page.Verdict(text=f"{told.where}: {told.said}", kind=told.kind))
            verdicts += [page.Verdict(text=f"{told.where}, {line}", kind="worse") for line in told.paying]
        names = ", ".join(row.name for row in self.asked.rows)
        highest = max(self.asked.loads)
        charts = [
            page.Chart(
                caption="Mean end-to-end latency against the rate. Bands: 95 % intervals of the ratio to the baseline",
                alt=f"Lines of the mean end-to-end latency against the rate of {names}",
                draw=lambda path: plots.lines(self._lines(), path, xlabel=f"rate ({self.asked.unit}/s)",
                                              ylabel="mean end-to-end latency (s)"),
            ),
            *(
                page.Chart(
                    caption=f"Distribution of the {what} at {highest:g}. Bands span the repeats",
                    alt=f"Cumulative distributions of the {what} of {names}",
                    draw=partial(self._draw_distributions, name, highest),
                )
                for name, what in _SPREAD.items()
            ),
            page.Chart(
                caption=f"What waited and ran, and how full KV memory was, in the first repeat at {highest:g}",
                alt=f"Lines over time of waiting and running requests, and of KV memory in use, of {names}",
                draw=lambda path: plots.over_time(self._over_time(highest), path),
            ),
        ]  # fmt: skip
        failed = [f"{name} failed: {why}" for name, why in self.found.failed.items()]
        by_class = self.by_class()
        return page.Page(
            title=f"{self.asked.baseline.name} against {', '.join(row.name for row in self.asked.others)}",
            verdicts=verdicts, command=made.command, facts=page.facts_of(made),
            sections=[page.Section(title="Latency", charts=charts[:-1]),
                      page.Section(title="Over time", charts=charts[-1:]),
                      *([page.Section(title="By class of service", table=by_class)] if by_class else []),
                      page.Section(title="Every server at every load", table=self.table())],
            left_out=[*failed, *self.notes, f"stopped: {self.found.stopped}"],
        )  # fmt: skip

    def _runs(self, server: str, load: float) -> list[Observed]:
        return [*self.found.runs.get((server, load), {}).values()]

    def _beside(self, server: str, load: float) -> list[Beside]:
        return [*self.found.beside.get((server, load), {}).values()]

    def counted(self, server: str, load: float, name: str) -> float | None:
        """Return the mean over the repeats of what `Timeline` counts; None where a run does not know."""
        counts = [getattr(one.timeline, name) for one in self._beside(server, load)]
        known = [count for count in counts if count is not None]
        return sum(known) / len(known) if counts and len(known) == len(counts) else None

    def _loses(self, server: str, load: float) -> bool:
        """Whether more requests fail than on the baseline: latencies leave them out, so that these look better."""
        _, (ours, base, _) = self.found.pairs(server, self.asked, load)
        lost = sum(one.failed - other.failed for one, other in zip(ours, base, strict=True))
        return lost > _LOST * sum(len(one.e2e_s) for one in ours)

    def _waiting_share(self, load: float) -> float | None:
        """Return the share of moments in which somebody waited on the baseline; None where nobody looked."""
        lines = [one.timeline.waiting for one in self._beside(self.asked.baseline.name, load)]
        moments = [number > 0 for line in lines for number in line]
        return sum(moments) / len(moments) if moments else None

    def _classes(self) -> list[str]:
        return sorted({one.tier for requests in self.found.offered.values() for one in requests if one.tier})

    @cached_property
    def _told(self) -> dict[str, list[_Told]]:
        """What is said of each server, load by load."""
        found: dict[str, list[_Told]] = {}
        for row in self.asked.others:
            found[row.name] = []
            for load in self.asked.loads:
                where = f"{row.name} at {load:g} ({load * self.found.rate_per_s:.3g} {self.asked.unit}/s)"
                runs = self._runs(row.name, load)
                if runs and all(run.failed == len(run.e2e_s) for run in runs):
                    found[row.name].append(_Told(where, "it answered no request", "worse", []))
                elif mine := [one for one in self.verdicts if (one.server, one.load) == (row.name, load)]:
                    said = _said(mine)
                    if (share := self._waiting_share(load)) is not None and share < _HARDLY:
                        said += f"; somebody waits {share:.0%} of the time: there is hardly a queue to order"
                    kind = _kind(mine, self.wanted)
                    if self._loses(row.name, load):
                        failed, kind = sum(run.failed for run in runs), "worse"
                        said = f"{failed} requests failed, more than on the baseline; of the others: {said}"
                    told = _Told(where, said, kind, self._who_pays(row.name, load))
                    found[row.name].append(told)
        return found

    def _who_pays(self, server: str, load: float) -> list[str]:
        repeats, (ours, base, _) = self.found.pairs(server, self.asked, load)
        offered = [self.found.offered[load, repeat] for repeat in repeats]
        names = self._classes()
        classes = {
            f"class {name}": [np.array([one.tier == name for one in requests]) for requests in offered]
            for name in (names if len(names) > 1 else [])
        }
        if self.asked.unit == "conversations":
            for name, later in (("first turns", False), ("later turns", True)):
                classes[name] = [np.array([bool(one.meta["turn"]) is later for one in rows]) for rows in offered]
        sent = Counter(one.tenant for requests in offered for one in requests if one.tenant)
        for tenant, count in sent.most_common(_MOST_TENANTS if len(sent) > 1 else 0):
            if count >= _OF_A_TENANT:
                rows = [np.array([one.tenant == tenant for one in requests]) for requests in offered]
                classes[f"tenant {tenant[:_TENANT_CHARS]}"] = rows
        return [*who_pays(ours, base, classes)]

    def _lines(self) -> list[plots.Series]:
        series = []
        for row in self.asked.rows:
            means = {load: pooled(runs).get(MEAN, float("nan"))
                     for load in self.asked.loads if (runs := self._runs(row.name, load))}  # fmt: skip
            over = {one.load: one.ratio for one in self.verdicts if (one.server, one.measure) == (row.name, MEAN)}
            banded = means and all(load in over for load in means)
            bands = zip(*(over[load].band(mean) for load, mean in means.items()), strict=True) if banded else ((), ())
            low, high = bands
            rates = [load * self.found.rate_per_s for load in means]
            series.append(plots.Series(label=row.name, x=rates, y=[*means.values()], low=low, high=high))
        return series

    def _draw_distributions(self, name: str, load: float, path: Path) -> None:
        curves = []
        for row in self.asked.rows:
            runs: Sequence[object] = self._runs(row.name, load)
            if name == "tbt_s":
                runs = self._beside(row.name, load)
            if len(together := np.concatenate([np.empty(0), *(parts := [getattr(one, name) for one in runs])])):
                curves.append(plots.empirical_cdf(row.name, together, parts=parts))
        plots.cdf(curves, path, xlabel=f"{_SPREAD[name]} (s)", log_x=True)

    def _over_time(self, load: float) -> list[plots.Panel]:
        """Return what the servers said of themselves; where one said nothing, what its client knows."""
        waiting, running, kv = [], [], []
        for row in self.asked.rows:
            if not (runs := self._runs(row.name, load)):
                continue
            line = self._beside(row.name, load)[0].timeline
            if line.at_s:
                waiting.append(plots.Series(label=row.name, x=line.at_s, y=line.waiting))
                running.append(plots.Series(label=row.name, x=line.at_s, y=line.running))
                kv.append(plots.Series(label=row.name, x=line.at_s, y=line.kv_used))
                continue
            one = runs[0][~np.isnan(runs[0].e2e_s)]
            first, last = one.arrival_s + one.ttft_s, one.arrival_s + one.e2e_s
            waiting.append(_count(row.name, one.arrival_s, first))
            running.append(_count(row.name, first, last))
        panels = (("waiting", waiting), ("running", running), ("KV in use", kv))
        return [plots.Panel(ylabel=label, series=series) for label, series in panels if series]


def _count(label: str, starts: Any, ends: Any) -> plots.Series:
    """Return how many intervals hold each moment at which one begins or ends."""
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    steps = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    return plots.Series(label=label, x=times[order].tolist(), y=np.cumsum(steps[order]).tolist())


def _said(verdicts: Sequence[Verdict]) -> str:
    """Say what is better and what is worse, and what chance alone makes of the mean end-to-end latency."""
    mean = next(one for one in verdicts if one.measure == MEAN)
    chance = f"the same server twice: {MEAN} {mean.noise.low:.2f}..{mean.noise.high:.2f}"
    better = [f"{one.measure} {one.ratio}" for one in verdicts if one.kind == "better"]
    worse = [f"{one.measure} {one.ratio.inverse}" for one in verdicts if one.kind == "worse"]
    parts = [f"better, times: {', '.join(better)}"] * bool(better) + [f"worse, times: {', '.join(worse)}"] * bool(worse)
    return "; ".join([*(parts or [f"no difference seen: {MEAN} {mean.ratio} times better"]), chance])


def _kind(verdicts: Sequence[Verdict], wanted: str) -> str:
    """Return what decides: the measure that is wanted, or where that is the same the mean end-to-end latency."""
    kinds = {one.measure: one.kind for one in verdicts}
    return kinds[MEAN] if kinds.get(wanted, "same") == "same" else kinds[wanted]
