"""Does `alise` pay on the real engine, when a step takes what the model of a GPU says it takes?

Question: `ordering.py` simulates. Are its gains over vLLM there when vLLM's own engine core, model runner and block
tables serve the requests, with our plugin as it is installed?

Method: the real engine serves a tiny model on the CPU, so a step must be soon computed: there are a quarter of the
blocks that the named GPU has room for, and of lengths like ShareGPT's those above 512 tokens are dropped, not scaled.
What is left has prompts of about 35 and outputs of about 227 tokens in the mean and is much more alike than ShareGPT,
which leaves an order less to gain. On a small shared machine wall time is mostly noise near saturation, so the clock is
another one: each step takes what the cost model of the simulator says of its tokens and contexts, whatever it took
here. Requests are added when that clock is at their arrival, and lengths are hidden from schedulers. The baseline, the
row `vLLM tuned`, has a watermark of 5 % and the default budget of 2,048 tokens, which is not tuned. Load 1.0 is what it
ends per second of a backlog. Every system serves the same requests, seed by seed; the A/A row is the baseline with
other seeds. A value is the baseline's over the system's: above 1 is better; intervals are Student's t over the seeds'
logarithms.

    python benchmarks/engine/engine_clock.py --quick
    python benchmarks/engine/engine_clock.py --out benchmarks/results/engine_clock.json
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engine_process import run

from vllm_ext.report.claim import Claim
from vllm_ext.report.count_progress import CountProgress
from vllm_ext.report.intervals import interval
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec, build
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.simulation.engine.events import VirtualClock
from vllm_ext.simulation.measure.run_data import Decision
from vllm_ext.simulation.recorded.forced_length import extra_args
from vllm_ext.simulation.workloads.build import build as build_workload
from vllm_ext.simulation.workloads.spec import WorkloadSpec
from vllm_ext.tiny_model import Style
from vllm_ext.tiny_model import build as build_model

TUNED, AGAIN = "vLLM tuned", "vLLM tuned, other seeds"
SYSTEMS: Mapping[str, dict[str, Any]] = {
    TUNED: {"watermark": 0.05},
    AGAIN: {"watermark": 0.05},
    **{name: {"scheduler_cls": name} for name in ("alise", "auto")},
}
OTHER_SEEDS = 1000
HARDWARE = HardwareSpec(model="opt-13b", device="a100-40").resolve()
BLOCK, BUDGET, SEATS, MAX_LEN = 32, 2048, 256, 512
SCALE = 0.25
"""Of the KV memory."""
ON_TIME_TTFT_S, ON_TIME_S_PER_TOKEN = 5.0, 0.2
MEASURES = ("mean e2e", "P99 e2e", "mean normalised", "P50 normalised", "P90 normalised", "mean TTFT", "P90 TTFT")
Times = dict[str, float]


def workload(requests: int, seed: int, rate: float) -> list[Any]:
    """Return requests with lengths like ShareGPT's and Poisson arrivals."""
    spec = WorkloadSpec(
        source="sharegpt-like", num_requests=requests, rate_per_s=rate, seed=seed, max_model_len=MAX_LEN
    )
    return list(build_workload(spec).start())


def shape_of(step: Any) -> StepShape:
    """Return what a step of vLLM's scheduler computes."""
    did = Decision.of(step)
    return StepShape.of_rows((n, held) for (_, n), held in zip(did.scheduled, did.num_computed_tokens, strict=True))


