"""Does the order of service of `alise` and `auto` pay on real traffic, over vLLM at its default token budget?

Question: for loads around vLLM's own saturation, how much better or worse is each system than it, in the mean, in
the tail and cell by cell, and is that more than noise?

Method: the real schedulers in virtual time, with lengths of a folder of real data. Load 1.0 of a workload is what vLLM,
with its default budget and a watermark of 5 %, ends per second of a backlog that lasts: the same run cut off at a
quarter and at the end of the workload's duration, the difference over the time between. Every system then serves the
same requests at the same times, seed by seed; the A/A row is the baseline with other seeds, so its interval is what
seeds alone do. A value is that vLLM's over the system's, above 1 is better; intervals are Student's t over the seeds'
logarithms. Runs that ended are kept in the cache of vllm-ext: interrupted, the same command goes on.

    python benchmarks/simulated/ordering.py --data DIR --quick
    python benchmarks/simulated/ordering.py --data DIR --jobs 2 --out benchmarks/results/ordering.json
    python benchmarks/simulated/ordering.py --data DIR --predicted --out benchmarks/results/ordering_predicted.json

With ``--predicted`` each request is one of which the predictor that ships, having learned others of its file, said
something beforehand.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import simulated
from ordering_report import Cells, claims, compare, kind, means, tables, worst
from ordering_scenes import AGAIN, MEASURES, NEED_PREDICTIONS, SCENES, SYSTEMS, TUNED, WATERMARK, Scene

from vllm_ext.envs import cache_dir
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.common_flags import at_least
from vllm_ext.report.intervals import MIN_SEEDS
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table

LOADS = (0.7, 0.9, 1.0, 1.1, 1.2)
SEEDS = 5
QUICK = ("sharegpt",), (TUNED, AGAIN, "fcfs-tuned", "alise"), (1.0,)
WITH_PREDICTIONS = (TUNED, AGAIN, "alise", "alise, lengths within 30 %", *NEED_PREDICTIONS)
QUICK_SHARE = 0.1
"""Of durations."""
_WARM = 0.25
"""Share of a lasting backlog that is not counted."""


def saturations(scenes: Mapping[str, Scene], data: Path, runner: Runner) -> dict[str, float]:
    """Return requests/s that vLLM serves, with its default budget, of each workload while there is a queue.

    Raises:
        SystemExit: runs failed, or a backlog did not last.
    """
    share = QUICK_SHARE if runner.quick else 1.0
    spans = {name: (scene.duration_s * share * _WARM, scene.duration_s * share) for name, scene in scenes.items()}
    runs = {
        f"{name}, backlog for {span:g} s": scene.backlogged(data, TUNED, runner.seed, span)
        for name, scene in scenes.items()
        for span in spans[name]
    }
    found = runner.metrics(runs)
    rates = {}
    for name, (start, end) in spans.items():
        short, long = (found[f"{name}, backlog for {span:g} s"] for span in (start, end))
        if not long["unfinished_requests"]:
            raise SystemExit(f"{name}: its backlog ended within {end:g} s, so that nothing is saturated")
        if (ended := long["requests"] - short["requests"]) <= 0:
            raise SystemExit(f"{name}: no request ended between {start:g} and {end:g} s; its duration is too short")
        rates[name] = ended / (end - start)
    return rates


def measured(
    scenes: Mapping[str, Scene],
    rates: Mapping[str, float],
    asked: argparse.Namespace,
    seeds: Sequence[int],
    systems: Sequence[str],
    runner: Runner,
) -> Cells:
    """Simulate what is not kept from before; cells by workload, load, system and seed.

    Raises:
        SystemExit: runs failed, which are named; the others are kept.
    """
    runs = {}
    for name, scene in scenes.items():
        duration_s = lasts(asked, scene)
        for load in scene.loads or asked.loads:
            rate = float(f"{load * rates[name]:.6g}")
            for system in systems:
                for seed in seeds:
                    made = scene.spec(asked.data, system, seed, rate_per_s=rate, duration_s=duration_s)
                    runs[name, load, system, seed] = made
    return runner.metrics(runs)


def lasts(asked: argparse.Namespace, scene: Scene) -> float:
    """Return the seconds in which requests arrive."""
    return float(asked.duration or scene.duration_s * (QUICK_SHARE if asked.quick else 1.0))


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what it names must be there."""
    parser = argument_parser(__doc__, "jobs")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of recorded workloads")
    parser.add_argument("--seeds", type=at_least(1), help=f"how many seeds (default: {SEEDS}; quick: 1)")
    parser.add_argument("--duration", type=float, metavar="S", help="seconds of arrivals (default: by workload)")
    parser.add_argument("--workloads", help=f"comma list of {', '.join(SCENES)} (default: all)")
    parser.add_argument("--systems", help=f"semicolon list of {'; '.join(SYSTEMS)} (default: all)".replace("%", "%%"))
    parser.add_argument("--loads", help=f"comma list (default: {', '.join(map(str, LOADS))})")
    parser.add_argument("--predicted", action="store_true", help="with lengths by the predictor, where there are texts")
    args = parser.parse_args(argv)
    every = tuple(name for name, scene in SCENES.items() if scene.texts or not args.predicted)
    without = tuple(name for name in SYSTEMS if name not in NEED_PREDICTIONS)
    quick = QUICK if args.quick else (every, WITH_PREDICTIONS if args.predicted else without, LOADS)
    args.workloads = args.workloads.split(",") if args.workloads else list(quick[0])
    args.systems = [one.strip() for one in args.systems.split(";")] if args.systems else list(quick[1])
    for option, given, known in (("workloads", args.workloads, SCENES), ("systems", args.systems, SYSTEMS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"--{option}={unknown[0]}: must be among {', '.join(known)}")
    try:
        args.loads = [float(load) for load in args.loads.split(",")] if args.loads else list(quick[2])
    except ValueError:
        parser.error(f"--loads={args.loads}: must be numbers with commas between them")
    for name in () if args.predicted else NEED_PREDICTIONS:
        if name in args.systems:
            parser.error(f"--systems={name}: needs --predicted")
    for name in args.workloads if args.predicted else ():
        if name not in every:
            parser.error(f"--workloads={name}: has no texts to predict from; must be among {', '.join(every)}")
    args.seeds = args.seeds if args.seeds is not None else (1 if args.quick else SEEDS)
    if (least := min(args.loads)) <= 0:
        parser.error(f"--loads={least}: must be greater than 0")
    for name in args.workloads:
        if missing := SCENES[name].missing(args.data):
            parser.error(f"--data={args.data}: has no {missing[0]}, which {name} needs")
    return args


def main(argv: Sequence[str]) -> None:
    """Simulate, print, write."""
    args = parsed(argv)
    scenes = {name: SCENES[name] for name in args.workloads}
    if args.predicted:
        folder = cache_dir() / "ordering"
        scenes = {name: scene.with_predictions(args.data, folder) for name, scene in scenes.items()}
    seeds = [args.seed + number for number in range(args.seeds)]
    systems = list(dict.fromkeys([TUNED, AGAIN, *args.systems]))
    with simulated.runner(args, "ordering") as runner:
        rates = saturations(scenes, args.data, runner)
        cells = measured(scenes, rates, args, seeds, systems, runner)
    compared = compare(cells)
    shown = [system for system in systems if system != TUNED]
    values = means(compared)
    flat: dict[str, dict[str, float]] = {system: {} for system in systems}
    for name, load, system in dict.fromkeys(key[:3] for key in cells):
        for m in MEASURES:
            flat[system][f"{name}.{load:g}.{m.metric}"] = mean(
                cells[name, load, system, one][m.metric] for one in seeds
            )
    for (name, load, system, measure), one in compared.items():
        flat[system][f"{name}.{load:g}.{measure}.{kind(measure)}"] = one.value
        if len(seeds) >= MIN_SEEDS:
            flat[system] |= {f"{name}.{load:g}.{measure}.low": one.low, f"{name}.{load:g}.{measure}.high": one.high}
    for (load, system, measure), value in values.items():
        flat[system][f"all.{load:g}.{measure}.{kind(measure)}"] = value
    flat = {system: {key: float(f"{value:.5g}") for key, value in found.items()} for system, found in flat.items()}
    own = next(system for system in ("alise", "auto", *shown) if system in systems)
    digests = [hashlib.sha256((args.data / scene.path).read_bytes()).hexdigest() for scene in scenes.values()]
    result = Result(
        name="ordering",
        command=command(argv, __file__),
        config={
            "seeds": seeds,
            "systems": systems,
            "loads": args.loads,
            "duration_s": {name: lasts(args, scene) for name, scene in scenes.items()},
            "predicted": args.predicted,
            "saturation_requests_per_s": rates,
            "hardware": {name: scene.hardware.model_dump(mode="json") for name, scene in scenes.items()},
            "watermark": WATERMARK,
            "quick": args.quick,
        },
        seed=args.seed,
        workload=Workload(
            name=", ".join(scenes), rows=len(cells), sha256=hashlib.sha256("".join(digests).encode()).hexdigest()
        ),
        metrics=flat[own],
        baselines={system: found for system, found in flat.items() if system != own},
        claims=claims(compared, scenes),
    )
    saturation = Table(["workload", "load 1.0, requests/s"], list(rates.items()))
    emit(result, [saturation, *tables(compared, values, shown), worst(compared, shown)], args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
