"""What is a router worth: ours beside those that others ship, on six loads of eight replicas?

Question: how many conversations per second does a cluster carry at an equal P90 of the normalised latency, by who
routes? And at one load, the same for all: how long do requests take?

Method: real schedulers, one for each replica, in virtual time (`vllm_ext.simulation.cluster`). Each router has one
setting for all scenes: that in which it comes, or a row of its own with thresholds that are of use at this size.
Reports are taken every 0.5 s, for llm-d's every 0.05 s. Conversations are drawn by length distributions like those of
public files, or with `--data` from these files, one half of which is held out and served with `--held-out` alone. A
capacity is interpolated between two neighbours of a grid of rates, a tenth apart, around the capacity of `home`; rows
and seeds have the same conversations, and ratios are paired by seed. Latencies are those at 0.9 of the capacity of
`home`. `marginal again` is `marginal` with its first 24 requests elsewhere: by how much it differs is no difference.
Runs that ended are kept in the cache of vllm-ext: interrupted, the same command goes on.

    python benchmarks/cluster/routing.py --quick
    python benchmarks/cluster/routing.py --jobs 2 --out benchmarks/results/routing.json
    python benchmarks/cluster/routing.py --jobs 2 --data DIR --held-out --out benchmarks/results/routing_held_out.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from capacity import Found, search
from cluster_runs import (
    ABLATIONS,
    AGAIN,
    FRESH,
    NORMALISED,
    OLD,
    OURS,
    REPLICAS,
    REPORT_S,
    ROWS,
    WINDOW,
    measured,
)  # fmt: skip
from conversations import FILES, recorded, stated
from decision_cost import Decisions, decision_us
from scenes import AGENTS, CODING, MIXED, SCENES, SLOW, TIER, Options, Scene

from vllm_ext.experiments.runner import RunFailed
from vllm_ext.files import sha256_of
from vllm_ext.report.claim import Claim
from vllm_ext.report.count_progress import CountProgress
from vllm_ext.report.intervals import Ratio, interval
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.points import run_plans
from vllm_ext.simulation.sweep.pools import InProcessPool, Pool, ProcessPool
from vllm_ext.simulation.sweep.store import PointStore

HOME, RAY = "home", "Ray's prefix"
SHOWN = ("e2e_mean_ms", "e2e_p99_ms", "ttft_p99_ms")
ABLATED = (MIXED, AGENTS, CODING)
_MANY = 64
_SHORTER = 8.0
"""How many times shorter the runs of a quick look are."""
Cells = Mapping[tuple[str, str], Mapping[int, Found]]
"""Scene and row -> seed -> what was found."""


@dataclass
class Bench:
    """Where searches run."""

    options: Options
    store: PointStore
    pool: Pool
    progress: CountProgress

    def __post_init__(self) -> None:
        self._done = count(1)

    def search(self, wanted: Mapping[tuple[str, str, int], float]) -> dict[tuple[str, str, int], Found]:
        """Search for scenes, rows and seeds, each around a guess in conversations per second."""
        plans = [
            search(partial(self._point, SCENES[scene], row, seed), NORMALISED, SCENES[scene].limit_ms, guess_per_s)
            for (scene, row, seed), guess_per_s in wanted.items()
        ]
        return dict(zip(wanted, run_plans(plans, self.store, self.pool, self._told), strict=True))

    def _point(self, scene: Scene, row: str, seed: int, rate_per_s: float) -> SimulationSpec:
        return scene.point(row, float(f"{rate_per_s:.6g}"), seed, self.options)

    def _told(self, point: SimulationSpec, *_: object) -> None:
        self.progress.update(next(self._done), f"{getattr(point, 'row', '')}, seed {getattr(point, 'seed', '')}")


def searched(bench: Bench, scenes: Sequence[str], rows: Sequence[str], seeds: Sequence[int]) -> Cells:
    """Search with every row around what `home` carries; with ablations in some scenes only."""
    homes = bench.search({(scene, HOME, seed): SCENES[scene].guess_per_s for scene in scenes for seed in seeds})
    wanted = {
        (scene, row, seed): homes[scene, HOME, seed].rate_per_s
        for scene in scenes
        for row in rows
        if row in ROWS or scene in ABLATED
        for seed in seeds
    }
    cells: dict[tuple[str, str], dict[int, Found]] = {}
    for (scene, row, seed), found in bench.search(wanted).items():
        cells.setdefault((scene, row), {})[seed] = found
    return cells


@dataclass(frozen=True)
class Compared:
    """What was found, as ratios."""

    cells: Cells

    @property
    def scenes(self) -> list[str]:
        """Those that were served."""
        return [*dict.fromkeys(scene for scene, _ in self.cells)]

    def rows(self, scene: str) -> list[str]:
        """Return who served one."""
        return [row for one, row in self.cells if one == scene]

    def capacity(self, scene: str, row: str) -> float:
        """Return the mean over the seeds, in conversations per second."""
        return fmean(found.rate_per_s for found in self.cells[scene, row].values())

    def bounded(self, scene: str, row: str) -> bool:
        """Return whether the limit was crossed with every seed."""
        return all(found.bounded for found in self.cells[scene, row].values())

    def ratio(self, scene: str, row: str, to: str) -> Ratio:
        """Return the capacity of a row over that of another."""
        pairs = self._pairs(scene, row, to)
        return interval([math.log(one.rate_per_s / other.rate_per_s) for one, other in pairs])

    def longer(self, scene: str, row: str, than: str, metric: str) -> Ratio:
        """Return a latency of a row over that of another, at the fixed load."""
        return interval(
            [math.log(one.fixed[metric] / other.fixed[metric]) for one, other in self._pairs(scene, row, than)]
        )

    def latency(self, scene: str, row: str, metric: str) -> float:
        """Return the mean over the seeds at the fixed load."""
        return fmean(found.fixed[metric] for found in self.cells[scene, row].values())

    def best(self, scene: str) -> str:
        """Return who carries most, of the rows with the setting of all."""
        return max((row for row in self.rows(scene) if row in ROWS and row != AGAIN), key=partial(self.capacity, scene))

    def same(self, scene: str) -> float:
        """Return the factor by which the same router's capacity differs from itself at most, over the seeds."""
        if AGAIN not in self.rows(scene) or OURS not in self.rows(scene):
            return 1.0
        return max(math.exp(abs(math.log(one.rate_per_s / other.rate_per_s)))
                   for one, other in self._pairs(scene, AGAIN, OURS))  # fmt: skip

    def no_better(self, scene: str) -> list[str]:
        """Return the rows from which `marginal` does not differ by more than from itself."""
        others = [row for row in self.rows(scene) if row in ROWS and row not in (OURS, AGAIN)]
        ratios = {row: self.ratio(scene, OURS, row).value for row in others if OURS in self.rows(scene)}
        return [row for row, ratio in ratios.items() if abs(math.log(ratio)) <= math.log(self.same(scene))]

    def _pairs(self, scene: str, row: str, other: str) -> list[tuple[Found, Found]]:
        ours, theirs = self.cells[scene, row], self.cells[scene, other]
        return [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]


