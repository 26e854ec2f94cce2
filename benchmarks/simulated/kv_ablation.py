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

import sys
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import simulated

from vllm_ext.config.kv_tier import FUSED, LEADING, LOSSLESS, OFF, RETENTION, TAIL
from vllm_ext.experiments.experiment import Experiment, Findings
from vllm_ext.experiments.grid import with_extremes
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.table import Table
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
BASE = f"no gaps, {RETENTION}"
"""What `pensieve` does: all others are compared with it."""


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


def spec(scene: Scene, host_gb: float, row: str, duration_s: float, seed: int) -> SimulationSpec:
    """Return a run."""
    host_bytes = int(host_gb * 1e9)
    kept: dict[str, Any]
    if row == UPSTREAM:
        kept = {"system": "upstream-fcfs", "kv_offload": KvOffloadSpec(cpu_bytes=host_bytes, policy="lru")}
    else:
        tier = {"gib": host_bytes / 2**30, "bits": LOSSLESS, **ROWS[row]}
        kept = {"system": "pensieve", "options": {"kv_tier": tier}}
    return SimulationSpec(
        engine=EngineSpec(**kept, max_model_len=scene.max_model_len, block_size=32, prefix_caching=True),
        hardware=HardwareSpec(model=scene.model, device="a100-80", kv_memory_bytes=int(scene.kv_gb * 1e9)),
        workload=WorkloadSpec(
            source="pensieve-sharegpt",
            rate_per_s=scene.rate_per_s,
            rate_counts="requests",
            scale_prompt=scene.scale,
            duration_s=duration_s,
            think_s=60.0,
            seed=seed,
        ),
    )


def run(runner: Runner) -> Findings:
    """Serve each scene by all rows, with less and more host memory."""
    scenes = dict([*SCENES.items()][: 1 if runner.quick else None])
    seeds, duration_s = runner.seeds(3), _QUICK_S if runner.quick else _DURATION_S
    stores = {f"{name}, {gb:g} GB": (scene, gb) for name, scene in scenes.items() for gb in scene.host_gb}
    rows = [*ROWS, UPSTREAM]
    grid = runner.grid({(at, row): partial(spec, *stores[at], row, duration_s) for at in stores for row in rows}, seeds)
    flat = {f"{at}.{row}.{m}": round(grid.mean(at, row, m), 4) for at, row in grid.cells for m in MEASURES}
    upstream = {name: value for name, value in flat.items() if f".{UPSTREAM}." in name}
    ratios: dict[str, dict[str, list[float]]] = {}
    for at, row in grid.cells:
        if row != BASE:
            pair = ratios[f"{at}: {row} over {BASE}"] = {m: grid.over(at, row, BASE, m) for m in MEASURES[1:]}
            for measure, found in pair.items():
                ends = {"": fmean(found), "_low": min(found), "_high": max(found)}
                flat |= {f"{at}: {row} over {BASE}.{measure}_ratio{end}": round(v, 4) for end, v in ends.items()}
    return Findings(
        tables=[
            *(
                Table(["row", *MEASURES], [[row, *(grid.mean(at, row, m) for m in MEASURES)] for row in rows], title=at)
                for at in stores
            ),
            Table(
                ["ratio", *MEASURES[1:]],
                [[pair, *(with_extremes(found, ".3f") for found in of.values())] for pair, of in ratios.items()],
                title=f"over {BASE}",
            ),
        ],
        claims=[],
        metrics={name: value for name, value in flat.items() if name not in upstream},
        baselines={UPSTREAM: upstream},
        config={
            "seeds": seeds,
            "duration_s": duration_s,
            "scenes": {name: scene._asdict() for name, scene in scenes.items()},
            "interval": "low and high are the least and the most of the seeds, paired",
        },
        workload=[spec(scene, 1.0, UPSTREAM, duration_s, seed).workload for scene in scenes.values() for seed in seeds],
    )


EXPERIMENT = Experiment(
    id="kv_ablation", title="What are gaps, and the retention value, worth to conversations at equal stores?", run=run
)

if __name__ == "__main__":
    simulated.main(EXPERIMENT, sys.argv[1:])
