"""Pensieve, figures 3.12, 3.13, 3.15, 3.16 and 3.18: throughput at equal latency, and latency at equal load."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean

from vllm_ext.experiments.experiment import Findings, Plot, Variant, flat, line_plot
from vllm_ext.experiments.papers import pensieve as base
from vllm_ext.experiments.runner import Runner, Sustained
from vllm_ext.report.claim import PaperClaim, Reason, Verdict
from vllm_ext.report.table import Table
from vllm_ext.simulation.spec import SimulationSpec

LOW_LOADS = (0.25, 0.5, 0.75)
"""Of the rate that vLLM 0.2's schedule sustains: where latency is compared."""
SAVED = (0.40, 0.77)
"""Least and most of P90 that the paper's summary says is saved; it does not say at which load."""
TIMES_IDLE = (2.0, 3.0, 4.0, 5.0, 7.0, 10.0)
"""Limits, in latencies of an idle server, at which a table compares rates."""
LIMIT_TIMES_IDLE = 5.0
"""What `Model.limit_ms` is."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One setting: up to which rate each variant keeps the limit, and what its latency is at lower loads."""

    setting: base.Setting
    found: Mapping[str, Sustained]
    low: Mapping[tuple[float, str], float]
    """P90 by load and variant, of those that claims compare."""

    def ratio(self, one: Variant, other: Variant) -> float:
        """Return the rate of one variant over that of another."""
        return self.found[one.name].crossing_per_s / self.found[other.name].crossing_per_s

    def history_found(self, one: Variant) -> float:
        """Return the share of histories that was found, at the rate simulated next to where the limit is crossed."""
        found = self.found[one.name]
        return min(found.trials, key=lambda trial: abs(trial[0] - found.crossing_per_s))[1][base.FOUND]

    def saved(self, one: Variant, other: Variant, load: float) -> float:
        """Return which share of the P90 of another variant is saved at a load."""
        return 1 - self.low[load, one.name] / self.low[load, other.name]

    def curve(self, one: Variant) -> list[tuple[float, float]]:
        """Return P90 over rate, wherever it was simulated."""
        edge = self.found[base.VLLM_2023.name].crossing_per_s
        tried = ((rate, metrics[base.P90]) for rate, metrics in self.found[one.name].trials)
        return sorted([*tried, *((load * edge, ms) for (load, name), ms in self.low.items() if name == one.name)])

    def rate_at(self, one: Variant, times_idle: float) -> float | None:
        """Return the rate at which P90 first passes a limit, between two that were simulated; None: it does not."""
        limit_ms = base.MODELS[self.setting.model].limit_ms * times_idle / LIMIT_TIMES_IDLE
        for (low, below), (high, above) in pairwise(self.curve(one)):
            if below <= limit_ms < above:
                return low + math.log(limit_ms / below) / math.log(above / below) * (high - low)
        return None

    def by_limit(self) -> dict[float, tuple[float, float]]:
        """Return the rates of Pensieve and of stateless serving by limit, in times of idle latency."""
        pairs = {
            times: (self.rate_at(base.PENSIEVE, times), self.rate_at(base.VLLM_2023, times)) for times in TIMES_IDLE
        }
        return {times: (one, other) for times, (one, other) in pairs.items() if one is not None and other is not None}

    def claim(self, paper: float) -> PaperClaim:
        """Return Pensieve's gain over stateless serving beside the paper's."""
        by_limit = ", ".join(f"{times:g}: {one / other:.2f}" for times, (one, other) in self.by_limit().items())
        stateless = base.STATELESS.name in self.found  # which later seeds leave out
        today = f"over vLLM 0.32, stateless: {self.ratio(base.PENSIEVE, base.STATELESS):.2f}; " if stateless else ""
        return PaperClaim(
            name=f"{self.setting.name}: throughput at equal P90 normalised latency, Pensieve / stateless",
            goal=paper,
            value=self.ratio(base.PENSIEVE, base.VLLM_2023),
            headline=True,
            ours=self.ratio(base.OURS, base.VLLM_2023),
            tuned=self.ratio(base.OURS, base.TUNED),
            facts=f"{today}by limit, in latencies of an idle server: {by_limit}",
            reasons=ABOVE,
        )

    def plot(self, variants: Sequence[Variant]) -> Plot:
        """Return latency over the rate, up to three times the limit."""
        ceiling = 3 * base.MODELS[self.setting.model].limit_ms
        return line_plot(
            "-" + self.setting.name.replace(", ", "-").replace(" ", "-"),
            {c.name: [(rate, ms) for rate, ms in self.curve(c) if ms <= ceiling] for c in variants},
            xlabel="turns (1/s)",
            ylabel="P90 normalised latency (ms/token)",
            title=f"{self.setting.name}, simulated A100-80GB",
        )


ABOVE: Mapping[Verdict, Reason] = {}


