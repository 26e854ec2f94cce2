"""Does `alise` pay on the real engine, when a step takes what the model of a GPU says it takes?

Question: `tuning.py` simulates. Are its gains over vLLM there when vLLM's own engine core, model runner and block
tables serve the requests, with our plugin as it is installed? And does the simulator, given the same requests, say what
the engine does?

Method: the real engine serves a tiny model on the CPU, so a step must be soon computed: lengths are a quarter of those
like ShareGPT's, and so are the KV blocks of those that the named GPU has room for. On a small shared machine wall time
is mostly noise near saturation, so the clock is another one: each step takes what the cost model of the simulator says
of its tokens and contexts, whatever it took here. Requests are added when that clock is at their arrival, and lengths
are hidden from schedulers. The baseline, the row `vLLM`, has a watermark of 5 % and a budget of 2,048 tokens; rows with
256 tokens show what the budget alone brings. Load 1.0 is what the baseline ends per second of a backlog. Every system
serves the same requests, seed by seed, each seed after the one before it has ended; the A/A row is the baseline with
other seeds. A value is the baseline's over the system's: above 1 is better; intervals are Student's t over the seeds'
logarithms. Beside each row stands the simulator's answer for the same requests, on the same scheduler class.

    python benchmarks/engine/engine_clock.py --quick
    python benchmarks/engine/engine_clock.py --out benchmarks/results/engine_clock.json
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from engine_process import run

from vllm_ext.compare.clocked import ClockedEngine
from vllm_ext.compare.duel import BLOCK, HARDWARE, SCALE, SEATS, engine_flags, num_blocks
from vllm_ext.compare.duel import CONTEXT as MAX_LEN
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
    """A way to serve."""

    system: str = ""
    """Of ours; empty: vLLM alone."""
    budget: int = 2048
    other_seeds: int = 0
    """Added to the seeds."""

    @property
    def watermark(self) -> float:
        """Of vLLM alone; ours have reserves of their own."""
        return 0.0 if self.system else 0.05


BASE, AGAIN = "vLLM", "vLLM, other seeds"
ROWS = {
    BASE: Row(),
    AGAIN: Row(other_seeds=1000),
    "vLLM, 256 tokens": Row(budget=256),
    "alise": Row("alise"),
    "alise, 256 tokens": Row("alise", budget=256),
    "auto": Row("auto"),
}
LOADS = (1.0, 1.2)
NUM_BLOCKS = num_blocks()
WARM, BACKLOG_SEED = 60, 999
"""Requests that have ended before the first seed: there is a history of lengths, as on a server that has run."""
SLOT_S = 1e5
"""From the beginning of a seed to that of the next: far more than it takes, so that nothing is left of it."""
AGREE = {"mean e2e": 0.05, "P99 e2e": 0.1}
"""How far the simulator may be from the engine."""
ON_TIME_TTFT_S, ON_TIME_S_PER_TOKEN = 5.0, 0.2
MEASURES = ("mean e2e", "P99 e2e", "mean normalised", "P50 normalised", "P90 normalised", "mean TTFT", "P90 TTFT")
Times = dict[str, float]


@dataclass
class Requests:
    """Requests of several seeds, one seed after the other; a workload of the simulator."""

    requests: Sequence[SimRequest]
    name: str = "sharegpt-like, a quarter"
    rows: int = 0
    sha256: str = ""

    def start(self) -> Iterator[SimRequest]:
        """Yield them by arrival."""
        return iter(self.requests)

    def after(self, *_: object) -> Iterable[SimRequest]:
        """Nobody comes back."""
        return ()


def requests_of(count: int, seeds: Sequence[int], rate: float) -> Requests:
    """Return a history, and behind it the requests of each seed, with Poisson arrivals and ids ``SEED-ID``."""
    found = []
    for slot, (seed, number, at) in enumerate([(-1, WARM, 1e6), *((seed, count, rate) for seed in seeds)]):
        spec = WorkloadSpec(
            source="sharegpt-like", num_requests=number, rate_per_s=at, seed=seed % 1_000_000, max_model_len=MAX_LEN,
            scale_prompt=SCALE, scale_output=SCALE, over_context="cut",
        )  # fmt: skip
        for one in build_workload(spec).start():
            room = MAX_LEN - one.prompt_tokens
            found.append(
                replace(one, req_id=f"{seed}-{one.req_id}", arrival_s=slot * SLOT_S + one.arrival_s, max_tokens=room)
            )
    return Requests(found)


def flags(row: Row) -> list[str]:
    """Return what `vllm serve` would be told."""
    given = ["--model", str(build_model(Style.LLAMA)), *engine_flags(row.budget), "--watermark", str(row.watermark)]
    return given + (["--scheduler-cls", row.system] if row.system else [])


def on_engine(row: Row, requests: Sequence[SimRequest]) -> dict[str, Times]:
    """Return arrival, first token and end of each request on the real engine, in seconds, and its tokens."""
    found = ClockedEngine(flags(row), HARDWARE, CostSpec()).serve(requests)
    rows = zip(requests, found["ttfts"], found["latencies"], found["output_lens"], strict=True)
    return {
        one.req_id: {"arrival": one.arrival_s, "first": one.arrival_s + ttft, "end": one.arrival_s + e2e, "tokens": n}
        for one, ttft, e2e, n in rows
    }


def simulated(row: Row, requests: Requests) -> dict[str, Times]:
    """Return what the simulator says of the same requests."""
    from vllm_ext.simulation.run import simulate

    spec = SimulationSpec(
        engine=EngineSpec(
            system=row.system or "upstream-fcfs", num_blocks=NUM_BLOCKS, block_size=BLOCK, max_model_len=MAX_LEN,
            max_num_seqs=SEATS, max_num_batched_tokens=row.budget, watermark=row.watermark, async_scheduling=False,
        ),
        hardware=HARDWARE,
    )  # fmt: skip
    table = simulate(spec, workload=requests).requests
    columns = ("arrival_s", "first_token_s", "finish_s", "output_tokens")
    names = ("arrival", "first", "end", "tokens")
    rows = zip(*(table.column(name).tolist() for name in columns), strict=True)
    return {req_id: dict(zip(names, row, strict=True))
            for req_id, row in zip(table.column("req_id").tolist(), rows, strict=True)}  # fmt: skip


def cell(argv: Sequence[str]) -> None:
    """Serve all seeds in one way, in a process of its own, and simulate the same; write what came of them."""
    out, name, count, rate, *seeds = argv
    row = ROWS[name]
    requests = requests_of(int(count), [int(seed) + row.other_seeds for seed in seeds], float(rate))
    found = {"engine": on_engine(row, requests.requests), "simulator": simulated(row, requests)}
    Path(out).write_text(json.dumps(found), encoding="utf-8")


def served(name: str, count: int, rate: float, seeds: Sequence[int]) -> dict[str, dict[int, list[Times]]]:
    """Return the times of each request by seed, of the engine and of the simulator.

    Raises:
        CellFailed: the engine did not start, or failed.
    """
    with tempfile.TemporaryDirectory(prefix="engine_clock-") as folder:
        out = Path(folder, "out.json")
        run(name, [sys.executable, __file__, "--cell", str(out), name, str(count), str(rate), *map(str, seeds)])
        found = json.loads(out.read_text(encoding="utf-8"))
    shift = ROWS[name].other_seeds
    return {
        source: {seed: [row for req_id, row in rows.items() if req_id.startswith(f"{seed + shift}-")] for seed in seeds}
        for source, rows in found.items()
    }


def measures(rows: Sequence[Times]) -> dict[str, float]:
    """Return what is compared: seconds, of normalised latencies per token; and the share on time."""
    arrival, first, end, tokens = (
        np.array([row[key] for row in rows]) for key in ("arrival", "first", "end", "tokens")
    )
    e2e, ttft = end - arrival, first - arrival
    normalised = e2e / tokens
    on_time = (ttft <= ON_TIME_TTFT_S) & (normalised <= ON_TIME_S_PER_TOKEN)
    return {
        "mean e2e": float(e2e.mean()),
        "P99 e2e": float(np.percentile(e2e, 99)),
        "mean normalised": float(normalised.mean()),
        "P50 normalised": float(np.percentile(normalised, 50)),
        "P90 normalised": float(np.percentile(normalised, 90)),
        "mean TTFT": float(ttft.mean()),
        "P90 TTFT": float(np.percentile(ttft, 90)),
        "share on time": float(on_time.mean()),
    }


def compared(ours: Sequence[float], tuned: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of tuned over ours with its 95 % interval."""
    found = interval([math.log(other / one) for one, other in zip(ours, tuned, strict=True)])
    return found.value, found.low, found.high


