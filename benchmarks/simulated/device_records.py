"""Is it worth it to give a part of the device's KV memory to records of 8 bits?

Question: at equal bytes on the device, how much of what conversations repeat, and of what preempted requests had
computed, is found there, and what does it do to latency?

Method: the real schedulers in virtual time on a simulated GPU, with a profile, and records that take the time that
their bytes take in the device's memory; with vLLM's kernel, which has every record that a step reads unpacked first
(``stock``), and with ours, which reads them where they are (``own``). Rows have the same memory: what becomes arena is
taken from the blocks, scratch pages included. Scenes: *talks*, conversations with think times on vLLM's rules (fcfs);
*gaps*, the same where lookups go on behind what is gone (pensieve); *jobs*, requests that a system preempts for others
(alise-published), whose KV is computed again, kept in records, or swapped to host memory. Everything is deterministic
given the seed; intervals are over seeds.

    python benchmarks/simulated/device_records.py --quick
    python benchmarks/simulated/device_records.py --jobs 2 --out benchmarks/results/device_records.json
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, NamedTuple

from parallel import finished

from vllm_ext.config.attention import OWN, STOCK
from vllm_ext.report.results import Goal, Result, Workload, argument_parser, command, emit, format_table
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.workloads.spec import WorkloadSpec

SHARES = (0.1, 0.2, 0.4, 0.7)
STOCK_SHARE = 0.2
"""At which vLLM's kernel is measured, too."""
BASE = "no records"
BLOCK_TOKENS = 32
FOUND, LATENCY = "history_found_fraction", "normalised_latency_mean_ms_per_token"
MEASURES = (FOUND, "prefill_tokens", LATENCY, "ttft_mean_ms", "preemptions")
_COUNT, _QUICK_COUNT = 100, 40
_TALKS: dict[str, Any] = {
    "source": "pensieve-sharegpt", "min_turns": 2, "max_turns": 8, "scale_prompt": 4.0, "think_s": 8.0,
    "rate_per_s": 12.0, "max_tokens": 512,
}  # fmt: skip
_JOBS: dict[str, Any] = {"source": "alpaca-like", "scale_prompt": 8.0, "scale_output": 2.0, "rate_per_s": 80.0}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A server, and what is asked of it."""

    description: str
    system: str
    num_blocks: int
    asked: Mapping[str, Any]
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other ways to treat KV, by name: options of the tier."""


SCENES = {
    "talks": Scene(description="conversations, fcfs", system="fcfs", num_blocks=900, asked=_TALKS),
    "gaps": Scene(description="conversations, pensieve on the device", system="pensieve", num_blocks=900, asked=_TALKS),
    "jobs": Scene(
        description="preempted requests, alise-published",
        system="alise-published",
        num_blocks=300,
        asked=_JOBS,
        beside={"host swapping": {"gib": 16.0, "bits": 8}},
    ),
}


class Job(NamedTuple):
    """One run."""

    scene: str
    row: str
    seed: int
    requests: int

    def __str__(self) -> str:
        return f"{self.scene}, {self.row}, seed {self.seed}"


def rows(scene: Scene) -> dict[str, dict[str, Any]]:
    """Return the options of vllm_ext of each row, the base first."""
    found: dict[str, dict[str, Any]] = {BASE: {}}
    found |= {name: {"kv_tier": dict(tier)} for name, tier in scene.beside.items()}
    for share, kernel in [*((share, OWN) for share in SHARES), (STOCK_SHARE, STOCK)]:
        options = {"kv_tier": {"device_int8_share": share}, "attention": {"kernel": kernel}}
        found[f"{share:.0%} records, {kernel}"] = options
    return found


