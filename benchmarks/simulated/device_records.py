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

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import simulated

from vllm_ext.config.attention import OWN, STOCK
from vllm_ext.experiments.experiment import Experiment, Findings
from vllm_ext.experiments.grid import Grid, with_extremes
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import Claim
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.workloads.spec import WorkloadSpec

SHARES = (0.1, 0.2, 0.4, 0.7)
STOCK_SHARE = 0.2
"""At which vLLM's kernel is measured, too."""
BASE = "no records"
BLOCK_TOKENS = 32
FOUND, LATENCY = "history_found_fraction", "normalised_latency_mean_ms_per_token"
MEASURES = ("prefill_tokens", LATENCY, "ttft_mean_ms", "preemptions")
"""And `FOUND` of conversations."""
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

    @property
    def measures(self) -> tuple[str, ...]:
        """What is shown of it."""
        return (FOUND, *MEASURES) if self.asked is _TALKS else MEASURES


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


def rows(scene: Scene) -> dict[str, dict[str, Any]]:
    """Return the options of vllm_ext of each row, the base first."""
    found: dict[str, dict[str, Any]] = {BASE: {}}
    found |= {name: {"kv_tier": dict(tier)} for name, tier in scene.beside.items()}
    for share, kernel in [*((share, OWN) for share in SHARES), (STOCK_SHARE, STOCK)]:
        options = {"kv_tier": {"device_int8_share": share}, "attention": {"kernel": kernel}}
        found[f"{share:.0%} records, {kernel}"] = options
    return found


def spec(scene: Scene, options: dict[str, Any], requests: int, seed: int) -> SimulationSpec:
    """Return a run."""
    return SimulationSpec(
        engine=EngineSpec(
            system=scene.system,
            num_blocks=scene.num_blocks,
            block_size=BLOCK_TOKENS,
            max_num_batched_tokens=2048,
            max_model_len=2048 if scene.system == "alise-published" else 4096,
            profiled=True,
            prefix_caching=True,
            options=options,
        ),
        hardware=HardwareSpec(model="llama-3.1-8b", device="h100"),
        workload=WorkloadSpec(**scene.asked, num_requests=requests, seed=seed),
    )


def claims(grid: Grid) -> Iterator[Claim]:
    """Yield what was hoped for, and how it came out, of the best share of each scene with our kernel."""

    def own(scene: str, metric: str) -> list[float]:
        return [grid.mean(name, row, metric) for name, row in grid.cells if name == scene and row.endswith(OWN)]

    for scene in ("talks", "gaps"):
        base = grid.mean(scene, BASE, FOUND)
        missed = f"the base finds {base:.2f} of all" if 1.5 * base > 1 else "the arena takes from the blocks that run"
        value = round(max(own(scene, FOUND)) / base, 3)
        yield Claim(name=f"{scene}: {FOUND} over {BASE}", value=value, goal=1.5, why=missed)
    for other in (BASE, *SCENES["jobs"].beside):
        value = round(min(own("jobs", LATENCY)) / grid.mean("jobs", other, LATENCY), 3)
        missed = "fewer blocks mean more preemptions, and a GPU computes some 200 tokens again in no time"
        yield Claim(name=f"jobs: {LATENCY} over {other}", value=value, op="<=", goal=1.0, why=missed)


def run(runner: Runner) -> Findings:
    """Serve each scene with every share of records."""
    seeds, requests = runner.seeds(3), _QUICK_COUNT if runner.quick else _COUNT
    specs = {
        (name, row): partial(spec, scene, options, requests)
        for name, scene in SCENES.items()
        for row, options in rows(scene).items()
    }
    grid = runner.grid(specs, seeds)
    means = {
        f"{scene}.{row}.{name}": grid.mean(scene, row, name)
        for scene, row in grid.cells
        for name in SCENES[scene].measures
    }
    bases = {key: value for key, value in means.items() if f".{BASE}." in key}
    return Findings(
        tables=[
            Table(
                ["row", *scene.measures],
                [[row, *(with_extremes(grid.values(name, row, m)) for m in scene.measures)] for row in rows(scene)],
                title=f"{name}: {scene.description}, {scene.num_blocks} blocks",
            )
            for name, scene in SCENES.items()
        ],
        claims=[*claims(grid)],
        metrics={key: value for key, value in means.items() if key not in bases},
        baselines={BASE: bases},
        config={"seeds": seeds, "requests": requests, "scenes": {n: s.description for n, s in SCENES.items()}},
        workload=[spec(scene, {}, requests, seed).workload for scene in SCENES.values() for seed in seeds],
    )


EXPERIMENT = Experiment(
    id="device_records", title="Is it worth it to give device memory to records of 8 bits?", run=run
)

if __name__ == "__main__":
    simulated.main(EXPERIMENT, sys.argv[1:])
