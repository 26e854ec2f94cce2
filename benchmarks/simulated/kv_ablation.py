"""What are gaps, and the retention value, worth to conversations, each by itself, at equal stores?

Question: `pensieve` drops leading ends and computes them again across gaps; vLLM's look-up ends at the first missing
block, so that without gaps conversations must shrink from their tails. How much less of the histories is computed
again, and what becomes of latency, with gaps and without, and by which policy chunks go?

Method: the real schedulers in virtual time on simulated GPUs. All rows are `pensieve` with 16 bits, the same bytes in
the host, copies ahead of time that pay, and loads in the manner that costs less; rows differ in ``gaps`` and ``policy``
alone. Beside them stands vLLM 0.32 with its own tier (LRU, early stores). Scenes: *short*, conversations with the means
of ShareGPT; *shared heads*, a model with few KV heads, whose KV is cheap to move; *long*, prompts 32 times as
long, where leading chunks cost much less to compute again than late ones. Rates leave the device too small for the
conversations that are active. Shares and latencies are means over seeds; ratios are paired by seed, with the least and
the most.

    python benchmarks/simulated/kv_ablation.py --quick
    python benchmarks/simulated/kv_ablation.py --jobs 2 --out benchmarks/results/kv_ablation.json
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from parallel import finished

from vllm_ext.config.kv_tier import FUSED, LEADING, LOSSLESS, OFF, RETENTION, TAIL
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit, format_table
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.spec import EngineSpec, KvOffloadSpec, SimulationSpec
from vllm_ext.simulation.workloads.spec import WorkloadSpec

GAPS = "gaps, leading"
ROWS = {
    GAPS: {"gaps": FUSED, "policy": LEADING},
    **{f"no gaps, {policy}": {"gaps": OFF, "policy": policy} for policy in (RETENTION, TAIL, "lru")},
}
UPSTREAM = "vLLM, lru, early"
COMPUTED, MEAN, P99, TTFT, P90 = (
    "history_computed_tokens", "e2e_mean_ms", "e2e_p99_ms", "ttft_mean_ms", "normalised_latency_p90_ms_per_token"
)  # fmt: skip
FOUND = "history_found_fraction"
MEASURES = (FOUND, COMPUTED, MEAN, P99, TTFT, P90)
_DURATION_S, _QUICK_S = 400.0, 150.0


class Scene(NamedTuple):
    """A server, and what is asked of it."""

    model: str
    kv_gb: float
    """On the device."""
    host_gb: tuple[float, ...]
    rate_per_s: float
    """Of turns."""
    scale: float = 1.0
    """Of prompts' lengths."""
    max_model_len: int = 16_384


SCENES = {
    "short": Scene("opt-13b", 40.0, (22.0, 66.0), 4.5),
    "shared heads": Scene("llama-2-13b-gqa10", 10.0, (5.0, 20.0), 8.0),
    "long": Scene("llama-3.1-8b", 20.0, (20.0, 60.0), 2.5, 32.0, 65_536),
}


class Job(NamedTuple):
    """One run."""

    scene: str
    host_gb: float
    row: str
    seed: int
    duration_s: float

    def __str__(self) -> str:
        return f"{self.scene}, {self.host_gb:g} GB, {self.row}, seed {self.seed}"


def spec(job: Job) -> SimulationSpec:
    """Return the description of a run."""
    scene, host_bytes = SCENES[job.scene], int(job.host_gb * 1e9)
    kept: dict[str, Any]
    if job.row == UPSTREAM:
        kept = {"system": "upstream-fcfs", "kv_offload": KvOffloadSpec(cpu_bytes=host_bytes, policy="lru")}
    else:
        tier = {"gib": host_bytes / 2**30, "bits": LOSSLESS, **ROWS[job.row]}
        kept = {"system": "pensieve", "options": {"kv_tier": tier}}
    return SimulationSpec(
        engine=EngineSpec(**kept, max_model_len=scene.max_model_len, block_size=32, prefix_caching=True),
        hardware=HardwareSpec(model=scene.model, device="a100-80", kv_memory_bytes=int(scene.kv_gb * 1e9)),
        workload=WorkloadSpec(
            source="pensieve-sharegpt",
            rate_per_s=scene.rate_per_s,
            rate_counts="requests",
            scale_prompt=scene.scale,
            duration_s=job.duration_s,
            think_s=60.0,
            seed=job.seed,
        ),
    )


