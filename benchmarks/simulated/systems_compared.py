"""Is `auto` as good as each single system at what that one is for?

Question: on loads that the single systems were made for, and on mixtures of them, is `auto` beaten by any of them on
that system's own measure, and is it better than upstream tuned?

Method: the real schedulers in virtual time. Each scene is a load with the measures that matter there; every system
serves the same requests at the same times, with the same hints (objectives, and announced lengths where the scene has
them, with an error). The step-time models start from a profile of the simulated hardware. Measures are means over
seeds. Runs that ended are kept in the cache of vllm-ext: interrupted, the same command goes on.

    python benchmarks/simulated/systems_compared.py --quick
    python benchmarks/simulated/systems_compared.py --jobs 2 --out benchmarks/results/systems_compared.json
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from statistics import mean

from parallel import simulated
from systems_scenes import SCENES, SYSTEMS, Measure, Scene

from vllm_ext.report.results import Goal, Result, Workload, argument_parser, command, emit, format_table

AUTO, TUNED = "auto", "upstream tuned"
TOLERANCE = 0.02
Found = Mapping[tuple[str, str], Mapping[str, float]]
"""Scene and system -> measure -> mean over seeds."""


def run(scenes: Sequence[Scene], systems: Sequence[str], seeds: Sequence[int], jobs: int, *, quick: bool) -> Found:
    """Simulate what is not kept from before, ``jobs`` runs at a time.

    Raises:
        SystemExit: runs failed, which are named; the others are kept.
    """
    runs = {
        f"{scene.name}, {name}, seed {seed}": scene.spec(name, seed, quick=quick)
        for scene in scenes
        for name in systems
        for seed in seeds
    }
    metrics = simulated(runs, jobs, label="systems")
    return {
        (scene.name, name): {
            measure.name: mean(metrics[f"{scene.name}, {name}, seed {seed}"][measure.metric] for seed in seeds)
            for measure in scene.measures
        }
        for scene in scenes
        for name in systems
    }


def margin(measure: Measure, ours: float, theirs: float) -> float:
    """Return how much better ours is, as a factor: above 1 is better, whichever direction better is."""
    low, high = (theirs, ours) if measure.higher else (ours, theirs)
    return (high + measure.floor) / (low + measure.floor)


def goals(scenes: Sequence[Scene], found: Found) -> list[Goal]:
    """Hold `auto` to the system whose own measure it is, and to upstream tuned."""
    result = []
    for scene in scenes:
        for measure in (m for m in scene.measures if m.owner):
            ours = found[scene.name, AUTO][measure.name]
            for other, least in ((measure.owner, 1 - TOLERANCE), (TUNED, 1.0)):
                theirs = found[scene.name, other][measure.name]
                result.append(
                    Goal(
                        metric=f"{scene.name}: {measure.name}, how many times better auto is than {other}",
                        value=round(margin(measure, ours, theirs), 4),
                        op=">=",
                        goal=least,
                        note=f"auto {ours:.4g}, {other} {theirs:.4g} ({measure.unit})",
                    )
                )
    return result


def main(argv: Sequence[str]) -> None:
    """Simulate, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="simulations at a time")
    parser.add_argument("--scenes", help=f"comma list of {', '.join(SCENES)} (default: all)")
    args = parser.parse_args(argv)
    names = args.scenes.split(",") if args.scenes else list(SCENES)
    if unknown := [name for name in names if name not in SCENES]:
        parser.error(f"--scenes={unknown[0]}: must be among {', '.join(SCENES)}")
    scenes = [SCENES[name] for name in names]
    seeds = [args.seed] if args.quick else [args.seed, args.seed + 1, args.seed + 2]
    systems = list(SYSTEMS)
    found = run(scenes, systems, seeds, args.jobs, quick=args.quick)
    tables = []
    for scene in scenes:
        header = ["system", *(f"{m.name} ({m.unit})" for m in scene.measures)]
        rows = [[name, *(found[scene.name, name][m.name] for m in scene.measures)] for name in systems]
        tables.append(f"\n{scene.name}: {scene.description}\n{format_table(header, rows)}")
    checksum = hashlib.sha256("".join(scene.digest(seeds, quick=args.quick) for scene in scenes).encode()).hexdigest()
    flat = {
        name: {f"{s.name}.{m.metric}": found[s.name, name][m.name] for s in scenes for m in s.measures}
        for name in systems
    }
    result = Result(
        name="systems_compared",
        command=command(argv, __file__),
        config={"seeds": seeds, "quick": args.quick, "scenes": {s.name: s.description for s in scenes}},
        seed=args.seed,
        workload=Workload(name=", ".join(names), rows=0, sha256=checksum),
        metrics=flat[AUTO],
        baselines={name: values for name, values in flat.items() if name != AUTO},
        goals=goals(scenes, found),
    )
    emit(result, tables, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
