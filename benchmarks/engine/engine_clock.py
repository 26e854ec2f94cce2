"""Does `alise` pay on the real engine, when a step takes what the model of a GPU says it takes?

Question: `tuning.py` simulates. Are its gains over vLLM there when vLLM's own engine core, model runner and block
tables serve the requests? And does the simulator, given the same requests, say what the engine does?

Method: a tiny model on the CPU, by the clock of `vllm_ext.compare.clocked`: each step takes what the cost model says of
its tokens and contexts, whatever it took here. Lengths are a quarter of those like ShareGPT's, so that a step is soon
computed, and so are the KV blocks that the named GPU has room for. The baseline, the row `vLLM`, has a watermark of 5 %
and a budget of 2,048 tokens; rows with 256 show what the budget alone brings. Load 1.0 is what the baseline ends per
second of a backlog. Every system serves the same requests, seed by seed, each after the one before it has ended; the
A/A row is the baseline with other seeds. A value is the baseline's over the system's: above 1 is better; intervals are
Student's t over the seeds' logarithms. Beside each row stands the simulator's answer for the same requests.

    python benchmarks/engine/engine_clock.py --quick
    python benchmarks/engine/engine_clock.py --out benchmarks/results/engine_clock.json
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

import numpy as np

from vllm_ext.compare.clocked import ClockedEngine
from vllm_ext.compare.duel import BLOCK, HARDWARE, ONE_THREAD, SCALE, SEATS, engine_flags, num_blocks
from vllm_ext.compare.duel import CONTEXT as MAX_LEN
from vllm_ext.compare.observed import MEAN, P99, Observed, measured
from vllm_ext.compare.replay import observed
from vllm_ext.report.claim import Claim
from vllm_ext.report.common_flags import at_least
from vllm_ext.report.count_progress import CountProgress
from vllm_ext.report.intervals import interval
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.spec import CostSpec
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.workloads.build import build as build_workload
from vllm_ext.simulation.workloads.requests import SimRequest
from vllm_ext.simulation.workloads.spec import WorkloadSpec
from vllm_ext.tiny_model import Style
from vllm_ext.tiny_model import build as build_model


@dataclass(frozen=True)
class Row:
    """A way to serve: a system of ours, or vLLM alone."""

    system: str = ""
    budget: int = 2048
    watermark: float = 0.0
    other_seeds: int = 0
    """Added to the seeds."""


BASE = "vLLM"
ROWS = {
    BASE: Row(watermark=0.05),
    "vLLM, other seeds": Row(watermark=0.05, other_seeds=1000),
    "vLLM, 256 tokens": Row(watermark=0.05, budget=256),
    "alise": Row("alise"),
    "alise, 256 tokens": Row("alise", budget=256),
    "auto": Row("auto"),
}
LOADS = (1.0, 1.2)
WARM, BACKLOG_SEED = 60, 999
"""Requests that have ended before the first seed: there is a history of lengths, as on a server that has run."""
SLOT_S = 1e5
"""From the beginning of a seed to that of the next: far more than it takes, so that nothing is left of it."""
AGREE = {MEAN: 0.05, P99: 0.1}
"""How far the simulator may be from the engine."""
SHOWN = (MEAN, P99, "mean normalised", "mean TTFT", "P90 TTFT")
ENGINE, SIMULATOR = "", "simulated "
"""Before the name of a measure."""


class Requests(list[SimRequest]):
    """Requests of several seeds, one seed after the other; a workload of the simulator."""

    name, rows, sha256 = "sharegpt-like, a quarter", 0, ""
    start = list.__iter__

    def after(self, *_: object) -> Iterable[SimRequest]:
        """Nobody comes back."""
        return ()


def requests_of(count: int, seeds: Sequence[int], rate: float) -> Requests:
    """Return a history, and behind it the requests of each seed, with Poisson arrivals and ids ``SEED-ID``."""
    found = Requests()
    for slot, (seed, number, at) in enumerate([(-1, WARM, 1e6), *((seed, count, rate) for seed in seeds)]):
        spec = WorkloadSpec(
            source="sharegpt-like", num_requests=number, rate_per_s=at, seed=seed % 1_000_000, max_model_len=MAX_LEN,
            scale_prompt=SCALE, scale_output=SCALE, over_context="cut",
        )  # fmt: skip
        found += (
            replace(one, req_id=f"{seed}-{one.req_id}", arrival_s=slot * SLOT_S + one.arrival_s)
            for one in build_workload(spec).start()
        )
    return found


def on_engine(row: Row, requests: Requests) -> Observed:
    """Return what became of each request on the real engine."""
    flags = ["--model", str(build_model(Style.LLAMA)), *engine_flags(row.budget), "--watermark", str(row.watermark)]
    flags += ["--scheduler-cls", row.system] if row.system else []
    return observed(ClockedEngine(flags, HARDWARE, CostSpec()).serve(requests), requests)


def simulated(row: Row, requests: Requests) -> Observed:
    """Return what the simulator says of the same requests."""
    from vllm_ext.simulation.run import simulate

    spec = SimulationSpec(
        engine=EngineSpec(
            system=row.system or "upstream-fcfs", num_blocks=num_blocks(), block_size=BLOCK, max_model_len=MAX_LEN,
            max_num_seqs=SEATS, max_num_batched_tokens=row.budget, watermark=row.watermark, async_scheduling=False,
        ),
        hardware=HARDWARE,
    )  # fmt: skip
    table = simulate(spec, workload=requests).requests
    of = {"longest_gap_s": "max_gap_s", "on_time": "slo_e2e_s"}  # nobody has objectives: nan
    order = np.argsort(table.column("arrival_s"))
    return Observed(**{one.name: table.column(of.get(one.name, one.name))[order] for one in fields(Observed)})


def cell(name: str, count: int, rate: float, seeds: Sequence[int]) -> dict[str, Any]:
    """Serve all seeds in one way, and simulate the same; return the measures of each seed, and the rate of ends."""
    row = ROWS[name]
    requests = requests_of(count, [seed + row.other_seeds for seed in seeds], rate)
    runs = {ENGINE: on_engine(row, requests), SIMULATOR: simulated(row, requests)}
    starts = range(WARM, len(requests), count)
    return {
        "ends_per_s": between_quarters((runs[ENGINE].arrival_s + runs[ENGINE].e2e_s)[-count:]),
        "measures": {source: [measured(run[at : at + count]) for at in starts] for source, run in runs.items()},
    }


def between_quarters(ends_s: Any) -> float:
    """Return how many end per second between the first and the last quarter of them."""
    ends, early, late = np.sort(ends_s), len(ends_s) // 4, 3 * len(ends_s) // 4
    return float((late - early) / (ends[late] - ends[early]))


def served(*what: Any) -> dict[str, Any]:
    """Return `cell` of a process of its own, where the engine is the first.

    Raises:
        CalledProcessError: it failed; why stands above.
    """
    told = subprocess.run(
        [sys.executable, __file__, "--cell", json.dumps(what)], stdout=subprocess.PIPE, check=True,
        env={**ONE_THREAD, "VLLM_LOGGING_LEVEL": "ERROR", **os.environ},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=at_least(1), default=1600, help="of a seed (default: %(default)s)")
    parser.add_argument("--seeds", type=at_least(1), default=3, help="(default: %(default)s)")
    parser.add_argument("--rows", default="; ".join(ROWS), help="semicolon list (default: %(default)s)")
    args = parser.parse_args(argv)
    count, seeds, loads = (100, [0], LOADS[:1]) if args.quick else (args.requests, list(range(args.seeds)), LOADS)
    names = [BASE, "alise"] if args.quick else list(dict.fromkeys([BASE, *map(str.strip, args.rows.split(";"))]))
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows={unknown[0]}: must be among {'; '.join(ROWS)}")
    flat: dict[str, dict[str, float]] = {name: {} for name in names}
    claims: list[Claim] = []
    tables = []
    with CountProgress(1 + len(names) * len(loads), label="engine_clock", unit="engine") as progress:
        capacity = served(BASE, count, 1e6, [BACKLOG_SEED])["ends_per_s"]
        for load in loads:
            found, lines = {}, []
            for name in names:
                progress.update(1 + len(tables) * len(names) + len(found), f"{name} at {load:g}")
                found[name] = served(name, count, float(f"{load * capacity:.4g}"), seeds)["measures"]
                for source, runs in found[name].items():
                    lines.append([name, source or "engine"])
                    for measure in SHOWN:
                        pairs = zip(found[BASE][source], runs, strict=True)
                        ratio = interval([math.log(base[measure] / run[measure]) for base, run in pairs])
                        key = f"load_{load:g}.{source}{measure}"
                        flat[name][f"{key}_s"] = fmean(run[measure] for run in runs)
                        if name != BASE:
                            ends = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
                            flat[name] |= {f"{key}.{end}": value for end, value in ends.items()}
                        lines[-1].append(str(ratio))
                claims += agreement(flat[name], name, load)
            tables.append(Table(["vLLM's over", "", *SHOWN], lines, title=f"at load {load:g}"))
    flat = {name: {key: float(f"{value:.5g}") for key, value in each.items()} for name, each in flat.items()}
    config = {
        "hardware": HARDWARE.model_dump(), "requests": count, "seeds": seeds, "loads": loads, "rows": names,
        "saturation_requests_per_s": round(capacity, 4), "num_blocks": num_blocks(), "scale": SCALE,
    }  # fmt: skip
    result = Result(
        name="engine_clock", command=command(argv, __file__), config=config, seed=args.seed, claims=claims,
        workload=Workload(name=Requests.name, rows=count, sha256=hashlib.sha256(repr(config).encode()).hexdigest()),
        metrics=flat.pop("alise" if "alise" in flat else BASE), baselines=flat,
    )  # fmt: skip
    emit(result, tables, args.out)


def agreement(found: Mapping[str, float], name: str, load: float) -> Iterator[Claim]:
    """Hold the simulator to the engine, in what it says of a row."""
    for measure, most in AGREE.items():
        real, said = (found[f"load_{load:g}.{source}{measure}_s"] for source in (ENGINE, SIMULATOR))
        yield Claim(
            name=f"{name} at {load:g}: {measure}, the simulator's distance from the engine", op="<=", goal=most,
            value=round(abs(said / real - 1), 4), facts=f"simulator {said:.4g} s, engine {real:.4g} s",
        )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cell"]:
        print(json.dumps(cell(*json.loads(sys.argv[2]))))
    else:
        main(sys.argv[1:])