def spec(job: Job) -> SimulationSpec:
    """Return the description of a run."""
    scene = SCENES[job.scene]
    return SimulationSpec(
        engine=EngineSpec(
            system=scene.system,
            num_blocks=scene.num_blocks,
            block_size=BLOCK_TOKENS,
            max_num_batched_tokens=2048,
            max_model_len=2048 if scene.system == "alise-published" else 4096,
            profiled=True,
            prefix_caching=True,
            options=rows(scene)[job.row],
        ),
        hardware=HardwareSpec(model="llama-3.1-8b", device="h100"),
        workload=WorkloadSpec(**scene.asked, num_requests=job.requests, seed=job.seed),
    )


def run(jobs: Sequence[Job], at_a_time: int) -> dict[Job, dict[str, float]]:
    """Simulate what is not kept from before; return the measures of each run.

    Raises:
        SystemExit: runs failed, which are named; the others are kept.
        RuntimeError: requests of a run did not end.
    """
    metrics = finished({str(job): spec(job) for job in jobs}, at_a_time, label="records")
    return {job: {name: float(metrics[str(job)].get(name, 0.0)) for name in MEASURES} for job in jobs}


def goals(means: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[Goal]:
    """Return what was hoped for, and how it came out, of the best share of each scene with our kernel."""
    made = []
    for scene in ("talks", "gaps"):
        base, best = means[scene][BASE][FOUND], max(v[FOUND] for r, v in means[scene].items() if r.endswith(OWN))
        missed = f"the base finds {base:.2f} of all" if 1.5 * base > 1 else "the arena takes from the blocks that run"
        note = "" if best >= 1.5 * base else missed
        made.append(
            Goal(metric=f"{scene}: {FOUND} over {BASE}", value=round(best / base, 3), op=">=", goal=1.5, note=note)
        )
    jobs = means["jobs"]
    best = min(v[LATENCY] for r, v in jobs.items() if r.endswith(OWN))
    for other in (BASE, *SCENES["jobs"].beside):
        value = round(best / jobs[other][LATENCY], 3)
        note = (
            ""
            if value <= 1
            else "fewer blocks mean more preemptions, and a GPU computes some 200 tokens again in no time"
        )
        made.append(Goal(metric=f"jobs: {LATENCY} over {other}", value=value, op="<=", goal=1.0, note=note))
    return made


def main(argv: Sequence[str]) -> None:
    """Simulate, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="simulations at a time")
    args = parser.parse_args(argv)
    seeds = [args.seed] if args.quick else [args.seed + i for i in range(3)]
    requests = _QUICK_COUNT if args.quick else _COUNT
    jobs = [Job(name, row, seed, requests) for name, scene in SCENES.items() for row in rows(scene) for seed in seeds]
    found = run(jobs, args.jobs)
    means: dict[str, dict[str, dict[str, float]]] = {}
    tables, flat, bases = [], {}, {}
    for name, scene in SCENES.items():
        lines, means[name] = [], {}
        for row in rows(scene):
            values = {m: [found[Job(name, row, seed, requests)][m] for seed in seeds] for m in MEASURES}
            means[name][row] = {m: mean(v) for m, v in values.items()}
            lines.append([row, *(f"{mean(v):.4g} ({min(v):.4g}..{max(v):.4g})" for v in values.values())])
            target = bases if row == BASE else flat
            target |= {f"{name}.{row}.{m}": value for m, value in means[name][row].items()}
        tables.append(
            f"\n{name}: {scene.description}, {scene.num_blocks} blocks\n{format_table(['row', *MEASURES], lines)}"
        )
    checksum = hashlib.sha256("".join(spec(job).workload.model_dump_json() for job in jobs).encode()).hexdigest()
    result = Result(
        name="device_records",
        command=command(argv, __file__),
        config={"seeds": seeds, "requests": requests, "scenes": {n: s.description for n, s in SCENES.items()}},
        seed=args.seed,
        workload=Workload(name="conversations and single requests", rows=requests, sha256=checksum),
        metrics=flat,
        baselines={BASE: bases},
        goals=goals(means),
    )
    emit(result, tables, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
