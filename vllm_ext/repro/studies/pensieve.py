"""What Pensieve's reproductions share: hardware, conversations, systems, and throughput at equal latency."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from vllm_ext.repro.bench import Bench, Crossing, Limit
from vllm_ext.repro.study import Claim, Findings, Plot
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.spec import EngineSpec, KvOffloadSpec, SimulationSpec
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec

PAPER = "Pensieve (EuroSys '25)"
PRESET = "pensieve-sharegpt"
P90 = "normalised_latency_p90_ms_per_token"
FOUND = "history_found_fraction"

GPUS = {"opt-13b": 1, "llama-2-13b-gqa10": 1, "opt-66b": 4, "llama-2-70b": 4}
"""Table 3.1."""
LIMIT_MS = {"opt-13b": 100.0, "llama-2-13b-gqa10": 80.0, "opt-66b": 130.0, "llama-2-70b": 135.0}
"""P90 normalised latency at which rates are compared, per token: about five times that of an idle server. The paper
compares where its curves turn up, and names no number."""
START_PER_S = {"opt-13b": 4.0, "llama-2-13b-gqa10": 6.0, "opt-66b": 4.0, "llama-2-70b": 5.0}
"""First guess of the rate of stateless serving."""
DURATION_S, SEARCH_S, QUICK_S = 1800.0, 900.0, 400.0
"""Conversations begin for so long; with a minute between turns it takes some 400 s to come to full load. Where a rate
is searched, runs are shorter: it takes some eight for each system."""
LOW_LOADS = (0.25, 0.5, 0.75)
"""Of the rate that vLLM 0.2's schedule sustains: where it is seen from which load on something is gained."""
GAIN = 0.05
"""A lower P90 by at least so much counts as gained."""

_KV_BYTES_PER_GPU = 40_000_000_000
_HOST_BYTES_PER_GPU = 220_000_000_000
_CONTEXT = 16_384


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One line of a plot."""

    name: str
    system: str
    tier: Mapping[str, Any] | None = None
    """Options of our host tier beside its size; None: none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Others of vllm_ext."""
    upstream_policy: Literal["lru", "arc"] | None = None
    """Eviction policy of vLLM's own host tier; None: none."""
    prefix_caching: bool = True
    start: float = 1.0
    """First guess of its rate, relative to stateless serving."""


VLLM_2023 = Contender(name="vLLM 0.2, stateless", system="vllm-2023", prefix_caching=False)
STATELESS = Contender(name="vLLM 0.32, stateless", system="upstream-fcfs", prefix_caching=False)
PREFIX = Contender(name="vLLM 0.32, prefix caching", system="upstream-fcfs")
LRU = Contender(name="prefix caching + host LRU", system="upstream-fcfs", upstream_policy="lru", start=1.3)
ARC = Contender(name="prefix caching + host ARC", system="upstream-fcfs", upstream_policy="arc", start=1.3)
ROW = "pensieve-published"
GPU_ONLY = Contender(name="Pensieve, GPU cache", system=ROW, start=1.1)
PENSIEVE = Contender(name="Pensieve", system=ROW, tier={}, start=1.3)
BY_TURNS = Contender(name="Pensieve, returns by turns", system=f"{ROW}-turns", tier={}, start=1.3)
"""With the probability of a return in the value, as the paper's text has it and its equation has not."""
OURS = Contender(name="pensieve, ours", system="pensieve", tier={}, start=1.3)
OURS_8 = Contender(name="pensieve, ours, 8 bits", system="pensieve", tier={"bits": 8}, start=1.4)
ALL = (VLLM_2023, STATELESS, PREFIX, LRU, ARC, GPU_ONLY, PENSIEVE, BY_TURNS, OURS, OURS_8)
MAIN = (VLLM_2023, STATELESS, PREFIX, LRU, GPU_ONLY, PENSIEVE, OURS)
QUICK = (VLLM_2023, STATELESS, LRU, PENSIEVE, OURS)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and its users."""

    model: str
    min_turns: int = 1
    think_s: float = 60.0

    @property
    def name(self) -> str:
        """As it stands in tables."""
        turns = f", {self.min_turns} turns or more" if self.min_turns > 1 else ""
        return self.model + turns + (f", reaction {self.think_s:g} s" if self.think_s != 60.0 else "")

    @property
    def limit(self) -> Limit:
        """The latency at which rates are compared."""
        return Limit(metric=P90, value=LIMIT_MS[self.model])


def spec(
    contender: Contender,
    setting: Setting,
    rate_per_s: float,
    *,
    duration_s: float,
    seed: int,
    host_share: float = 1.0,
) -> SimulationSpec:
    """Return one run: conversations begin for ``duration_s``, and all that began is served.

    Args:
        contender: Who serves.
        setting: Whom, with which model.
        rate_per_s: Of turns.
        duration_s: Nobody begins a conversation, or sends a turn, later.
        seed: Of all that is drawn.
        host_share: Of the paper's host memory.
    """
    gpus = GPUS[setting.model]
    host_bytes = int(_HOST_BYTES_PER_GPU * gpus * host_share)
    options = dict(contender.options)
    if contender.tier is not None:
        options["kv_tier"] = {"gib": host_bytes / 2**30, **contender.tier}
    offload = None
    if contender.upstream_policy is not None:
        offload = KvOffloadSpec(cpu_bytes=host_bytes, policy=contender.upstream_policy, blocks_per_chunk=2)
    return SimulationSpec(
        engine=EngineSpec(
            system=contender.system,
            options=options,
            max_model_len=_CONTEXT,
            prefix_caching=contender.prefix_caching,
            kv_offload=offload,
        ),
        hardware=HardwareSpec(
            model=setting.model, device="a100-80", tensor_parallel=gpus, kv_memory_bytes=_KV_BYTES_PER_GPU
        ),
        workload=WorkloadSpec(
            source=PRESET,
            rate_per_s=rate_per_s,
            rate_counts="requests",
            duration_s=duration_s,
            think_s=setting.think_s,
            min_turns=setting.min_turns,
            seed=seed,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One setting: where each contender's latency crosses the limit, and what it is at lower loads."""

    setting: Setting
    crossings: Mapping[str, Crossing]
    low: Mapping[tuple[float, str], float]
    """P90 by load and contender."""

    def ratio(self, one: Contender, other: Contender) -> float:
        """Return the rate of one contender over that of another."""
        return self.crossings[one.name].rate_per_s / self.crossings[other.name].rate_per_s

    def gains_from(self, one: Contender, other: Contender) -> float | None:
        """Return the first of the low loads at which one's P90 is lower by `GAIN`; None if it is at none of them."""
        loads = sorted({load for load, _ in self.low})
        gaining = (load for load in loads if self.low[load, one.name] < (1 - GAIN) * self.low[load, other.name])
        return next(gaining, None)


