"""What Past-Future's reproductions share: the pool, the workloads, and the schedulers that are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_ext.simulation.spec import EngineSpec
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec

PAPER = "Past-Future (arXiv 2507.10150)"
BLOCK = 16
CONTEXT = 18_000
"""Longest sequence, and where steps alone are counted tokens of the largest step, so that a prompt is computed in one.
Source: the paper's artifact (github.com/WuSiYu/lightllm-ae) starts its servers so."""
POOL_TOKENS = {"llama-2-7b": 120_000, "llama-2-13b": 64_000, "llama-2-70b": 550_000}
"""KV tokens by model. Source: the artifact's servers; the 70B model runs on four GPUs."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Lengths of one of the paper's data sets."""

    preset: str
    bound: int
    """What clients ask for at most: the longest output."""
    scale: float = 1.0
    """Factor on the preset's lengths."""
    mean_output: float = 0.0
    mean_held: float = 0.0
    """Tokens that a request of the distribution holds, averaged over steps; 0, here and above: not needed."""

    def lengths(self, shrink: int = 1) -> dict[str, Any]:
        """Fields of a workload, all lengths divided by ``shrink``."""
        factor = self.scale / shrink
        return {"source": self.preset, "scale_prompt": factor, "scale_output": factor}


_THOUSAND = 1000 / 1024
DATASETS = {
    "Distribution-1": Dataset(preset="distribution-1", bound=4096, mean_output=3072.0, mean_held=3657.0),
    "Distribution-2": Dataset(
        preset="distribution-2", bound=5000, scale=_THOUSAND, mean_output=4000.0, mean_held=6041.7
    ),
    "Distribution-3": Dataset(preset="distribution-3", bound=4096, mean_output=2064.0, mean_held=4437.6),
    "ShareGPT-o1": Dataset(preset="sharegpt-o1-like", bound=11_000),
}
"""The artifact takes k for 1024 in distributions 1 and 3, and for 1000 in distribution 2."""


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """One row of a table, or one line of a plot."""

    name: str
    system: str
    admission: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_oracle(self) -> bool:
        """Whether it knows the lengths."""
        return self.system.startswith("oracle-")

    @property
    def is_upstream(self) -> bool:
        """Whether it is vLLM's own."""
        return self.system.startswith("upstream-")


ROW = "past-future-published"
"""Of the systems table: what the claims are about."""
OURS = Scheduler(name="past-future, ours", system="past-future")
OPTIMUM = Scheduler(name="theoretical optimum", system="oracle-past-future")
VLLM = Scheduler(name="vLLM 0.32 fcfs", system="upstream-fcfs")
VLLM_TUNED = Scheduler(name="vLLM 0.32 fcfs, watermark 5 %", system="upstream-fcfs", engine={"watermark": 0.05})


def past_future(reserve: float, **others: int) -> Scheduler:
    """The paper's row with a share of the pool left free, and with other parameters than the paper's."""
    name = ", ".join((f"reserved={reserve:.0%}", *(f"{field}={value}" for field, value in others.items())))
    return Scheduler(name=f"past-future ({name})", system=ROW, admission={"reserve": reserve, **others})


def aggressive(watermark: float) -> Scheduler:
    """Admission below a watermark."""
    return Scheduler(
        name=f"aggressive (watermark={watermark:.0%})", system="aggressive", admission={"watermark": watermark}
    )


def conservative(overcommit: float, *, pool: float | None = None) -> Scheduler:
    """Admission by maximum lengths; ``pool`` is what that overcommit means here, if not itself."""
    name = "conservative" + (f" (overcommit={overcommit:.0%})" if overcommit > 1 else "")
    return Scheduler(name=name, system="conservative", admission={"overcommit": pool or overcommit})


def engine(
    scheduler: Scheduler, pool_tokens: int, *, shrink: int = 1, seats: int = 256, step_tokens: int = CONTEXT
) -> EngineSpec:
    """Engine with a pool of that size; with ``shrink``, everything that is counted in tokens is so much smaller."""
    options = {"admission": dict(scheduler.admission)} if scheduler.admission else {}
    block = BLOCK // shrink
    return EngineSpec(
        system=scheduler.system,
        options=options,
        max_num_seqs=seats,
        max_num_batched_tokens=step_tokens // shrink,
        max_model_len=CONTEXT // shrink,
        block_size=block,
        num_blocks=pool_tokens // shrink // block + 1,  # vLLM keeps one for itself
        prefix_caching=False,
        **scheduler.engine,
    )


def announced(scheduler: Scheduler) -> dict[str, Any]:
    """Fields of a workload: true lengths lie where only oracles read them."""
    return {"announce": "hidden"} if scheduler.is_oracle else {}


def described(*workloads: WorkloadSpec) -> dict[str, Any]:
    """Name, rows and checksum of the lengths, as `Findings` wants them."""
    built = [build(workload) for workload in workloads]
    joined = "".join(one.sha256 for one in built)
    return {
        "workload_name": " and ".join(one.name for one in built),
        "workload_rows": sum(one.rows for one in built),
        "workload_sha256": joined if len(built) == 1 else hashlib.sha256(joined.encode()).hexdigest(),
    }


DIFFERENCES = (
    "past-future is the row past-future-published, with the reserve that is named; `past-future, ours` is past-future "
    "with its defaults. The optimum is oracle-past-future.",
    "Pools (120,000, 64,000 and 550,000 KV tokens), contexts and what k means are those of the paper's published "
    "artifact; the paper's text does not give them.",
    "The schedulers run in vLLM 0.32's engine loop: prompts join the decodes' steps, requests may join at every step "
    "(the paper's: at every tenth), blocks of 16 tokens. A preempted request is recomputed.",
)
