"""What does an order of service bring over the best vLLM there is, and both over vLLM as it comes?

Question: on real lengths, at 0.8, 0.9 and 1.0 of the rate that vLLM carries as it comes on that device, how much lower
are mean and P99 of the end-to-end latency of vLLM with its best flags, and of a system of ours with the best flags?

Method: the real schedulers in virtual time. For each workload and device the search of `vllm-ext plan` chooses the
flags of vLLM alone and, apart from that, of the best of our systems, on seeds of its own. Then nine servers serve the
same requests at the same times, seed by seed: vLLM as it comes, the same with other seeds (the A/A pair), vLLM tuned,
`alise` as it comes, `alise` with the flags of vLLM tuned, ours tuned, and with its flags vLLM, whose TTFT they may make
longer than the search allows, `alise` for the tail (gamma 1) and `oracle-alise`, which sees true lengths. A ratio is
vLLM's value over the server's, above 1 is better; intervals are Student's t over the seeds' logarithms.

With --predicted also: what lengths are worth, and what it costs to let first tokens go first. Half of a file of chats
is learned by the shipped predictor, the other half served by `alise` with the flags of ours tuned, which knows what has
ended, or what the predictor said, or what it said of another request, or the truth; and by `alise-ttft` with 64 GiB of
host memory. Runs that ended are kept in the cache of vllm-ext: interrupted, the same command goes on.

    python benchmarks/simulated/tuning.py --data DIR --quick
    python benchmarks/simulated/tuning.py --data DIR --jobs 2 --predicted --out benchmarks/results/tuning.json
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import simulated
from predicted_lengths import make
from tuning_cells import CELLS, Cell

from vllm_ext.envs import cache_dir
from vllm_ext.experiments.experiment import Experiment, Findings
from vllm_ext.experiments.grid import Grid
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import Claim
from vllm_ext.report.intervals import interval
from vllm_ext.report.results import argument_parser, command
from vllm_ext.report.table import Table
from vllm_ext.simulation.plan import search
from vllm_ext.simulation.plan.candidates import AS_IT_IS, DEFAULT, Candidate, System
from vllm_ext.simulation.plan.evidence import MEAN, P99, TTFT_P90, Objective
from vllm_ext.simulation.plan.runs import Bench, Part, Parts, at
from vllm_ext.simulation.plan.saturation import saturation
from vllm_ext.simulation.spec import SimulationSpec, with_values

VLLM, AGAIN, TUNED, OURS = "vLLM", "vLLM, other seeds", "vLLM tuned", "ours tuned"
ALISE, ALISE_TUNED = "alise", "alise, flags of vLLM tuned"
SAME_FLAGS = "vLLM, flags of ours tuned"
TAIL, ORACLE = "alise for the tail, flags of ours tuned", "oracle-alise, flags of ours tuned"
HISTORY, PREDICTED, ANOTHERS = "what has ended", "the predictor", "the predictor, of another request"
TRUE, FIRST_TOKENS = "true lengths", "what has ended, alise-ttft"
LOADS, QUICK_LOADS = (0.8, 0.9, 1.0), (0.9,)
LENGTHS_AT = (1.0, 1.2)
SEEDS, REQUESTS, QUICK_REQUESTS = 5, 1200, 300
QUICK = ("sharegpt, opt-13b, a100-40",)
_SEARCH_SEED, _OTHER_SEEDS = 5000, 1000
_ALISE = System(name="alise", system="alise", flags=("--scheduler-cls", "alise"))
_TAIL = System(name="alise, for the tail", system="alise", options={"options.ordering.gamma": 1.0})
_ORACLE = System(name="oracle-alise", system="oracle-alise", options={"options.allow_oracle": True})
_TTFT = System(name="alise-ttft", system="alise-ttft", options={"options.kv_tier": {"gib": 64.0}})


@dataclass(frozen=True)
class Servers:
    """What is compared in a cell, and at which rate it is saturated."""

    rate_per_s: float
    by_name: Mapping[str, Candidate]


def found_by_search(cell: Cell, data: Path, runner: Runner) -> Servers:
    """Search a cell as ``vllm-ext plan`` does, on seeds that no row of the table has."""
    count = QUICK_REQUESTS if runner.quick else REQUESTS
    part = Part(0, count, runner.seed + _SEARCH_SEED)
    bench = Bench(cell.base(data, part.seed), runner.store, runner.pool, lambda *_: None)
    parts = Parts(part, part, endless=True)
    saturated = saturation(bench, parts, 1.0)
    coarse = search.search(bench, parts, Objective(with_slo=False), saturated)
    return Servers(saturated.rate_per_s, {
        VLLM: DEFAULT, AGAIN: DEFAULT, TUNED: coarse.vllm, ALISE: Candidate(system=_ALISE),
        ALISE_TUNED: replace(coarse.vllm, system=_ALISE), OURS: coarse.ours,
        SAME_FLAGS: replace(coarse.ours, system=AS_IT_IS),
        TAIL: replace(coarse.ours, system=_TAIL), ORACLE: replace(coarse.ours, system=_ORACLE),
    })  # fmt: skip


def spec_of(cell: Cell, data: Path, servers: Servers, name: str, load: float, count: int, seed: int) -> SimulationSpec:
    """Return a run of a server at a load."""
    base = cell.base(data, seed)
    if name == ORACLE:
        base = with_values(base, {"workload.announce": "hidden"})
    seed += _OTHER_SEEDS if name == AGAIN else 0
    return _at_load(base, servers, servers.by_name[name], load, Part(0, count, seed))


def _at_load(base: SimulationSpec, servers: Servers, candidate: Candidate, load: float, part: Part) -> SimulationSpec:
    rate = float(f"{load * servers.rate_per_s:.6g}")
    return with_values(at(base, candidate, part, rate), {"record.windows": 0})


def spec_of_lengths(
    cell: Cell, files: tuple[Path, Path], servers: Servers, who: str, load: float, count: int, seed: int
) -> SimulationSpec:
    """Return a run of those requests of which the predictor said something beforehand."""
    asked = {"engine.options.prediction": {"sources": ["retrieval", "history"]}}
    system, source, announce, options = {
        HISTORY: (_ALISE, files[0], "none", {}),
        PREDICTED: (_ALISE, files[0], "predicted", asked),
        ANOTHERS: (_ALISE, files[1], "predicted", asked),
        TRUE: (_ORACLE, files[0], "hidden", {}),
        FIRST_TOKENS: (_TTFT, files[0], "none", {}),
    }[who]
    candidate = replace(servers.by_name[OURS], system=system)
    changes = {"workload.source": str(source), "workload.announce": announce, **options}
    base = with_values(cell.base(files[0].parent, seed), changes)
    return _at_load(base, servers, candidate, load, Part(0, count, seed))


def ratios(grid: Grid, scene: str, name: str, base: str, metric: str) -> list[float]:
    """Return how many times lower a server's metric is than a baseline's, seed by seed."""
    return [1 / one for one in grid.over(scene, name, base, metric)]


def shown_ratio(grid: Grid, scene: str, name: str, base: str, metric: str) -> str:
    """Return the geometric mean of `ratios` with its interval, as tables show it."""
    return str(interval([math.log(one) for one in ratios(grid, scene, name, base, metric)]))


def geometric(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(fmean(map(math.log, values)))


_WHERE = {False: "papers' models on A100", True: "8B and 70B on H100"}
_OVER_VLLM: Sequence[tuple[bool, float, str, float]] = (
    (False, 0.8, MEAN, 1.07), (False, 0.9, MEAN, 1.14), (False, 1.0, MEAN, 1.6),
    (True, 0.8, MEAN, 1.10), (True, 0.9, MEAN, 1.15), (True, 0.8, P99, 1.0), (True, 0.9, P99, 1.0),
)  # fmt: skip
"""Of the five cells of papers or of the four modern ones: load, metric, and the least geometric mean."""
SHOWN = (MEAN, P99, TTFT_P90)
NORMALISED = "normalised_latency_mean_ms_per_token"
_NAMES = {MEAN: "mean e2e", P99: "P99 e2e", TTFT_P90: "P90 TTFT", NORMALISED: "mean normalised"}


def claims(grid: Grid, names: Sequence[str], loads: Sequence[float]) -> Iterator[Claim]:
    """Hold what was found to the goals."""

    def means(base: str, modern: bool | None, load: float, metric: str) -> dict[str, float]:
        return {
            name: geometric(ratios(grid, f"{name} at {load:g}", OURS, base, metric))
            for name in names
            if modern in (None, CELLS[name].modern)
        }

    for modern, load, metric, goal in _OVER_VLLM:
        if load in loads and (found := means(VLLM, modern, load, metric)):
            yield Claim(name=f"{OURS} over {VLLM} at {load:g}, {_WHERE[modern]}: {_NAMES[metric]}, geometric mean",
                        value=round(geometric([*found.values()]), 4), goal=goal)  # fmt: skip
    for load in loads:
        for metric in (MEAN, P99):
            found = means(VLLM, None, load, metric)
            worst = min(found, key=found.__getitem__)
            yield Claim(name=f"{OURS} over {VLLM} at {load:g}: {_NAMES[metric]}, worst cell ({worst})",
                        value=round(found[worst], 4), goal=1.0)  # fmt: skip
        for base in (TUNED, SAME_FLAGS):
            found = means(base, None, load, MEAN)
            worst = min(found, key=found.__getitem__)
            yield Claim(name=f"{OURS} over {base} at {load:g}: {_NAMES[MEAN]}, worst cell ({worst})",
                        value=round(found[worst], 4), goal=0.97)  # fmt: skip
    if 1.0 in loads:
        for base in (TUNED, SAME_FLAGS):
            for metric, goal in ((MEAN, 1.10), (P99, 0.9)):
                found = means(base, None, 1.0, metric)
                yield Claim(name=f"{OURS} over {base} at 1: {_NAMES[metric]}, geometric mean",
                            value=round(geometric([*found.values()]), 4), goal=goal)  # fmt: skip


def tables(grid: Grid, names: Sequence[str], servers: Mapping[str, Servers], loads: Sequence[float]) -> Iterator[Table]:
    """Yield a table of the papers' cells and one of the others: each server over vLLM as it comes, cell by cell."""
    for modern, where in _WHERE.items():
        of = [name for name in names if CELLS[name].modern == modern]
        rows: list[list[str]] = []
        for name in of:
            cell = f"{name}; 1 is {servers[name].rate_per_s:.4g}/s"
            for server, candidate in list(servers[name].by_name.items())[1:]:
                shown = [_shown(grid, f"{name} at {load:g}", server) for load in loads]
                rows.append([cell, server, candidate.name, *shown])
        for server in [*servers[of[0]].by_name][1:] if len(of) > 1 else []:
            means = [
                " / ".join(
                    f"{geometric([geometric(ratios(grid, f'{n} at {load:g}', server, VLLM, m)) for n in of]):.2f}"
                    for m in SHOWN
                )
                for load in loads
            ]
            rows.append(["geometric mean", server, "", *means])
        if rows:
            header = ["cell", "server", "what it is", *(f"at {load:g}" for load in loads)]
            yield Table(header, rows, title=where)