def claims(found: Compared) -> Iterator[Claim]:
    """Hold `marginal` to the goals, as far as scenes and rows were run."""
    for other, goal, scenes in (
        (RAY, 1.15, (AGENTS, TIER, MIXED, SLOW)),
        ("round-robin", 1.4, (AGENTS, CODING, MIXED)),
    ):
        for scene in _with(found, scenes, OURS, other):
            yield _claim(f"{scene}: capacity, {OURS} over {other}", found.ratio(scene, OURS, other), goal,
                         _known(found, scene, other))  # fmt: skip
    for scene in _with(found, SCENES, OURS):
        best = found.best(scene)
        yield _claim(f"{scene}: capacity, {OURS} over the best row", found.ratio(scene, OURS, best), 0.95,
                     f"the best is {best}; {_known(found, scene, best)}")  # fmt: skip
    for scene in _with(found, (MIXED,), OURS, HOME):
        yield _claim(
            f"{scene}: mean e2e at 0.9, {HOME} over {OURS}", found.longer(scene, HOME, OURS, "e2e_mean_ms"), 1.2
        )
        ttft = found.longer(scene, OURS, HOME, "ttft_p99_ms")
        again = found.longer(scene, AGAIN, OURS, "ttft_p99_ms") if AGAIN in found.rows(scene) else "not run"
        yield _claim(f"{scene}: P99 TTFT at 0.9, {OURS} over {HOME}", ttft, 1.0, f"{AGAIN} over {OURS}: {again}", "<=")
    for scene in _with(found, ABLATED, OLD, FRESH):
        yield _claim(f"{scene}: capacity, reports every second over every 0.1 s", found.ratio(scene, OLD, FRESH), 0.94)


