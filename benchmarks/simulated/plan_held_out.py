"""Does what `vllm-ext plan` recommends hold on traffic that it has not seen, and is anything better?

Question: an operator plans with yesterday's trace. Is the server that `vllm-ext plan` recommends as good, on the
requests that follow, as the best of all budgets and systems, and never worse than the server as it is?

Method: twelve pairs of a recorded workload and a device. No rule or constant of `plan` was chosen on any of them, but
for two: the limit of the TTFT was changed when two cells had been seen, and half the budget became a finalist when
seven had. Goals are told without these seven, too. The last third of each file, which is its last by time, is reserved:
`plan` sees the first two thirds, searches on the first and chooses on the second. On the reserved third, at 0.9 of the
saturation that `plan` found, vLLM and `alise` are then tried with every token budget; at 0.5 and 0.7 what was
recommended and the server as it is. A ratio is a latency of the server as it is over that of another, above 1 is
better. The best of the grid is told twice: of all, and of those that keep to the limits of `plan` there.

    python benchmarks/simulated/plan_held_out.py --data DIR --quick
    python benchmarks/simulated/plan_held_out.py --data DIR --jobs 2 --out benchmarks/results/plan_held_out.json
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import simulated

from vllm_ext.experiments.experiment import Experiment, Findings
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import Claim
from vllm_ext.report.results import argument_parser, command
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.plan import search
from vllm_ext.simulation.plan.answer import Answer, answer
from vllm_ext.simulation.plan.candidates import DEFAULT, Candidate, budgets, systems, unique, with_budget
from vllm_ext.simulation.plan.estimate import estimate
from vllm_ext.simulation.plan.evidence import MEAN, P99, TTFT_P90, Metrics, Objective, times_better
from vllm_ext.simulation.plan.runs import Bench, Part, parts_of
from vllm_ext.simulation.plan.saturation import saturation
from vllm_ext.simulation.spec import SimulationSpec, resolve, with_values
from vllm_ext.simulation.workloads.build import build

LOADS, PLANNED_AT = (0.5, 0.7, 0.9), (0.7, 0.9, 1.0)
GRID_AT = 0.9
_GRID = ("vLLM", "alise")
REQUESTS, QUICK_REQUESTS = 1000, 100
QUICK = ("azure-2024, llama-3.1-8b, 1 x h100",)
_SEEN = (
    "azure-conv, llama-2-7b, 1 x a100-40", "azure-conv, llama-3.1-8b, 1 x h100", "azure-conv, llama-3.1-70b, 4 x h100",
    "azure-code, llama-3.1-8b, 1 x h100", "azure-code, llama-3.1-70b, 4 x h100", "azure-2024, opt-13b, 1 x a100-40",
    "azure-2024, llama-3.1-8b, 1 x h100",
)  # fmt: skip
_TRACES: Mapping[str, Mapping[str, Any]] = {
    "azure-conv": {"source": "traces/azure_2023_conv.csv.gz"},
    "azure-code": {"source": "traces/azure_2023_code.csv.gz"},
    "azure-2024": {"source": "traces/azure_2024_sample.csv.gz"},
    "mooncake": {"source": "traces/mooncake_conversation.jsonl.gz"},
    "mooncake-synthetic": {"source": "traces/mooncake_synthetic.jsonl.gz"},
    "arxiv": {"source": "traces/arxiv_lengths_llama2.csv.gz", "arrivals": "poisson"},
    "sharegpt-lengths": {"source": "traces/sharegpt_lengths_llama2.csv.gz", "arrivals": "poisson"},
}
"""Files and what is not as recorded: those that have lengths only get Poisson arrivals."""


@dataclass(frozen=True)
class Cell:
    """A trace on a device."""

    trace: str
    model: str
    device: str
    devices: int = 1
    max_model_len: int = 8192

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.trace}, {self.model}, {self.devices} x {self.device}"

    def base(self, data: Path) -> SimulationSpec:
        """Return the run of vLLM as it comes, on the whole trace, at a rate that is to be set."""
        trace = _TRACES[self.trace]
        workload = {
            "arrivals": "recorded", **trace, "source": str(data / trace["source"]), "rate_per_s": 1.0,
            "over_context": "cut", "max_tokens": 1024, "max_model_len": self.max_model_len,
        }  # fmt: skip
        hardware = HardwareSpec(model=self.model, device=self.device, tensor_parallel=self.devices)
        return simulated.vllm_as_it_comes(hardware, self.max_model_len, workload)


_LONG = 32_768
CELLS = {
    cell.name: cell
    for cell in (
        Cell("azure-conv", "llama-2-7b", "a100-40", max_model_len=4096),
        Cell("azure-conv", "llama-3.1-8b", "h100"),
        Cell("azure-conv", "llama-3.1-70b", "h100", 4),
        Cell("azure-code", "llama-3.1-8b", "h100"),
        Cell("azure-code", "llama-3.1-70b", "h100", 4),
        Cell("azure-2024", "opt-13b", "a100-40", max_model_len=2048),
        Cell("azure-2024", "llama-3.1-8b", "h100"),
        Cell("mooncake", "llama-3.1-8b", "h100", max_model_len=_LONG),
        Cell("mooncake-synthetic", "llama-3.1-70b", "h100", 4, max_model_len=_LONG),
        Cell("arxiv", "llama-3.1-8b", "h100"),
        Cell("sharegpt-lengths", "llama-3.1-8b", "a100-40"),
        Cell("sharegpt-lengths", "llama-3.1-70b", "h100", 4),
    )
}


@dataclass(frozen=True)
class Judged:
    """What became of a recommendation on the reserved third."""

    found: Answer
    saturation_per_s: float
    estimated_per_s: float
    """Of that, by the lengths of the requests alone."""
    held: Mapping[Candidate, Mapping[float, Metrics]]
    failed: Mapping[Candidate, str] = field(default_factory=dict)

    def over(self, candidate: Candidate, load: float, metric: str) -> float:
        """Return how many times better than the server as it is."""
        return times_better(self.held[candidate][load], self.held[DEFAULT][load], metric)

    def best(self, objective: Objective | None = None) -> Candidate:
        """Return what has the lowest mean end-to-end latency; given an objective, of those that break no limit."""
        allowed = [
            candidate
            for candidate, runs in self.held.items()
            if GRID_AT in runs and not (objective and objective.broken({GRID_AT: runs[GRID_AT]}, self.held[DEFAULT]))
        ]
        return max(allowed, key=lambda candidate: self.over(candidate, GRID_AT, MEAN))

    def missed(self, best: Candidate) -> float:
        """Return the mean end-to-end latency of the best over that of what was recommended: at most 1."""
        return self.over(self.found.choice, GRID_AT, MEAN) / self.over(best, GRID_AT, MEAN)


def judged(cell: Cell, data: Path, runner: Runner) -> Judged:
    """Plan with the first two thirds of a trace and try what is there on the last."""
    base, objective = cell.base(data), Objective(with_slo=False)
    total = sum(1 for _ in build(base.workload).start())
    seen = 2 * total // 3
    bench = Bench(with_values(base, {"workload.num_requests": seen}), runner.store, runner.pool, lambda *_: None)
    count = QUICK_REQUESTS if runner.quick else REQUESTS
    parts = parts_of(build(bench.base.workload))
    parts = replace(parts, final=parts.final.head(count), search=parts.search.head(count if runner.quick else total))
    saturated = saturation(bench, parts, 1.0)
    coarse = search.search(bench, parts, objective, saturated)
    found = answer(bench, parts, objective, saturated, coarse, PLANNED_AT)

    held = Part(seen, min(count, total - seen), runner.seed)
    resolved = resolve(bench.base)
    every = [Candidate(system=system) for system in systems(bench.base) if system.name in _GRID]
    grid = unique(
        [*every, *(with_budget(one, tokens, resolved) for one in every for tokens in budgets(resolved.limits))]
    )
    tried = [
        bench.tried(candidates, held, loads, saturated.rate_per_s)
        for candidates, loads in (((DEFAULT, found.choice), LOADS), (unique([*grid, found.choice]), (GRID_AT,)))
    ]
    runs: dict[Candidate, dict[float, Metrics]] = {}
    for each in tried:
        for candidate, by_load in each.metrics.items():
            runs.setdefault(candidate, {}).update(by_load)
    searched = with_values(base, {"workload.num_requests": parts.search.count})
    estimated = estimate(searched, build(searched.workload))
    assert estimated is not None, "prompts are cut to the context"
    return Judged(found, saturated.rate_per_s, estimated.rate_per_s, runs, {**tried[0].failed, **tried[1].failed})


def claims(found: Mapping[str, Judged]) -> Iterator[Claim]:
    """Hold what was found to the goals."""
    fresh = {name: one for name, one in found.items() if name not in _SEEN}
    for told, cells in (("", found), (", unseen cells", fresh)):
        if cells:
            yield from _claims_of(cells, told)


def _claims_of(found: Mapping[str, Judged], told: str) -> Iterator[Claim]:
    for what, objective in (("", None), (" that keeps to the limits", Objective(with_slo=False))):
        missed = {name: one.missed(one.best(objective)) for name, one in found.items()}
        worst = min(missed, key=missed.__getitem__)
        yield Claim(
            name=f"recommended over the best of the grid{what} at {GRID_AT:g}{told}: mean e2e, worst ({worst})",
            value=round(missed[worst], 4), goal=0.97,
        )  # fmt: skip
    for metric, label, goal in ((MEAN, "mean e2e", 0.97), (P99, "P99 e2e", 0.95)):
        ratios = {(n, load): one.over(one.found.choice, load, metric) for n, one in found.items() for load in LOADS}
        name, load = min(ratios, key=ratios.__getitem__)
        yield Claim(name=f"recommended over vLLM as it is, 0.5 to 0.9{told}: {label}, worst ({name} at {load:g})",
                    value=round(ratios[name, load], 4), goal=goal)  # fmt: skip
    gains = [math.log(one.over(one.found.choice, GRID_AT, MEAN)) for one in found.values()]
    yield Claim(name=f"recommended over vLLM as it is at {GRID_AT:g}{told}: mean e2e, geometric mean",
                value=round(math.exp(fmean(gains)), 4), goal=1.15)  # fmt: skip


def table(found: Mapping[str, Judged]) -> Table:
    """Return a row for each cell: what was recommended, what it brought, and what would have been best."""
    rows = []
    for name, one in found.items():
        allowed, best = one.best(Objective(with_slo=False)), one.best()
        cells: list[object] = [name, one.found.choice.name]
        for load in LOADS:
            over = [one.over(one.found.choice, load, metric) for metric in (MEAN, P99, TTFT_P90)]
            cells.append(" / ".join(f"{each:.2f}" for each in over))
        for candidate in (allowed, best):
            over = [one.over(candidate, GRID_AT, metric) for metric in (MEAN, P99, TTFT_P90)]
            cells += [candidate.name, " / ".join(f"{each:.2f}" for each in over)]
        rows.append([*cells, one.missed(best)])
    shown = [f"at {load:g}" for load in LOADS]
    columns = ["cell", "recommended", *shown, "best within limits", "it at 0.9", "best of all", "it at 0.9",
               "recommended over best of all"]  # fmt: skip
    return Table(columns, rows, title="mean / P99 / P90 of the TTFT, times better than vLLM as it is")


def _text(cell: object) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def run(runner: Runner, data: Path, names: Sequence[str]) -> Findings:
    """Plan, then judge."""
    found = {name: judged(CELLS[name], data, runner) for name in names}
    metrics, baseline = dict[str, float](), dict[str, float]()
    for name, one in found.items():
        for candidate, runs in one.held.items():
            for load, values in runs.items():
                into, who = (baseline, "") if candidate == DEFAULT else (metrics, f"{candidate.name}.")
                into |= {f"{name}.{who}at_{load:g}.{metric}": values[metric] for metric in (MEAN, P99, TTFT_P90)}
    shown = table(found)
    return Findings(
        tables=[shown],
        claims=[*claims(found)],
        metrics=metrics,
        baselines={DEFAULT.name: baseline},
        config={
            "saturation_per_s": {name: one.saturation_per_s for name, one in found.items()},
            "estimated_over_measured": {n: one.estimated_per_s / one.saturation_per_s for n, one in found.items()},
            "recommended": {name: one.found.choice.name for name, one in found.items()},
            "rejected": {name: dict(one.found.rejected) for name, one in found.items()},
            "columns": list(shown.header),
            "rows": [list(map(_text, row)) for row in shown.rows],
            "failed": {name: {who.name: why for who, why in one.failed.items()} for name, one in found.items()},
        },
        workload=[CELLS[name].base(data).workload for name in names],
    )


def main(argv: Sequence[str]) -> None:
    """Simulate, print, write."""
    parser = argument_parser(__doc__, "jobs")
    simulated.add_cells(parser, CELLS)
    args = parser.parse_args(argv)
    files = {name: [_TRACES[cell.trace]["source"]] for name, cell in CELLS.items()}
    names = simulated.chosen_cells(parser, args, files, QUICK)
    experiment = Experiment(
        id="plan-held-out", title="Does what plan recommends hold on traffic that it has not seen?",
        run=lambda runner: run(runner, args.data, names),
    )  # fmt: skip
    simulated.finish(experiment, args, command(argv, __file__))


if __name__ == "__main__":
    main(sys.argv[1:])
