"""Is any system slower than vLLM behind a shared prompt?

Question: today's traffic shares system prompts, documents and histories. A policy that counts whole prompts serves such
requests one at a time. How many steps, and what mean and P99 end-to-end time, does each system take of vLLM's?

Method: the real schedulers in virtual time on a simulated H100 with a profile. Requests come at once behind one prompt,
in pools of KV blocks in which the shared part dominates; every system serves the same requests. Scenes: *front*, a
shared prompt of 1,024 tokens and a short question each, in 120 blocks (a third of which is left beside the prompt);
*own*, the same with half as much of their own, in 300 blocks; *chunks*, the first with 256 tokens a step, which cut the
shared prompt; *room*, the first in 1,000 blocks; *host*, conversations behind the shared prompt, whose KV does not stay
on the device from one turn to the next and is found in host memory (vLLM with its own offloading connector and as much
memory); *gaps*, the same without host memory, where our lookups go on behind blocks that are gone. Everything is
deterministic given the seed; intervals are over seeds.
Systems that reserve the maximum for each request (``orca``, ``conservative``) are shown and held to nothing.
``past-future`` forecasts memory by the clients' bounds until ten requests have ended, which is measured, too.

    python benchmarks/simulated/shared_prefix.py --quick
    python benchmarks/simulated/shared_prefix.py --jobs 2 --out benchmarks/results/shared_prefix.json
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

from parallel import finished

from vllm_ext.config.kv_tier import FUSED
from vllm_ext.report.results import Goal, Result, Workload, argument_parser, command, emit, format_table
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.spec import EngineSpec, KvOffloadSpec, SimulationSpec
from vllm_ext.simulation.workloads.spec import WorkloadSpec
from vllm_ext.systems import table

UPSTREAM, TUNED = "upstream-fcfs", "upstream tuned"
RESERVING = ("orca", "conservative")
MEASURES = ("steps", "e2e_mean_ms", "e2e_p99_ms")
MOST = 1.05
BY_DESIGN = {
    "sarathi-chunked-only": "an ablation: prompts and decodes take steps of their own",
    "vllm-2023": "prompts and decodes take steps of their own",
    "fastgen": "steps of a fixed size, where throughput saturates: more and shorter ones",
    "accelgen": "matching fills memory to the last block: some five times vLLM's preemptions, all computed again",
    "fastserve": "preempts whoever used up its quantum, without a price; what it drops is computed again",
    "aggressive": "a twentieth of the blocks is kept from admissions",
    "past-future-published": "as past-future",
    "accelgen-published": "who lost an objective stays urgent, and preempts answers, which lose theirs by it",
    "pensieve": "a tenth of the blocks is kept from admissions",
    "pensieve-published": "as pensieve",
    "pensieve-published-turns": "as pensieve",
    "past-future": "joins only what fits at the predicted peak, where vLLM preempts; by bounds for the first ten",
}
"""Why a system takes more."""
_COUNT, _QUICK_COUNT = 200, 40
_GIB = 1 << 30
_PROMPTS: Any = {
    "cap_prompt_tokens": 600,
    "cap_output_tokens": 64,
    "system_prompt_tokens": 1024,
    "max_tokens": 128,
    "rate_per_s": 200.0,
}
_REQUESTS = {"source": "alpaca-like", "scale_output": 0.5}
_CONVERSATIONS = {
    "source": "pensieve-sharegpt",
    "min_turns": 2,
    "max_turns": 4,
    "scale_prompt": 8.0,
    "think_s": 0.5,
}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A pool, and what is asked of it."""

    description: str
    num_blocks: int
    own_scale: float = 1.0
    """Times the lengths of the questions."""
    budget: int = 2048
    conversations: bool = False
    """Whether each request is the next turn of a conversation."""
    host_gib: float = 0.0
    """Host memory for KV."""
    gaps: bool = False
    """Whether our lookups cross gaps."""


SCENES = {
    "front": Scene(description="a prompt of 1,024 tokens, short questions, 120 blocks", num_blocks=120),
    "own": Scene(description="the same, questions of some 500 tokens, 300 blocks", num_blocks=300, own_scale=16.0),
    "chunks": Scene(description="as front, 256 tokens a step", num_blocks=120, budget=256),
    "room": Scene(description="as front, 1,000 blocks", num_blocks=1000),
    "host": Scene(
        description="conversations behind the prompt, 400 blocks, 16 GiB of host memory",
        num_blocks=400,
        conversations=True,
        host_gib=16.0,
    ),
    "gaps": Scene(
        description="conversations behind the prompt, 400 blocks, lookups behind gaps",
        num_blocks=400,
        conversations=True,
        gaps=True,
    ),
}


class Job(NamedTuple):
    """One run; of conversations, one for each two requests."""

    scene: str
    system: str
    seed: int
    requests: int

    def __str__(self) -> str:
        return f"{self.scene}, {self.system}, seed {self.seed}"