def _with(found: Compared, scenes: Iterable[str], *rows: str) -> list[str]:
    return [scene for scene in scenes if {*rows} <= {*found.rows(scene)}]


def _known(found: Compared, scene: str, other: str) -> str:
    """Return what limits a ratio of capacities."""
    held = "" if found.bounded(scene, other) else f"; {other} meets the limit at no rate tried, the lowest is taken"
    return f"the same router differs from itself by a factor of up to {found.same(scene):.3f}{held}"


def _claim(name: str, ratio: Ratio, goal: float, facts: str = "", op: str = ">=") -> Claim:
    said = f"{ratio}; {facts}" if facts else str(ratio)
    return Claim(name=name, value=round(ratio.value, 4), op=op, goal=goal, facts=said)


def table(found: Compared, scene: str) -> Table:
    """Return a row for each router: capacity, and latencies at the fixed load."""
    header = ["router", "conversations/s", "over round-robin", *(f"{one} at 0.9" for one in SHOWN), "moved at 0.9"]
    rows = []
    for row in found.rows(scene):
        over = found.ratio(scene, row, "round-robin") if "round-robin" in found.rows(scene) else ""
        carried = f"{found.capacity(scene, row):.4g}{'' if found.bounded(scene, row) else ' (at most)'}"
        rows.append([row, carried, str(over), *(found.latency(scene, row, one) for one in SHOWN),
                     found.latency(scene, row, "moved_fraction")])  # fmt: skip
    one = SCENES[scene]
    title = f"{scene}: {one.description}; P90 of the normalised latency at most {one.limit_ms:g} ms/token"
    return Table(header, rows, title=title)


def flat(found: Compared, row: str) -> dict[str, float]:
    """Return what a row measured, by names with units."""
    metrics = {}
    for scene in _with(found, found.scenes, row):
        metrics[f"{scene}.capacity_conversations_per_s"] = found.capacity(scene, row)
        metrics |= {
            f"{scene}.at_0.9.{one}": found.latency(scene, row, one) for one in (NORMALISED, *SHOWN, "moved_fraction")
        }
    return metrics


def result(found: Compared, args: argparse.Namespace, said: str, decision: Mapping[str, Decisions]) -> Result:
    """Return what was found, as a result."""
    scenes = {name: SCENES[name] for name in found.scenes}
    kinds = dict.fromkeys(kind for one in scenes.values() for kind in one.shares)
    us, p99_us, beside_us = decision[OURS]
    cost = Claim(name=f"a decision of {OURS} among {_MANY} replicas, in microseconds", value=round(us, 1), op="<=",
                 goal=200.0, facts=f"P99 {p99_us:.0f}; {us / beside_us:.2f} times ten thousand additions")  # fmt: skip
    rows = [*dict.fromkeys(row for _, row in found.cells)]
    tables = {scene: table(found, scene) for scene in scenes}
    return Result(
        name="routing",
        command=said,
        config={
            "replicas": REPLICAS, "report_s": REPORT_S, "seeds": args.seeds, "window": WINDOW, "quick": args.quick,
            "shorter": _SHORTER if args.quick else 1.0,
            "scenes": {name: _stated(one) for name, one in scenes.items()},
            "kinds": stated(kinds) if args.data is None else dict.fromkeys(kinds, "recorded"),
            "same_router_factor": {scene: found.same(scene) for scene in scenes},
            "no_difference_to_marginal": {scene: found.no_better(scene) for scene in scenes},
            "decision_us": {row: times._asdict() for row, times in decision.items()},
            "tables": {scene: [list(one.header), *map(list, one.rows)] for scene, one in tables.items()},
        },
        seed=min(args.seeds),
        workload=_served(args, kinds),
        metrics={**flat(found, OURS), "decision_64_replicas_us": us},
        baselines={row: flat(found, row) for row in rows if row != OURS},
        claims=[*claims(found), cost],
        details={f"{scene}, {row}, {seed}": {"capacity_per_s": one.rate_per_s, "runs": one.runs, "bounded": one.bounded,
                                             **one.fixed}
                 for (scene, row), by_seed in found.cells.items() for seed, one in by_seed.items()},
    )  # fmt: skip


