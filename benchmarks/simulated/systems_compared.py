"""Is `auto` as good as each single system at what that one is for?

Question: on loads that the single systems were made for, and on mixtures of them, is `auto` beaten by any of them on
that system's own measure, and is it better than a tuned vLLM?

Method: the real schedulers in virtual time. Each scene is a load with the measures that matter there; every system
serves the same requests at the same times, with the same hints (objectives, and announced lengths where the scene has
them, with an error). The step-time models start from a profile of the simulated hardware. Measures are means over
seeds. vLLM is tuned in hindsight: of five settings, a watermark of 5 % alone and with 128 to 1,024 tokens a step, each
scene has the one that is best in its first measure; no flag of ours is tuned. Runs that ended are kept in the cache of
vllm-ext: interrupted, the same command goes on.

    python benchmarks/simulated/systems_compared.py --quick
    python benchmarks/simulated/systems_compared.py --jobs 2 --out benchmarks/results/systems_compared.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import simulated
from systems_scenes import SCENES, SYSTEMS, TUNED, Measure

from vllm_ext.experiments.experiment import Experiment, Findings
from vllm_ext.experiments.grid import Grid
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import Claim
from vllm_ext.report.table import Table

AUTO, UPSTREAM = "auto", "upstream"
TOLERANCE = 0.02


def margin(measure: Measure, ours: float, theirs: float) -> float:
    """Return how much better ours is, as a factor: above 1 is better, whichever direction better is."""
    low, high = (theirs, ours) if measure.higher else (ours, theirs)
    return (high + measure.floor) / (low + measure.floor)


def tuned(grid: Grid, scene: str) -> str:
    """Return the setting of vLLM that is best in the scene's first measure."""
    first = SCENES[scene].measures[0]
    settings = [system for of, system in grid.cells if of == scene and system.startswith(TUNED)]
    return max(settings, key=lambda system: grid.mean(scene, system, first.metric) * (1 if first.higher else -1))


def claims(grid: Grid) -> Iterator[Claim]:
    """Hold `auto` to the system whose own measure it is, and to vLLM's best setting."""
    for name in dict.fromkeys(scene for scene, _ in grid.cells):
        best = tuned(grid, name)
        for measure in (m for m in SCENES[name].measures if m.owner):
            ours = grid.mean(name, AUTO, measure.metric)
            for shown, other, least in ((measure.owner, measure.owner, 1 - TOLERANCE), ("vLLM tuned", best, 1.0)):
                theirs = grid.mean(name, other, measure.metric)
                yield Claim(
                    name=f"{name}: {measure.name}, how many times better auto is than {shown}",
                    value=round(margin(measure, ours, theirs), 4),
                    goal=least,
                    facts=f"auto {ours:.4g}, {other} {theirs:.4g} ({measure.unit})",
                )


def summary(grid: Grid, name: str) -> Iterator[list[str]]:
    """Return a scene's rows of the table that is kept: what `auto` is held to, beside it."""
    best = tuned(grid, name)
    for measure in (m for m in SCENES[name].measures if m.owner):
        shown = {
            system: f"{grid.mean(name, system, measure.metric):.3g}" for system in (UPSTREAM, best, measure.owner, AUTO)
        }
        yield [
            name,
            f"{measure.name}, {measure.unit}",
            shown[UPSTREAM],
            f"{shown[best]} ({best.removeprefix(TUNED)})",
            f"`{measure.owner}` {shown[measure.owner]}",
            shown[AUTO],
        ]


def run(runner: Runner) -> Findings:
    """Serve each scene with every system."""
    seeds, systems = runner.seeds(3), list(SYSTEMS)
    specs = {
        (name, system): partial(scene.spec, system, quick=runner.quick)
        for name, scene in SCENES.items()
        for system in systems
    }
    grid = runner.grid(specs, seeds)
    flat = grid.means({name: [measure.metric for measure in scene.measures] for name, scene in SCENES.items()})
    return Findings(
        tables=[
            Table(
                ["system", *(f"{m.name} ({m.unit})" for m in scene.measures)],
                [[one, *(grid.mean(name, one, m.metric) for m in scene.measures)] for one in systems],
                title=f"{name}: {scene.description}",
            )
            for name, scene in SCENES.items()
        ],
        claims=[*claims(grid)],
        metrics=flat[AUTO],
        baselines={name: values for name, values in flat.items() if name != AUTO},
        config={
            "seeds": seeds,
            "scenes": {name: scene.description for name, scene in SCENES.items()},
            "columns": ["load", "measure", "vLLM", "vLLM tuned", "the system it is for", "`auto`"],
            "rows": [row for name in SCENES for row in summary(grid, name)],
        },
        workload=[scene.spec(AUTO, seed, quick=runner.quick).workload for scene in SCENES.values() for seed in seeds],
    )


EXPERIMENT = Experiment(
    id="systems_compared", title="Is `auto` as good as each single system at what that one is for?", run=run
)

if __name__ == "__main__":
    simulated.main(EXPERIMENT, sys.argv[1:])