def _shown(grid: Grid, scene: str, server: str) -> str:
    mean, *others = SHOWN
    values = [f"{geometric(ratios(grid, scene, server, VLLM, metric)):.2f}" for metric in others]
    on_time = [grid.mean(scene, one, "on_time_fraction") for one in (server, VLLM)]
    shown = [shown_ratio(grid, scene, server, VLLM, mean), *values, f"{100 * (on_time[0] - on_time[1]):+.0f}"]
    return " / ".join(shown)


_OF_LENGTHS = (MEAN, P99, NORMALISED, TTFT_P90)


def lengths_table(grid: Grid, names: Sequence[str]) -> Table:
    """Return what lengths are worth, and first tokens: rows over `alise`, which knows what has ended."""
    rows = []
    for name in names:
        for who in (PREDICTED, ANOTHERS, TRUE, FIRST_TOKENS):
            scenes = [f"{name}, lengths, at {load:g}" for load in LENGTHS_AT]
            shown = (shown_ratio(grid, scene, who, HISTORY, metric) for scene in scenes for metric in _OF_LENGTHS)
            rows.append([name, who, *shown])
    columns = [f"{_NAMES[metric]} at {load:g}" for load in LENGTHS_AT for metric in _OF_LENGTHS]
    return Table(["cell", "lengths by", *columns], rows, title="lengths")


