"""Past-Future, Figure 8: which settings of the schedulers do well where lengths change."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ext.envs import cache_dir
from vllm_ext.experiments.experiment import Findings, Variant, flat, line_plot
from vllm_ext.experiments.papers import past_future as base
from vllm_ext.experiments.runner import Runner
from vllm_ext.files import replaced
from vllm_ext.report.claim import PaperClaim
from vllm_ext.report.table import Table
from vllm_ext.simulation.spec import RecordSpec
from vllm_ext.simulation.workloads.synthetic import PRESETS

ORDER = ("ShareGPT-o1", "Distribution-1", "Distribution-2", "Distribution-3")
REQUESTS, QUICK_REQUESTS = 500, 80
"""Of each data set."""
BOUND = 8192
"""What clients ask for at most: what the longest outputs need but for some of o1's, which are cut."""
SETTINGS: Mapping[Callable[[float], Variant], tuple[Sequence[float], Sequence[float]]] = {
    base.past_future: ((0.0, 0.03, 0.05, 0.10, 0.20), (0.0, 0.05, 0.20)),
    base.aggressive: ((0.99, 0.95, 0.90, 0.80), (0.95, 0.90)),
    base.conservative: ((1.0, 1.5, 2.0, 3.0), (1.0, 2.0)),
}
"""Reserves, watermarks, overcommits: all, and those of quick runs."""
SHORT_WINDOW = base.past_future(0.05, ", window=200", window=200)
"""Learns of a change sooner than with the paper's 1000; the artifact's servers use 40 and 200."""
Line = Sequence[tuple[float, float]]
"""Evicted % -> decoding steps: more of the former, fewer of the latter."""
_PLACES = 201


@base.PAPER.figure(
    "past-future-fig8",
    "Figure 8 and section 5.3",
    "Parameters of past-future, aggressive and conservative on a load whose lengths change",
    (
        *base.DIFFERENCES,
        "The figure prints no numbers. What is told is how many more steps the others take at equal evictions: each "
        "scheduler's settings make a line of steps over evictions (a setting that another one beats in both is not on "
        "it), and the ratio of two lines is averaged over the evictions that both reach.",
        "The paper does not say how many requests each data set gives; here as many of each (config.requests_of_each).",
        "Every client's bound is 8192 tokens, which cuts the longest outputs of o1 (well below 1 % of them); a "
        "conservative scheduler needs an overcommit of 2 and more to be of use then, so these are in the figure.",
        "ShareGPT-o1 is log-normal with median and P90 of the artifact's data.",
    ),
)
def fig8(runner: Runner) -> Findings:
    """Can a watermark or an overcommit be chosen that does as well as past-future when lengths change?

    Method: Llama-2-7B; the four data sets stand one after the other in the queue; all requests wait from the start. Per
    setting: decoding steps while somebody waits, and evictions per request.
    """
    shrink, requests = (base.QUICK_SHRINK, QUICK_REQUESTS) if runner.quick else (1, REQUESTS)
    workload = {
        "source": str(_lengths(runner.seed, shrink, requests)),
        "arrivals": "at-once",
        "num_requests": len(ORDER) * requests,
        "max_tokens": BOUND // shrink,
        "seed": runner.seed,
    }
    reserves, marks, overcommits = ([make(one) for one in values[runner.quick]] for make, values in SETTINGS.items())
    own = [*reserves, base.OURS] if runner.quick else [*reserves, base.OURS, SHORT_WINDOW]
    variants = {c.name: c for c in (base.OPTIMUM, *own, *marks, *overcommits, base.VLLM, base.VLLM_TUNED)}
    specs = {
        name: base.spec(c, base.MODEL, workload, shrink=shrink, record=RecordSpec(backlog=True))
        for name, c in variants.items()
    }
    found = runner.metrics(specs)
    steps = {name: metrics["backlog_steps"] * shrink for name, metrics in found.items()}  # of the full lengths
    evicted = {name: base.evicted_percent(metrics) for name, metrics in found.items()}
    reached = {name: (evicted[name], steps[name]) for name in found}
    line, *others = (frontier(reached[c.name] for c in settings) for settings in (reserves, marks, overcommits))
    told = {"decoding_steps": steps, "evicted_percent": evicted}
    return Findings(
        tables=[
            Table(
                ("scheduler", "decoding steps", "memory %", "evicted %", "steps / past-future's at equal evictions"),
                [
                    (
                        name,
                        steps[name],
                        100 * metrics["backlog_kv_used_fraction"],
                        evicted[name],
                        _over(line, *reached[name]),
                    )
                    for name, metrics in found.items()
                ],
            )
        ],
        claims=[
            _fig8_claim(kind, other, line, reached[base.OURS.name])
            for kind, other in zip(("aggressive", "conservative"), others, strict=True)
        ],
        **flat(
            {(name,): {metric: values[name] for metric, values in told.items()} for name in found},
            where=str,
            own={name: f"{name}: " for name, c in variants.items() if "past-future" in c.system},
        ),
        config={
            "requests_of_each": requests,
            "order": ORDER,
            "lengths_divided_by": shrink,
        },
        plots=[
            line_plot(
                "",
                {
                    system: [(evicted[n], steps[n] / 1000) for n, c in variants.items() if c.system == system]
                    for system in dict.fromkeys(c.system for c in variants.values())
                },
                xlabel="evicted requests (%)",
                ylabel="decoding steps (thousands)",
                title="ShareGPT-o1, then Distributions 1 to 3",
            )
        ],
        workload=[specs[base.OPTIMUM.name].workload],
    )