def ratios(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the pairs' ratios, the least and the most of them."""
    found = [one / max(other, 1e-9) for one, other in zip(ones, others, strict=True)]
    return fmean(found), min(found), max(found)


def main(argv: Sequence[str]) -> None:
    """Simulate, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="simulations at a time")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row")
    parser.add_argument("--scenes", default=",".join(SCENES), help="a comma list of them")
    args = parser.parse_args(argv)
    seeds = [args.seed] if args.quick else [args.seed + number for number in range(args.seeds)]
    scenes = [*args.scenes.split(",")][: 1 if args.quick else None]
    duration_s = _QUICK_S if args.quick else _DURATION_S
    rows = [*ROWS, UPSTREAM]
    jobs = [
        Job(scene, host_gb, row, seed, duration_s)
        for scene in scenes
        for host_gb in SCENES[scene].host_gb
        for row in rows
        for seed in seeds
    ]
    metrics = finished({str(job): spec(job) for job in jobs}, args.jobs, label="ablation")
    tables: list[str] = []
    flat: dict[str, float] = {}
    compared: list[tuple[str, dict[str, tuple[float, float, float]]]] = []
    for scene in scenes:
        for host_gb in SCENES[scene].host_gb:
            values = {
                row: {
                    measure: [metrics[str(Job(scene, host_gb, row, seed, duration_s))][measure] for seed in seeds]
                    for measure in MEASURES
                }
                for row in rows
            }
            name = f"{scene}, {host_gb:g} GB"
            flat |= {f"{name}.{row}.{m}": round(fmean(v), 4) for row, of in values.items() for m, v in of.items()}
            lines = [[row, *(f"{fmean(v):.4g}" for v in of.values())] for row, of in values.items()]
            tables.append(f"\n{name}\n{format_table(['row', *MEASURES], lines)}")
            compared += [(f"{name}: {one} over {other}", _compared(values[one], values[other])) for one, other in PAIRS]
    header = ["ratio", COMPUTED, MEAN, P99, TTFT, P90]
    shown = [[name, *(f"{m:.3f} ({low:.3f}..{high:.3f})" for m, low, high in of.values())] for name, of in compared]
    tables.append("\n" + format_table(header, shown))
    for name, of in compared:
        for measure, (ratio, low, high) in of.items():
            flat |= {
                f"{name}.{measure}_ratio{end}": round(v, 4) for end, v in zip(_ENDS, (ratio, low, high), strict=True)
            }
    checksum = hashlib.sha256("".join(spec(job).workload.model_dump_json() for job in jobs).encode()).hexdigest()
    upstream = {name: value for name, value in flat.items() if f".{UPSTREAM}." in name}
    result = Result(
        name="kv_ablation",
        command=command(argv, __file__),
        config={
            "seeds": seeds,
            "duration_s": duration_s,
            "scenes": {name: SCENES[name]._asdict() for name in scenes},
            "interval": "low and high are the least and the most of the seeds, paired",
        },
        seed=args.seed,
        workload=Workload(name="conversations of pensieve-sharegpt", rows=len(jobs), sha256=checksum),
        metrics={name: value for name, value in flat.items() if name not in upstream},
        baselines={UPSTREAM: upstream},
        goals=[],
    )
    emit(result, tables, args.out)


BASE = f"no gaps, {RETENTION}"
PAIRS = [(row, BASE) for row in (*ROWS, UPSTREAM) if row != BASE]
"""What is compared: all with what `pensieve` does."""
_ENDS = ("", "_low", "_high")


def _compared(ones: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[float]]) -> Any:
    return {m: ratios(ones[m], others[m]) for m in MEASURES[1:]}


if __name__ == "__main__":
    main(sys.argv[1:])