def run(runner: Runner, data: Path, names: Sequence[str], predicted: Mapping[str, tuple[Path, Path]]) -> Findings:
    """Search each cell, then measure what was found.

    Args:
        runner: Where it is run.
        data: Recorded workloads.
        names: Of cells.
        predicted: By cell, its files with predictions, own ones and another request's; empty for none.
    """
    loads, seeds = QUICK_LOADS if runner.quick else LOADS, runner.seeds(SEEDS)
    count = QUICK_REQUESTS if runner.quick else REQUESTS
    servers = {name: found_by_search(CELLS[name], data, runner) for name in names}
    specs = {
        (f"{name} at {load:g}", server): (
            lambda seed, name=name, load=load, server=server: spec_of(
                CELLS[name], data, servers[name], server, load, count, seed
            )
        )
        for name in names
        for load in loads
        for server in servers[name].by_name
    }
    specs |= {
        (f"{name}, lengths, at {load:g}", who): (
            lambda seed, name=name, load=load, who=who: spec_of_lengths(
                CELLS[name], predicted[name], servers[name], who, load, count, seed
            )
        )
        for name in predicted
        for load in LENGTHS_AT
        for who in (HISTORY, PREDICTED, ANOTHERS, TRUE, FIRST_TOKENS)
    }
    grid = runner.grid(specs, seeds)
    kept = [MEAN, P99, TTFT_P90, NORMALISED, "on_time_fraction", "tbt_max_ms", "preemptions"]
    flat = grid.means({scene: kept for scene, _ in grid.cells})
    shown = [*tables(grid, names, servers, loads)]
    shown += [lengths_table(grid, [*predicted])] if predicted else []
    return Findings(
        tables=shown,
        claims=[*claims(grid, names, loads)],
        metrics=flat[OURS],
        baselines={name: values for name, values in flat.items() if name != OURS},
        config={
            "seeds": seeds, "requests": count,
            "saturation_per_s": {name: found.rate_per_s for name, found in servers.items()},
            "tables": {one.title: [one.header, *one.rows] for one in shown},
        },
        workload=[
            CELLS[name].base(data, seeds[0]).workload.model_copy(update={"num_requests": count}) for name in names
        ],
    )  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Simulate, print, write."""
    parser = argument_parser(__doc__, "jobs")
    parser.add_argument("--predicted", action="store_true", help="also measure what lengths are worth on chats")
    simulated.add_cells(parser, CELLS)
    args = parser.parse_args(argv)
    names = simulated.chosen_cells(parser, args, {name: cell.files for name, cell in CELLS.items()}, QUICK)
    chats = [name for name in names if CELLS[name].texts] if args.predicted else []
    files = {name: make(args.data / CELLS[name].lengths.path, cache_dir() / "tuning") for name in chats}
    experiment = Experiment(
        id="tuning", title="What does an order bring over the best vLLM there is?",
        run=lambda runner: run(runner, args.data, names, files),
    )  # fmt: skip
    simulated.finish(experiment, args, command(argv, __file__))


if __name__ == "__main__":
    main(sys.argv[1:])