def _lengths(seed: int, shrink: int, requests: int) -> Path:
    """Write the load to a file: the data sets in order."""
    lines = ["num_prefill_tokens,num_decode_tokens"]
    for number, name in enumerate(ORDER):
        data = base.DATASETS[name]
        factor = data.scale / shrink
        for prompt, output in zip(
            *PRESETS[data.preset].draw(np.random.default_rng((seed, number)), requests), strict=True
        ):
            lines.append(f"{max(1, round(prompt * factor))},{max(1, min(round(output * factor), BOUND // shrink))}")
    text = "\n".join(lines) + "\n"
    file = cache_dir() / "repro" / f"past-future-fig8-{hashlib.sha256(text.encode()).hexdigest()[:12]}.csv"
    with replaced(file) as opened:
        opened.write(text.encode())
    return file


def frontier(settings: Iterable[tuple[float, float]]) -> Line:
    """Return the settings, by evictions, that no other one equals in evictions and in steps."""
    line: list[tuple[float, float]] = []
    for evicted, steps in sorted(settings):
        if not line or steps < line[-1][1]:
            line.append((evicted, steps))
    return line


def at_equal_evictions(other: Line, own: Line) -> float:
    """Return steps of one line over steps of another, averaged over the evictions that both reach.

    Where one ends before the other begins, at the latter's fewest.
    """
    low, high = max(line[0][0] for line in (other, own)), min(line[-1][0] for line in (other, own))
    evicted = np.linspace(low, max(low, high), _PLACES)
    return float((_at(other, evicted) / _at(own, evicted)).mean())


def _at(line: Line, evicted: NDArray[np.float64] | float) -> Any:
    """Return the fewest steps with at most so many evictions, between two settings in proportion."""
    at, steps = zip(*line, strict=True)
    return np.interp(evicted, at, steps)


def _over(line: Line, evicted: float, steps: float) -> float | None:
    """Return steps over those of a line with at most as many evictions; None where it has more everywhere."""
    return None if evicted < line[0][0] else float(steps / _at(line, evicted))


def _fig8_claim(kind: str, other: Line, published: Line, ours: tuple[float, float]) -> PaperClaim:
    fewer = _over(other, *ours)
    return PaperClaim(
        name=f"decoding steps at equal evictions, {kind} / past-future",
        kind="tendency",
        goal=1.0,
        value=at_equal_evictions(other, published),
        ours=fewer and 1 / fewer,
        headline=True,
    )