class Engine:
    """A real engine in this process, whose time is that of its steps on the hardware."""

    def __init__(self, system: str) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_EXT_BENCH_FORCED_LENGTH": "1"}
        from vllm import LLM

        llm = LLM(
            model=str(build_model(Style.LLAMA)),
            dtype="float32",
            enforce_eager=True,
            async_scheduling=False,
            max_model_len=MAX_LEN,
            max_num_seqs=SEATS,
            max_num_batched_tokens=BUDGET,
            block_size=BLOCK,
            num_gpu_blocks_override=int(
                SCALE * HARDWARE.num_kv_blocks(BLOCK, max_num_batched_tokens=BUDGET, max_num_seqs=SEATS)
            ),
            kv_cache_memory_bytes=2**29,
            **SYSTEMS[system],
        )
        self._engine = llm.llm_engine
        scheduler = self._engine.engine_core.engine_core.scheduler
        self.clock = VirtualClock()
        if hasattr(scheduler, "clock"):
            self.clock = VirtualClock(scheduler.clock())  # which it may have seen
            scheduler.clock = self.clock
        cost, finish = build(HARDWARE, CostSpec()), scheduler.update_from_output

        def timed(step: Any, output: Any) -> Any:
            if step.num_scheduled_tokens:
                shape = shape_of(step)
                self.clock.advance(cost.device_s(shape) + cost.host_s(shape))
            return finish(step, output)

        scheduler.update_from_output = timed

    def serve(self, requests: Sequence[Any], seed: int) -> dict[str, Times]:
        """Serve requests to their end; return arrival, first token and end of each, in seconds."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, start = self._engine, self.clock()
        numbers = np.random.default_rng(seed)
        waiting = sorted(requests, key=lambda one: one.arrival_s)[::-1]
        found: dict[str, Times] = {}
        while waiting or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                self.clock.advance_to(max(self.clock(), start + waiting[-1].arrival_s))
            while waiting and start + waiting[-1].arrival_s <= self.clock():
                one = waiting.pop()
                sampling = SamplingParams(
                    temperature=0.0,
                    max_tokens=MAX_LEN - one.prompt_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                    extra_args=extra_args(min(one.output_tokens, MAX_LEN - one.prompt_tokens)),
                )
                prompt = {"prompt_token_ids": numbers.integers(10, 250, one.prompt_tokens).tolist()}
                engine.add_request(f"{seed}-{one.req_id}", prompt, sampling)
                found[f"{seed}-{one.req_id}"] = {"arrival": one.arrival_s, "tokens": 0}
            for output in engine.step():
                times, now = found[output.request_id], self.clock() - start
                if count := len(output.outputs[0].token_ids):
                    times.setdefault("first", now)
                    times["tokens"] += count
                if output.finished:
                    times["end"] = now
        return found


def cell(argv: Sequence[str]) -> None:
    """Serve all seeds by one system, in a process of its own: requests, rate and seeds; write what came of them."""
    out, system, requests, rate, *seeds = argv
    engine = Engine(system)
    engine.serve(workload(60, 99, 1e6), 99)  # so that there is a history of lengths, as on a server that has run
    found = {}
    for seed in map(int, seeds):
        drawn = seed + (OTHER_SEEDS if system == AGAIN else 0)
        found[seed] = list(engine.serve(workload(int(requests), drawn, float(rate)), drawn).values())
    Path(out).write_text(json.dumps(found), encoding="utf-8")


def served(system: str, requests: int, rate: float, seeds: Sequence[int]) -> dict[int, list[Times]]:
    """Return the times of each request by seed.

    Raises:
        CellFailed: the engine did not start, or failed.
    """
    with tempfile.TemporaryDirectory(prefix="engine_clock-") as folder:
        out = Path(folder, "out.json")
        run(system, [sys.executable, __file__, "--cell", str(out), system, str(requests), str(rate), *map(str, seeds)])
        return {int(seed): rows for seed, rows in json.loads(out.read_text(encoding="utf-8")).items()}


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
    found = interval([math.log(other / one) for one, other in zip(ours, tuned, strict=True)], points=False)
    return found.value, found.low, found.high


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=400, help="of a seed (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--load", type=float, default=1.0, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if min(args.requests, args.seeds) < 1 or args.load <= 0:
        parser.error("--requests, --seeds, --load: must be greater than 0")
    requests, seeds = (100, [0]) if args.quick else (args.requests, list(range(args.seeds)))
    systems = [TUNED, "alise"] if args.quick else list(SYSTEMS)
    with CountProgress(1 + len(systems), label="engine_clock", unit="engine") as progress:
        backlog = sorted(row["end"] for row in served(TUNED, requests, 1e6, [OTHER_SEEDS - 1])[OTHER_SEEDS - 1])
        early, late = len(backlog) // 4, 3 * len(backlog) // 4
        capacity = (late - early) / (backlog[late] - backlog[early])
        rate = float(f"{args.load * capacity:.4g}")
        found = {}
        for number, system in enumerate(systems, 1):
            progress.update(number, system)
            found[system] = {seed: measures(rows) for seed, rows in served(system, requests, rate, seeds).items()}
    values: dict[str, dict[str, float]] = {}
    lines = []
    for system in systems:
        mean = {name: float(np.mean([found[system][s][name] for s in seeds])) for name in found[system][seeds[0]]}
        values[system] = {f"{name}_s": round(value, 4) for name, value in mean.items() if name != "share on time"}
        values[system]["share on time"] = round(mean["share on time"], 4)
        if system == TUNED:
            continue
        shown = []
        for name in MEASURES:
            ratio = compared([found[system][s][name] for s in seeds], [found[TUNED][s][name] for s in seeds])
            values[system] |= {
                f"{name}.{key}": round(x, 4) for key, x in zip(("ratio", "low", "high"), ratio, strict=True)
            }
            shown.append("{:.2f} [{:.2f}, {:.2f}]".format(*ratio))
        points = 100 * (mean["share on time"] - values[TUNED]["share on time"])
        values[system]["share on time.points"] = round(points, 2)
        lines.append([system, *shown, f"{points:+.0f}"])
    ours = values.pop("alise")
    low, high = ours["mean e2e.low"], ours["mean e2e.high"]
    note = f"mean {ours['mean e2e.ratio']}, interval {low} to {high}"
    claims = [Claim(name="alise: mean e2e, lower end of the interval", value=low, op=">=", goal=1.0, facts=note)]
    config = {
        "hardware": HARDWARE.spec.model_dump(), "requests": requests, "seeds": seeds, "load": args.load,
        "saturation_requests_per_s": round(capacity, 4), "systems": systems,
    }  # fmt: skip
    result = Result(
        name="engine_clock",
        command=command(argv, __file__),
        config=config,
        seed=args.seed,
        workload=Workload(
            name="sharegpt-like", rows=requests, sha256=hashlib.sha256(repr(config).encode()).hexdigest()
        ),
        metrics=ours,
        baselines=values,
        claims=claims,
    )
    emit(result, [Table(["over vLLM", *MEASURES, "on time, points"], lines)], args.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cell"]:
        cell(sys.argv[2:])
    else:
        main(sys.argv[1:])