def saturation(count: int) -> float:
    """Return the requests/s that the baseline ends of a backlog, between its quarters."""
    rows = served(BASE, count, 1e6, [BACKLOG_SEED])["engine"][BACKLOG_SEED]
    ends = sorted(row["end"] for row in rows)
    early, late = len(ends) // 4, 3 * len(ends) // 4
    return (late - early) / (ends[late] - ends[early])


def over_base(found: Mapping[str, Mapping[int, Times]], name: str, measure: str) -> tuple[float, float, float]:
    """Return the baseline's over a row's, with its interval."""
    seeds = found[BASE]
    return compared([found[name][seed][measure] for seed in seeds], [found[BASE][seed][measure] for seed in seeds])


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
    with CountProgress(1 + len(names) * len(loads), label="engine_clock", unit="engine") as progress:
        capacity = saturation(count)
        flat: dict[str, dict[str, float]] = {name: {} for name in names}
        claims: list[Claim] = []
        tables = []
        for number, load in enumerate(loads):
            found: dict[str, dict[str, dict[int, Times]]] = {"engine": {}, "simulator": {}}
            for place, name in enumerate(names, 1):
                progress.update(number * len(names) + place, f"{name} at {load:g}")
                for source, rows in served(name, count, float(f"{load * capacity:.4g}"), seeds).items():
                    found[source][name] = {seed: measures(each) for seed, each in rows.items()}
            lines = []
            for name in names:
                for source, of in found.items():
                    ratios = {measure: over_base(of, name, measure) for measure in MEASURES}
                    begin = f"load_{load:g}.{'' if source == 'engine' else 'simulated '}"
                    for measure, ends in ratios.items():
                        flat[name][f"{begin}{measure}_s"] = fmean(one[measure] for one in of[name].values())
                        if name != BASE:
                            named = zip(("ratio", "low", "high"), ends, strict=True)
                            flat[name] |= {f"{begin}{measure}.{end}": value for end, value in named}
                    flat[name][f"{begin}on_time_fraction"] = fmean(one["share on time"] for one in of[name].values())
                    lines.append([name, source, *("{:.2f} [{:.2f}, {:.2f}]".format(*ends) for ends in ratios.values())])
                claims += agreement(flat[name], name, load)
            tables.append(Table(["vLLM's over", "", *MEASURES], lines, title=f"at load {load:g}"))
    flat = {name: {key: float(f"{value:.5g}") for key, value in each.items()} for name, each in flat.items()}
    config = {
        "hardware": HARDWARE.model_dump(), "requests": count, "seeds": seeds, "loads": loads, "rows": names,
        "saturation_requests_per_s": round(capacity, 4), "num_blocks": NUM_BLOCKS, "scale": SCALE,
    }  # fmt: skip
    result = Result(
        name="engine_clock",
        command=command(argv, __file__),
        config=config,
        seed=args.seed,
        workload=Workload(name=Requests.name, rows=count, sha256=hashlib.sha256(repr(config).encode()).hexdigest()),
        metrics=flat["alise"] if "alise" in flat else flat[BASE],
        baselines={name: each for name, each in flat.items() if name != "alise"},
        claims=claims,
    )
    emit(result, tables, args.out)


def agreement(found: Mapping[str, float], name: str, load: float) -> Iterator[Claim]:
    """Hold the simulator to the engine, in what it says of a row."""
    for measure, most in AGREE.items():
        real, said = (found[f"load_{load:g}.{source}{measure}_s"] for source in ("", "simulated "))
        yield Claim(
            name=f"{name} at {load:g}: {measure}, the simulator's distance from the engine",
            value=round(abs(said / real - 1), 4),
            op="<=",
            goal=most,
            facts=f"simulator {said:.4g} s, engine {real:.4g} s",
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cell"]:
        cell(sys.argv[2:])
    else:
        main(sys.argv[1:])