def _search_s(bench: Bench) -> float:
    return QUICK_S if bench.quick else SEARCH_S


def compare(bench: Bench, settings: Sequence[Setting], contenders: Sequence[Contender]) -> list[Measured]:
    """Measure contenders, `VLLM_2023` among them, in each setting."""
    duration_s = _search_s(bench)

    def make(contender: Contender, setting: Setting, rate_per_s: float) -> SimulationSpec:
        return spec(contender, setting, rate_per_s, duration_s=duration_s, seed=bench.seed)

    found = []
    for setting in settings:
        crossings = bench.crossings(
            {c.name: partial(make, c, setting) for c in contenders},
            setting.limit,
            start_per_s={c.name: c.start * START_PER_S[setting.model] for c in contenders},
            tolerance=0.15 if bench.quick else 0.08,
        )
        edge = crossings[VLLM_2023.name].rate_per_s
        low = {(load, c.name): make(c, setting, load * edge) for load in LOW_LOADS for c in contenders}
        at_low = {key: metrics[P90] for key, metrics in bench.metrics(low).items()}
        found.append(Measured(setting=setting, crossings=crossings, low=at_low))
    return found


def _claims(measured: Measured, *, paper: float) -> list[Claim]:
    """Return Pensieve's gain over stateless serving beside the paper's, and what it gains over today's caches."""
    name, gains = measured.setting.name, f"{measured.setting.name}: throughput at equal P90 normalised latency"
    stateless = measured.ratio(PENSIEVE, STATELESS)
    from_load = measured.gains_from(PENSIEVE, VLLM_2023)
    seen = "at no load measured below it" if from_load is None else f"from {from_load:g} of its rate on"
    found = [
        Claim(
            name=f"{gains}, Pensieve / stateless",
            paper=paper,
            ours=measured.ratio(PENSIEVE, VLLM_2023),
            headline=True,
            note=f"over vLLM 0.2's schedule; over vLLM 0.32's {stateless:.2f}. P90 is lower by {GAIN:.0%} {seen}",
        )
    ]
    found += [
        Claim(
            name=f"{name}: the same, Pensieve / {other.name} (not in the paper: better than 1)",
            paper=1.0,
            ours=measured.ratio(PENSIEVE, other),
            note="with as many bytes in the host",
        )
        for other in (LRU, ARC)
        if other.name in measured.crossings
    ]
    return found


HEADER = ("setting", "system", "requests/s", "/ stateless", "history found", *(f"P90 at {x:g}" for x in LOW_LOADS))
"""The rate at the limit, the share of histories found near it, and P90 in ms/token at fractions of vLLM 0.2's rate."""