def systems() -> list[str]:
    """Return the systems to compare, vLLM first."""
    return [UPSTREAM, TUNED, *(row.name for row in table(unserved=True) if not row.oracle)]


def spec(job: Job) -> SimulationSpec:
    """Return the description of a run."""
    scene = SCENES[job.scene]
    tuned, upstream = job.system == TUNED, job.system.startswith("upstream")
    offload = KvOffloadSpec(cpu_bytes=int(scene.host_gib * _GIB)) if upstream and scene.host_gib else None
    asked: dict[str, Any] = {**_REQUESTS, "scale_prompt": scene.own_scale, "num_requests": job.requests}
    if scene.conversations:
        asked = {**_CONVERSATIONS, "num_requests": job.requests // 2}
    tier = {**({"gib": scene.host_gib} if scene.host_gib else {}), **({"gaps": FUSED} if scene.gaps else {})}
    return SimulationSpec(
        engine=EngineSpec(
            system=UPSTREAM if tuned else job.system,
            num_blocks=scene.num_blocks,
            max_num_batched_tokens=scene.budget,
            max_model_len=4096 if scene.conversations else 1800,
            watermark=0.05 if tuned else 0.0,
            profiled=not upstream,
            kv_offload=offload,
            options={"kv_tier": tier} if tier and not upstream else {},
        ),
        hardware=HardwareSpec(model="llama-3.1-8b", device="h100"),
        workload=WorkloadSpec(**_PROMPTS, **asked, seed=job.seed),
    )


def run(jobs: Sequence[Job], at_a_time: int) -> dict[Job, dict[str, float]]:
    """Simulate what is not kept from before; return the measures of each run.

    Raises:
        SystemExit: runs failed, which are named; the others are kept.
        RuntimeError: requests of a run did not end.
    """
    metrics = finished({str(job): spec(job) for job in jobs}, at_a_time, label="shared prefix")
    return {job: {name: float(metrics[str(job)][name]) for name in MEASURES} for job in jobs}


def ratios(found: Mapping[Job, Mapping[str, float]], scene: str, system: str) -> dict[str, list[float]]:
    """Return each measure over upstream's, one ratio per seed."""
    result: dict[str, list[float]] = {name: [] for name in MEASURES}
    for job, metrics in found.items():
        if (job.scene, job.system) == (scene, system):
            base = found[job._replace(system=UPSTREAM)]
            for name in MEASURES:
                result[name].append(metrics[name] / base[name])
    return result


def main(argv: Sequence[str]) -> None:
    """Simulate, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="simulations at a time")
    parser.add_argument("--systems", help="comma list (default: all but oracles)")
    args = parser.parse_args(argv)
    chosen = [UPSTREAM, *args.systems.split(",")] if args.systems else systems()
    seeds = [args.seed] if args.quick else [args.seed + i for i in range(5)]
    requests = _QUICK_COUNT if args.quick else _COUNT
    jobs = [Job(scene, system, seed, requests) for scene in SCENES for system in chosen for seed in seeds]
    found = run(jobs, args.jobs)
    flat: dict[str, dict[str, float]] = {system: {} for system in chosen}
    goals, tables = [], []
    for scene, described in SCENES.items():
        rows = []
        for system in chosen:
            of_seeds = ratios(found, scene, system)
            for name, values in of_seeds.items():
                flat[system][f"{scene}.{name}_over_upstream"] = mean(values)
            rows.append([system, *(f"{mean(v):.3f} ({min(v):.3f}..{max(v):.3f})" for v in of_seeds.values())])
            if system in (UPSTREAM, TUNED, *RESERVING):
                continue
            for name in MEASURES[:2]:
                value = round(mean(of_seeds[name]), 4)
                metric = f"{scene}: {system}, {name} over upstream's"
                note = "" if value <= MOST else BY_DESIGN.get(system, "not explained yet")
                goals.append(Goal(metric=metric, value=value, op="<=", goal=MOST, note=note))
        tables.append(f"\n{scene}: {described.description}\n{format_table(['system', *MEASURES], rows)}")
    checksum = hashlib.sha256("".join(spec(job).workload.model_dump_json() for job in jobs).encode()).hexdigest()
    result = Result(
        name="shared_prefix",
        command=command(argv, __file__),
        config={"seeds": seeds, "requests": requests, "scenes": {n: s.description for n, s in SCENES.items()}},
        seed=args.seed,
        workload=Workload(name="alpaca-like behind a shared prompt", rows=requests, sha256=checksum),
        metrics={f"{s}.{k}": v for s, values in flat.items() if s not in (UPSTREAM, TUNED) for k, v in values.items()},
        baselines={name: flat[name] for name in (UPSTREAM, TUNED) if name in flat},
        goals=goals,
    )
    emit(result, tables, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