def _served(args: argparse.Namespace, kinds: Iterable[str]) -> Workload:
    """Return what was served: files, or what the distributions say with these seeds."""
    if args.data is None:
        said = json.dumps([stated(kinds), args.seeds])
        return Workload(name=f"made up: {', '.join(kinds)}", rows=0, sha256=hashlib.sha256(said.encode()).hexdigest())
    paths = {kind: args.data / FILES[kind][0] for kind in kinds}
    rows = sum(len(recorded(path, kind, held_out=args.held_out)) for kind, path in paths.items())
    digests = "".join(sha256_of(path) for path in paths.values())
    half = "held out" if args.held_out else "for designing"
    return Workload(name=f"{' and '.join(path.name for path in paths.values())}, the half {half}", rows=rows,
                    sha256=hashlib.sha256(digests.encode()).hexdigest())  # fmt: skip


def _stated(scene: Scene) -> dict[str, Any]:
    names = ("description", "shares", "model", "device", "tier_gib", "slow", "limit_ms", "until_s")
    return {name: getattr(scene, name) for name in names}


def _listed(known: Iterable[str]) -> Any:
    def names(text: str) -> list[str]:
        found = [one.strip() for one in text.split(";")]
        if unknown := [one for one in found if one not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]}: must be among {'; '.join(known)}")
        return found

    return names


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argument_parser(__doc__, "jobs", "cache")
    parser.add_argument("--scenes", type=_listed(SCENES), help=f"semicolon list of {'; '.join(SCENES)} (default: all)")
    every = [*ROWS, *ABLATIONS]
    parser.add_argument("--rows", type=_listed(every), help=f"semicolon list of {'; '.join(every)} (default: all)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="how many, from --seed on (default: 3)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of public files to draw conversations from")
    parser.add_argument("--held-out", action="store_true", help="with --data: the half that decides at the end")
    args = parser.parse_args(argv)
    if args.held_out and args.data is None:
        parser.error("--held-out: needs --data")
    quick = args.quick
    args.scenes = args.scenes or ([AGENTS] if quick else [*SCENES])
    args.rows = args.rows or (["round-robin", HOME, OURS] if quick else every)
    args.seeds = [args.seed + number for number in range(1 if quick else args.seeds)]
    return args


def main(argv: Sequence[str]) -> None:
    """Simulate, print, write."""
    args = parsed(argv)
    options = Options(data=args.data, held_out=args.held_out, shorter=_SHORTER if args.quick else 1.0)
    with ExitStack() as stack:
        store = stack.enter_context(PointStore(args.cache))
        pool = stack.enter_context(InProcessPool(measured) if args.jobs == 1 else ProcessPool(measured, args.jobs))
        progress = stack.enter_context(CountProgress(None, label="routing", unit="run"))
        try:
            cells = searched(Bench(options, store, pool, progress), args.scenes, args.rows, args.seeds)
        except RunFailed as failed:
            raise SystemExit(str(failed)) from failed
    found = Compared(cells)
    decision = {row: decision_us(row, _MANY) for row in (HOME, OURS)}
    made = result(found, args, command(argv, __file__), decision)
    emit(made, [table(found, scene) for scene in found.scenes], args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