def throughput(
    bench: Bench,
    gains: Mapping[Setting, float | None],
    contenders: Sequence[Contender],
    *,
    also: Callable[[Measured], list[Claim]] | None = None,
) -> Findings:
    """Measure throughput at equal latency in each setting.

    Args:
        bench: What runs simulations.
        gains: The paper's ratios over stateless serving, where it states one.
        contenders: `VLLM_2023`, `STATELESS` and `PENSIEVE` among them.
        also: Returns what else a paper claims of a setting.
    """
    measured = compare(bench, list(gains), contenders)
    found = [_claims(m, paper=gain) for m in measured if (gain := gains[m.setting]) is not None]
    if also is not None:
        found += [also(m) for m in measured]
    return Findings(
        header=HEADER,
        rows=[_row(m, c) for m in measured for c in contenders],
        claims=[claim for some in found for claim in some],
        metrics=_metrics(measured, PENSIEVE),
        baselines={c.name: _metrics(measured, c) for c in contenders if c is not PENSIEVE},
        config=config(contenders, duration_s=_search_s(bench)),
        plots=[Plot(suffix=_suffix(m.setting), draw=partial(_draw, m, contenders)) for m in measured],
        **workload(),
    )


def _row(measured: Measured, contender: Contender) -> tuple[object, ...]:
    crossing = measured.crossings[contender.name]
    low = (measured.low[load, contender.name] for load in LOW_LOADS)
    gain = measured.ratio(contender, VLLM_2023)
    return measured.setting.name, contender.name, crossing.rate_per_s, gain, _found_at_limit(crossing), *low


def _metrics(measured: Sequence[Measured], contender: Contender) -> dict[str, float]:
    found = {}
    for m in measured:
        crossing = m.crossings[contender.name]
        found[f"{m.setting.name}.requests_per_s"] = crossing.rate_per_s
        found[f"{m.setting.name}.{FOUND}"] = _found_at_limit(crossing)
        found.update({f"{m.setting.name}.load_{load:g}.{P90}": m.low[load, contender.name] for load in LOW_LOADS})
    return found


def _found_at_limit(crossing: Crossing) -> float:
    """Return the share of histories that was found, at the rate simulated next to where the limit is crossed."""
    _, metrics = min(crossing.trials, key=lambda trial: abs(trial[0] - crossing.rate_per_s))
    return metrics[FOUND]


def _suffix(setting: Setting) -> str:
    return "-" + setting.name.replace(", ", "-").replace(" ", "-")


def _draw(measured: Measured, contenders: Sequence[Contender], path: Path) -> None:
    from vllm_ext.observability.plots import Series, lines

    ceiling, edge = 3 * measured.setting.limit.value, measured.crossings[VLLM_2023.name].rate_per_s
    series = []
    for contender in contenders:
        trials = measured.crossings[contender.name].trials
        points = [(rate, found[P90]) for rate, found in trials if found[P90] <= ceiling]
        points = sorted([*points, *((load * edge, measured.low[load, contender.name]) for load in LOW_LOADS)])
        series.append(Series(label=contender.name, x=[x for x, _ in points], y=[y for _, y in points]))
    lines(
        series,
        path,
        xlabel="turns (1/s)",
        ylabel="P90 normalised latency (ms/token)",
        title=f"{measured.setting.name}, simulated A100-80GB",
    )


def config(contenders: Sequence[Contender], *, duration_s: float) -> dict[str, Any]:
    """Return the settings that shaped a measurement."""
    return {
        "duration_s": duration_s,
        "limit_ms_per_token": LIMIT_MS,
        "kv_bytes_per_gpu": _KV_BYTES_PER_GPU,
        "host_bytes_per_gpu": _HOST_BYTES_PER_GPU,
        "contenders": [c.name for c in contenders],
    }


def workload() -> dict[str, Any]:
    """Return name, rows and checksum of the conversations, as `Findings` wants them."""
    built = build(spec(VLLM_2023, Setting(model="opt-13b"), 1.0, duration_s=1.0, seed=0).workload)
    return {"workload_name": built.name, "workload_rows": built.rows, "workload_sha256": built.sha256}


DIFFERENCES = (
    "Hardware is a roofline of A100-80GB GPUs: rates are those of the cost model, ratios are what is compared. Of each "
    "KV takes 40 GB, and host memory is 220 GB per GPU, as in the paper.",
    "Conversations have the paper's means of turns and lengths (table 3.2) and its share with 5 turns or more, but are "
    "drawn, not ShareGPT's own.",
    "The paper names no latency at which throughput is compared; here it is about five times that of an idle server.",
    "The stateless baseline of the paper is vLLM 0.2, whose schedule (steps of prompts before steps of decodes) runs "
    "here in today's engine loop. vLLM 0.32, with prefix caching and with host memory too, is beside it; the paper did "
    "not have it.",
    "Pensieve runs in vLLM's engine loop: blocks of 16 tokens, chunks of 32, prompts in pieces of at most 2048 tokens, "
    "async scheduling. It is the row pensieve-published: stores and loads always, eviction by equation 3.4. `Pensieve, "
    "returns by turns` has the probability of a return as well, as the paper's text; `pensieve, ours` is beside both.",
    "Rates count turns. A run begins with an empty server and caches, and that is part of its P90.",
)
