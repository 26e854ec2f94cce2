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

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import simulated

from vllm_ext.config.kv_tier import FUSED
from vllm_ext.experiments.experiment import Experiment, Findings
from vllm_ext.experiments.grid import Grid, with_extremes
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import Claim
from vllm_ext.report.table import Table
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


def spec(name: str, system: str, requests: int, seed: int) -> SimulationSpec:
    """Return a run; of conversations there is one for each two requests."""
    scene = SCENES[name]
    tuned, upstream = system == TUNED, system.startswith("upstream")
    offload = KvOffloadSpec(cpu_bytes=int(scene.host_gib * _GIB)) if upstream and scene.host_gib else None
    asked: dict[str, Any] = {**_REQUESTS, "scale_prompt": scene.own_scale, "num_requests": requests}
    if scene.conversations:
        asked = {**_CONVERSATIONS, "num_requests": requests // 2}
    tier = {**({"gib": scene.host_gib} if scene.host_gib else {}), **({"gaps": FUSED} if scene.gaps else {})}
    return SimulationSpec(
        engine=EngineSpec(
            system=UPSTREAM if tuned else system,
            num_blocks=scene.num_blocks,
            max_num_batched_tokens=scene.budget,
            max_model_len=4096 if scene.conversations else 1800,
            watermark=0.05 if tuned else 0.0,
            profiled=not upstream,
            kv_offload=offload,
            options={"kv_tier": tier} if tier and not upstream else {},
        ),
        hardware=HardwareSpec(model="llama-3.1-8b", device="h100"),
        workload=WorkloadSpec(**_PROMPTS, **asked, seed=seed),
    )


def claims(grid: Grid) -> Iterator[Claim]:
    """Hold each system to vLLM's steps and mean latency."""
    for scene, system in grid.cells:
        if system not in (UPSTREAM, TUNED, *RESERVING):
            for measure in MEASURES[:2]:
                yield Claim(
                    name=f"{scene}: {system}, {measure} over upstream's",
                    value=round(fmean(grid.over(scene, system, UPSTREAM, measure)), 4),
                    op="<=",
                    goal=MOST,
                    why=BY_DESIGN.get(system, "not explained yet"),
                )


def run(runner: Runner) -> Findings:
    """Serve the same requests with every system but oracles."""
    systems = [UPSTREAM, TUNED, *(row.name for row in table(unserved=True) if not row.oracle)]
    seeds, requests = runner.seeds(5), _QUICK_COUNT if runner.quick else _COUNT
    grid = runner.grid({(s, one): partial(spec, s, one, requests) for s in SCENES for one in systems}, seeds)
    over = {key: {name: grid.over(*key, UPSTREAM, name) for name in MEASURES} for key in grid.cells}
    flat: dict[str, dict[str, float]] = {system: {} for system in systems}
    for (scene, system), ratios in over.items():
        flat[system] |= {f"{scene}.{name}_over_upstream": fmean(values) for name, values in ratios.items()}
    ours = [system for system in systems if system not in (UPSTREAM, TUNED)]
    return Findings(
        tables=[
            Table(
                ["system", *MEASURES],
                [[one, *(with_extremes(values, ".3f") for values in over[name, one].values())] for one in systems],
                title=f"{name}: {scene.description}",
            )
            for name, scene in SCENES.items()
        ],
        claims=[*claims(grid)],
        metrics={f"{system}.{key}": value for system in ours for key, value in flat[system].items()},
        baselines={system: flat[system] for system in (UPSTREAM, TUNED)},
        config={"seeds": seeds, "requests": requests, "scenes": {n: s.description for n, s in SCENES.items()}},
        workload=[spec(scene, UPSTREAM, requests, seed).workload for scene in SCENES for seed in seeds],
    )


EXPERIMENT = Experiment(id="shared_prefix", title="Is any system slower than vLLM behind a shared prompt?", run=run)

if __name__ == "__main__":
    simulated.main(EXPERIMENT, sys.argv[1:])
