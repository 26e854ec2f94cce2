"""Does shadow mode expect of another order what that order then does?

Question: a server counts beside its own order how long requests would have waited in another one
(`--ext-shadow SYSTEM`). How near is that to the waits of a server that does serve in the other order?

Method: the real scheduler in virtual time, on made-up lengths like ShareGPT's with nothing announced, at 0.9 and 1.0 of
saturation: with the seats of vLLM, where KV memory is the limit, and with sixteen. `fcfs` serves with `alise` as its
shadow, and `alise` with `fcfs`; each is compared with the other's own run on the same requests. Means over seeds.

    python benchmarks/simulated/shadow.py --quick
    python benchmarks/simulated/shadow.py --jobs 2 --out benchmarks/results/shadow.json
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import simulated

from vllm_ext.experiments.experiment import Experiment, Findings
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import Claim
from vllm_ext.report.table import Table
from vllm_ext.simulation.plan.runs import Bench, Part, Parts
from vllm_ext.simulation.plan.saturation import saturation
from vllm_ext.simulation.spec import SimulationSpec, with_values

SCENES: Mapping[str, Mapping[str, Any]] = {"KV memory": {}, "16 seats": {"engine.max_num_seqs": 16}}
"""What is short -> how the server differs from vLLM as it comes on an A100 with OPT-13B."""
LOADS = (0.9, 1.0)
PAIRS = {"fcfs": "alise", "alise": "fcfs"}
TOLERANCE = 0.15
"""By how much of the real wait an expected one may differ from the measured one."""
_SERVER = {"engine.max_model_len": 2048, "engine.profiled": True}
_REQUESTS, _QUICK_REQUESTS, _SEARCH_SEED = 4000, 800, 5000


def saturation_per_s(scene: str, runner: Runner) -> float:
    """Return what vLLM as it comes carries there, on seeds of its own."""
    base = with_values(SimulationSpec(), {**_SERVER, **SCENES[scene], "engine.system": "upstream-fcfs"})
    part = Part(0, _QUICK_REQUESTS, runner.seed + _SEARCH_SEED)
    bench = Bench(base, runner.store, runner.pool, lambda *_: None)
    return saturation(bench, Parts(part, part, endless=True), 1.0).rate_per_s


def spec(scene: str, rate_per_s: float, system: str, count: int, seed: int) -> SimulationSpec:
    """Return a run of a system with the other one as its shadow."""
    changes = {"engine.system": system, "engine.options.shadow": PAIRS[system]}
    work = {"workload.rate_per_s": rate_per_s, "workload.num_requests": count, "workload.seed": seed}
    return with_values(SimulationSpec(), {**_SERVER, **SCENES[scene], **changes, **work})


def run(runner: Runner) -> Findings:
    """Serve each scene at each load with both systems."""
    seeds, count = runner.seeds(3), _QUICK_REQUESTS if runner.quick else _REQUESTS
    saturated = {scene: saturation_per_s(scene, runner) for scene in SCENES}
    cells = {f"{scene}, {load:g}": (scene, load * saturated[scene]) for scene in SCENES for load in LOADS}
    specs = {
        (name, system): partial(spec, scene, rate, system, count)
        for name, (scene, rate) in cells.items()
        for system in PAIRS
    }
    grid = runner.grid(specs, seeds)
    rows, claims, metrics = [], [], {}
    for name in cells:
        for system, other in PAIRS.items():
            requests = grid.mean(name, system, "shadow_requests")
            now, expected = (
                grid.mean(name, system, f"shadow_wait_s_{which}") / requests for which in ("real", "shadow")
            )
            measured = grid.mean(name, other, "shadow_wait_s_real") / grid.mean(name, other, "shadow_requests")
            longest = [grid.mean(name, *which) for which in (
                (system, "shadow_longest_wait_s_shadow"), (other, "shadow_longest_wait_s_real"))]  # fmt: skip
            rows.append([name, system, other, *(f"{cell:.3g}" for cell in (now, expected, measured, *longest))])
            metrics |= {f"{name}.{other}.expected_wait_s": expected, f"{name}.{other}.measured_wait_s": measured}
            claims.append(
                Claim(
                    name=f"{name}: mean wait of {other} as {system} expects it, from that measured, over {system}'s",
                    value=round(abs(expected - measured) / max(now, measured), 4),
                    op="<=",
                    goal=TOLERANCE,
                    why="short waits depend on whom admission lets in too, which a shadow does not try",
                    facts=f"{system} {now:.3g} s, {other} expected {expected:.3g} s, measured {measured:.3g} s",
                )
            )
    columns = ["short, load", "serves", "shadow", "mean wait (s)", "expected of the shadow", "measured",
               "longest wait, expected (s)", "measured (s)"]  # fmt: skip
    return Findings(
        tables=[Table(columns, rows)],
        claims=claims,
        metrics=metrics,
        config={
            "seeds": seeds,
            "loads": LOADS,
            "saturation_per_s": saturated,
            "requests": count,
            "columns": columns,
            "rows": rows,
        },
        workload=[spec(scene, rate, "fcfs", count, seed).workload for scene, rate in cells.values() for seed in seeds],
    )


EXPERIMENT = Experiment(id="shadow", title="Does shadow mode expect of an order what that order does?", run=run)

if __name__ == "__main__":
    simulated.main(EXPERIMENT, sys.argv[1:])
