"""What ALISE's reproductions share: hardware, workloads, and the systems that are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec

PAPER = "ALISE (arXiv 2410.23537)"
DATASETS = {"alpaca": "alpaca-vllm", "sharegpt": "sharegpt-vllm"}
"""The paper's data sets -> presets with the published mean lengths of the same data sets."""
MAX_TOKENS = {"alpaca": 512, "sharegpt": 1024}
"""What clients ask for at most: ORCA reserves it."""
PAPER_ERROR = {"alpaca": 0.034, "sharegpt": 0.092}
"""The paper's prediction errors (section 3.1)."""
NORMALISED = "normalised_latency_mean_ms_per_token"

# The paper leaves its age threshold open. With ours at 20 s a queue of more than two minutes is served in order of
# arrival, whatever is known of lengths; the overloads of the paper's figures last 30 minutes.
LATE_AGING = {"age_limit_s": 300.0}


NOT_AGED = {"num_levels": 1, "age_limit_s": 1e6}
"""Shortest remaining time first and nothing else: long requests may starve."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One line of a plot."""

    name: str
    system: str
    options: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    error: float | None = None
    """Mean relative error of the lengths that clients announce; None: nobody announces any."""
    start: float = 1.0
    """First guess of its rate, relative to that of vLLM-2023."""


ORCA = Contender(name="ORCA", system="orca", start=0.4)
VLLM_2023 = Contender(name="vLLM-2023", system="vllm-2023")
VLLM = Contender(name="vLLM 0.32 fcfs", system="upstream-fcfs", start=1.05)
VLLM_TUNED = Contender(
    name="vLLM 0.32 fcfs, tuned", system="upstream-fcfs", engine={"watermark": 0.05, "prefix_caching": True}, start=1.1
)
ORACLE_ALISE = Contender(name="ALISE, true lengths", system="oracle-alise", options={"ordering": LATE_AGING}, start=1.5)
ORACLE = Contender(
    name="Oracle",
    system="oracle-alise",
    options={"ordering": NOT_AGED},
    start=1.5,
)


TIER = {"kv_tier": {"gib": 64.0, "chunk_tokens": 16}}
"""Host memory that preempted KV is swapped to. Of a request of some 80 tokens chunks of 64 would hold too little."""


def alise(error: float, *, ordering: Mapping[str, Any] | None = None, suffix: str = "") -> Contender:
    """ALISE as published, with lengths perturbed by a stated mean relative error."""
    options = TIER if ordering is None else {**TIER, "ordering": dict(ordering)}
    name = f"ALISE, lengths +-{100 * error:.3g} %{suffix}"
    return Contender(name=name, system="alise-published", options=options, error=error, start=1.5)


def ours(error: float) -> Contender:
    """Our row, with as much host memory and the same aging."""
    name = f"alise, ours, lengths +-{100 * error:.3g} %"
    return Contender(name=name, system="alise", options={**TIER, "ordering": LATE_AGING}, error=error, start=1.5)


def spec(
    contender: Contender, model: str, dataset: str, rate_per_s: float, *, duration_s: float, seed: int
) -> SimulationSpec:
    """One run: Poisson arrivals for ``duration_s``, then until everybody has been served."""
    engine = {"prefix_caching": False, **contender.engine}
    return SimulationSpec(
        engine=EngineSpec(system=contender.system, options=dict(contender.options), max_model_len=2048, **engine),
        hardware=HardwareSpec(model=model, device="v100"),
        cost=CostSpec(kind="roofline"),
        workload=WorkloadSpec(
            source=DATASETS[dataset],
            arrivals="poisson",
            rate_per_s=rate_per_s,
            duration_s=duration_s,
            max_model_len=2048,
            over_context="cut",
            max_tokens=MAX_TOKENS[dataset],
            seed=seed,
            announce="none" if contender.error is None else "hint",
            announce_error=contender.error or 0.0,
        ),
    )


def workload(*datasets: str) -> dict[str, Any]:
    """Name, rows and checksum of the lengths, as `Findings` wants them."""
    built = [build(spec(VLLM, "opt-13b", d, 1.0, duration_s=1.0, seed=0).workload) for d in datasets]
    digest = (
        built[0].sha256 if len(built) == 1 else hashlib.sha256("".join(b.sha256 for b in built).encode()).hexdigest()
    )
    return {
        "workload_name": " and ".join(b.name for b in built),
        "workload_rows": sum(b.rows for b in built),
        "workload_sha256": digest,
    }


DIFFERENCES = (
    "Hardware is a roofline of one V100-32GB (the paper's Table 1 names no number of GPUs per model): rates are those "
    "of the cost model, ratios are what is compared.",
    "All systems run on today's engine loop (async scheduling, 16-token blocks, 256 seats, 2048 tokens a step) and "
    "differ in scheduling only; the paper's ORCA and vLLM were slower in other ways too.",
    "Lengths are log-normal with the data sets' published means, not the data sets themselves. Clients ask for at most "
    "512 (Alpaca) or 1024 tokens (ShareGPT); that is what ORCA reserves. The paper does not say what its ORCA "
    "reserved.",
    "ALISE is the row alise-published: it preempts whoever ranks worse and always swaps, in 8 bits, over a PCIe 3 "
    "link, to 64 GiB of host memory in chunks of 16 tokens. `alise, ours` asks first whether that pays. The rows with "
    "true lengths are oracle-alise, without host memory.",
    "ALISE's lengths are announced by clients with log-normal errors of the stated mean; its own predictor is not in "
    "these runs.",
    "The paper leaves the age threshold open; these runs use 300 s per promotion (our default of 20 s turns a queue of "
    "more than two minutes into first come, first served).",
)