def latency(settings: Sequence[Measured]) -> Iterator[PaperClaim]:
    """Yield what Pensieve saves of P90 at loads that stateless serving sustains, beside the paper's summary."""

    def mean(one: Variant, other: Variant) -> float:
        return fmean(m.saved(one, other, load) for m in settings)

    for load in LOW_LOADS if settings else ():
        yield PaperClaim(
            name=f"P90 normalised latency saved at {load:g} of the stateless rate, mean over the settings",
            goal=SAVED[0],
            most=SAVED[1],
            value=mean(base.PENSIEVE, base.VLLM_2023),
            headline=load == LOW_LOADS[1],
            ours=mean(base.OURS, base.VLLM_2023),
            tuned=mean(base.OURS, base.TUNED),
            facts=", ".join(f"{m.setting.name}: {m.saved(base.PENSIEVE, base.VLLM_2023, load):.2f}" for m in settings),
            reasons={"below": Reason("at such a load stateless serving hardly queues", f"column `P90 at {load:g}`")},
        )


def measure(
    runner: Runner, setting: base.Setting, variants: Sequence[Variant], compared: Sequence[Variant]
) -> Measured:
    """Measure variants, `VLLM_2023` among them, in a setting; at low loads those that are compared."""
    model, start = base.MODELS[setting.model], {c.name: c.start for c in variants}

    def make(variant: Variant, rate_per_s: float) -> SimulationSpec:
        duration_s = base.QUICK_S if runner.quick else base.DURATION_S
        return base.spec(variant, setting, rate_per_s, duration_s=duration_s, seed=runner.seed)

    found = runner.sustained(
        {c.name: partial(make, c) for c in variants},
        {base.P90: model.limit_ms},
        start_per_s=lambda name: start[name] * model.start_per_s,
        tolerance=0.15 if runner.quick else 0.13,  # three halvings; the crossing is interpolated between the last two
    )
    edge = found[base.VLLM_2023.name].crossing_per_s
    both = [c for c in variants if c in compared]
    low = runner.metrics({(load, c.name): make(c, load * edge) for load in LOW_LOADS for c in both})
    return Measured(setting=setting, found=found, low={key: metrics[base.P90] for key, metrics in low.items()})


def throughput(
    runner: Runner,
    gains: Mapping[base.Setting, float | None],
    variants: Sequence[Variant],
    also: Callable[[Measured], list[PaperClaim]] = lambda _: [],
    compared: Sequence[Variant] = base.JUDGED,
) -> Findings:
    """Measure throughput at equal latency in each setting.

    Args:
        runner: What runs simulations.
        gains: The paper's ratios over stateless serving, where it states one.
        variants: `VLLM_2023` and `PENSIEVE` among them, and where the paper states a ratio `JUDGED`.
        also: Returns what else a paper claims of a setting.
        compared: Whom claims compare.
    """
    if runner.judged_only:
        gains = {setting: gain for setting, gain in gains.items() if gain is not None}
        variants = [c for c in variants if c in compared]
    settings = [measure(runner, setting, variants, compared) for setting in gains]
    judged = [(m, gain) for m in settings if (gain := gains[m.setting]) is not None]
    claims = [*(m.claim(gain) for m, gain in judged), *latency([m for m, _ in judged])]
    told = {
        (m.setting.name, c.name): {
            "requests_per_s": m.found[c.name].crossing_per_s,
            base.FOUND: m.history_found(c),
            **{f"load_{load:g}.{base.P90}": m.low[load, c.name] for load in LOW_LOADS if (load, c.name) in m.low},
        }
        for m in settings
        for c in variants
    }
    rows = []
    for m in settings:
        for c in variants:
            one = told[m.setting.name, c.name]
            lows = (m.low.get((load, c.name)) for load in LOW_LOADS)
            rows.append(
                (m.setting.name, c.name, one["requests_per_s"], m.ratio(c, base.VLLM_2023), one[base.FOUND], *lows)
            )
    at = (f"P90 at {load:g}" for load in LOW_LOADS)
    limits = {(m.setting.name, times): pair for m in settings for times, pair in m.by_limit().items()}
    kept = flat(told, "{}.".format, own={base.PENSIEVE.name: ""})
    kept["metrics"] |= {
        f"{name}.ratio_at_{times:g}_times_idle": one / other for (name, times), (one, other) in limits.items()
    }
    return Findings(
        tables=[
            Table(("setting", "system", "requests/s", "/ stateless", "history found", *at), rows),
            Table(
                ("setting", "limit / idle latency", "Pensieve, requests/s", "stateless, requests/s", "ratio"),
                [(*key, one, other, one / other) for key, (one, other) in limits.items()],
                title="Rates by the limit of P90",
            ),
        ],
        claims=[*claims, *(claim for m in settings for claim in also(m))],
        **kept,
        config=base.config(variants, base.QUICK_S if runner.quick else base.DURATION_S),
        details={"curves": {f"{m.setting.name}, {c.name}": m.curve(c) for m in settings for c in variants}},
        plots=[m.plot(variants) for m in settings],
        workload=[base.spec(base.VLLM_2023, base.OPT_13B, 1.0, duration_s=1.0, seed=0).workload],
    )


GPU_CACHE_SAVED = {"opt-13b": 0.20, "llama-2-13b-gqa10": 0.40}
"""Largest share of normalised latency that the GPU cache alone saves, before the peak."""


@base.PAPER.figure(
    "pensieve-fig12", "Figure 3.12", "Throughput at equal P90 normalised latency, 13B models on one GPU", repeats=2
)
def fig12(runner: Runner) -> Findings:
    """How many more turns are served at the same latency if conversations keep their KV in GPU and host memory?"""

    def also(measured: Measured) -> list[PaperClaim]:
        saved = {load: measured.saved(base.GPU_ONLY, base.VLLM_2023, load) for load in LOW_LOADS}
        return [
            PaperClaim(
                name=f"{measured.setting.name}: P90 normalised latency saved by the GPU cache alone, largest share",
                goal=GPU_CACHE_SAVED[measured.setting.model],
                kind="up to",
                value=max(saved.values()),
                facts=", ".join(f"at {load:g} of the stateless rate: {share:.2f}" for load, share in saved.items()),
            )
        ]

    variants = base.SHOWN if runner.quick else (*base.SHOWN, base.PREFIX, base.OURS_8)
    gains = {base.OPT_13B: 1.25, base.LLAMA_13B: 1.52}
    return throughput(runner, gains, (*variants, base.GPU_ONLY), also, (*base.JUDGED, base.GPU_ONLY))


@base.PAPER.figure(
    "pensieve-fig13",
    "Figure 3.13",
    "Throughput at equal P90 normalised latency, large models on four GPUs",
    repeats=2,
)
def fig13(runner: Runner) -> Findings:
    """What becomes of the gain where models grow faster than their KV?"""
    gains = {base.Setting(model="opt-66b"): 1.5, base.Setting(model="llama-2-70b"): 1.6}
    return throughput(runner, gains, base.SHOWN)


@base.PAPER.figure(
    "pensieve-fig15",
    "Figure 3.15",
    "Throughput at equal P90 normalised latency, conversations of five turns or more",
    repeats=2,
)
def fig15(runner: Runner) -> Findings:
    """What becomes of the gain where more is said twice? Conversations with fewer than five turns are left out."""
    gains = {
        base.Setting(model=one.model, min_turns=5): gain for one, gain in ((base.OPT_13B, 1.3), (base.LLAMA_13B, 1.7))
    }
    return throughput(runner, gains, base.SHOWN)


@base.PAPER.figure(
    "pensieve-fig16",
    "Figure 3.16",
    "Throughput at equal P90 normalised latency by the users' reaction time",
    repeats=2,
)
def fig16(runner: Runner) -> Findings:
    """What becomes of the gain where KV has to wait for longer? The paper states it for 60 and 120 seconds."""
    by_think_s = {30.0: None, 60.0: 1.52, 120.0: 1.4}
    gains = {base.Setting(model=base.LLAMA_13B.model, think_s=think_s): gain for think_s, gain in by_think_s.items()}
    return throughput(runner, gains, base.SHOWN if runner.quick else (*base.SHOWN, base.PREFIX))


@base.PAPER.figure("pensieve-fig18", "Figure 3.18", "Unified batches against separate steps of prompts and decodes")
def fig18(runner: Runner) -> Findings:
    """What is unified batching worth to a server that computes only a few tokens of most prompts?

    Method: Pensieve as it is, and with the schedule of vLLM 0.2 instead, which has prompts go first, in steps without
    decodes. The paper shows the difference and states no number.
    """

    def also(measured: Measured) -> list[PaperClaim]:
        low = {
            load: measured.low[load, base.SEPARATE.name] / measured.low[load, base.PENSIEVE.name] for load in LOW_LOADS
        }
        return [
            PaperClaim(
                name="throughput at equal P90 normalised latency, unified / separate steps",
                kind="tendency",
                goal=1.0,
                value=measured.ratio(base.PENSIEVE, base.SEPARATE),
                facts="P90 of separate steps over that of unified ones at fractions of the stateless rate: "
                + ", ".join(f"{load:g}: {ratio:.2f}" for load, ratio in low.items()),
            )
        ]

    return throughput(
        runner, {base.LLAMA_13B: None}, (base.VLLM_2023, base.STATELESS, base.SEPARATE, base.PENSIEVE), also,
        (base.VLLM_2023, base.SEPARATE, base.PENSIEVE),
    )  # fmt: skip
