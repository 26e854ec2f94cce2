"""What the cells of `engine_compare.py` add up to: correctness, metrics, medians, ratios, goals and the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from engine_rows import BASELINE, UPSTREAM

from vllm_ext.observability.results import Goal, format_table
from vllm_ext.simulation.latency import RequestTimeline, summarise

NORMALISED = "normalised_latency_mean_ms_per_token"
RATIOS = {
    NORMALISED: "normalised_latency_mean_ratio",
    "normalised_latency_p90_ms_per_token": "normalised_latency_p90_ratio",
    "e2e_mean_ms": "e2e_mean_ratio",
    "ttft_mean_ms": "ttft_mean_ratio",
    "ttft_p50_ms": "ttft_p50_ratio",
    "throughput_tokens_per_s": "throughput_tokens_ratio",
}
"""Metric -> name of its ratio to upstream-fcfs in the same repeat; the median over repeats is reported."""

GOALS = (
    ("oracle-alise", 0.9, NORMALISED, 0.6),
    ("oracle-alise", 0.5, NORMALISED, 1.02),
    ("alise", 0.5, NORMALISED, 1.02),
    ("alise@cold", 0.1, "ttft_p50_ms", 1.02),
    ("alise@warm", 0.1, "ttft_p50_ms", 1.02),
)
"""System, load, metric, and how large it may be relative to upstream-fcfs."""

COLUMNS = {
    NORMALISED: "norm ms/tok",
    "normalised_latency_p90_ms_per_token": "p90",
    "normalised_latency_p99_ms_per_token": "p99",
    "normalised_latency_mean_ratio": "x upstream",
    "ttft_mean_ms": "ttft ms",
    "ttft_p50_ms": "p50",
    "ttft_p99_ms": "p99",
    "tbt_p99_ms": "tbt p99",
    "throughput_tokens_per_s": "tok/s",
    "throughput_requests_per_s": "req/s",
    "mean_waiting_requests": "waiting",
    "preemptions": "preempt",
    "foreign_cpu_cores": "others",
}


class WrongOutput(RuntimeError):
    """A system did not serve every request to exactly its length; its latencies mean nothing."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measured run of one system at one load."""

    system: str
    load: float
    repeat: int
    metrics: Mapping[str, float]


def cell_metrics(label: str, spec: Mapping[str, Any], observed: Mapping[str, Any]) -> dict[str, float]:
    """Check a cell's outputs and reduce it to flat metrics.

    Raises:
        WrongOutput: a request is missing, has another length than it should, or did not end by itself.
    """
    lines = timelines(label, spec, observed)
    served, sent = observed["requests"], spec["requests"]
    late_s = max(got["sent_s"] - want["arrival_s"] for got, want in zip(served, sent, strict=True))
    merged = sum(b == a for line in lines for a, b in zip(line.token_times_s, line.token_times_s[1:], strict=False))
    tokens = sum(len(line.token_times_s) for line in lines)
    foreign = observed["foreign_cpu_cores"]
    return {
        **summarise(lines),
        **observed["load"],
        **observed.get("predictor", {}),
        **({} if foreign is None else {"foreign_cpu_cores": foreign}),
        "client_lateness_max_ms": late_s * 1000,
        "merged_token_fraction": merged / tokens,
        "engine_start_s": observed["engine_start_s"],
    }


def timelines(label: str, spec: Mapping[str, Any], observed: Mapping[str, Any]) -> list[RequestTimeline]:
    """Join what was sent with what came back.

    Raises:
        WrongOutput: see `cell_metrics`.
    """
    sent, served = spec["requests"], observed["requests"]
    if len(sent) != len(served):
        raise WrongOutput(f"{label}: {len(sent)} requests sent, {len(served)} finished")
    lines = []
    for want, got in zip(sent, served, strict=True):
        tokens, reason = len(got["token_times_s"]), got["finish_reason"]
        if tokens != want["output_tokens"] or reason != "stop":
            raise WrongOutput(
                f"{label}: request {got['req_id']} ended with {tokens} tokens, reason {reason!r}; expected "
                f"{want['output_tokens']} tokens, reason 'stop'. "
                "Is the forced-length hook installed in the engine core?"
            )
        lines.append(
            RequestTimeline(req_id=got["req_id"], arrival_s=want["arrival_s"], token_times_s=got["token_times_s"])
        )
    return lines


def reduce(cells: Sequence[Cell]) -> dict[tuple[str, float], dict[str, float]]:
    """Median over repeats per (system, load), with the median of the ratios to the baseline of the same repeat."""
    groups: dict[tuple[str, float], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.system, cell.load), []).append(cell)
    baseline = {(c.load, c.repeat): c.metrics for c in cells if c.system == BASELINE}
    reduced = {}
    for (system, load), group in groups.items():
        keys = set.intersection(*(set(c.metrics) for c in group))
        values = {key: median(c.metrics[key] for c in group) for key in sorted(keys)}
        for metric, name in RATIOS.items():
            ratios = [c.metrics[metric] / base[metric] for c in group if (base := baseline.get((load, c.repeat)))]
            if ratios and system != BASELINE:
                values[name] = median(ratios)
                values[f"{name}_min"], values[f"{name}_max"] = min(ratios), max(ratios)
        reduced[system, load] = values
    return reduced


def flatten(
    reduced: Mapping[tuple[str, float], Mapping[str, float]],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Split into metrics (``alise.load_0.9.ttft_mean_ms``) and baselines (system -> ``load_0.9.ttft_mean_ms``)."""
    metrics: dict[str, float] = {}
    baselines: dict[str, dict[str, float]] = {}
    for (system, load), values in reduced.items():
        for key, value in values.items():
            if system in UPSTREAM:
                baselines.setdefault(system, {})[f"load_{load:g}.{key}"] = value
            else:
                metrics[f"{system}.load_{load:g}.{key}"] = value
    return metrics, baselines


def goals(reduced: Mapping[tuple[str, float], Mapping[str, float]], note: str) -> list[Goal]:
    """The goals whose system, load and baseline were measured; a missed one states the queues it had to work with."""
    judged = []
    for system, load, metric, limit in GOALS:
        ratio = RATIOS[metric]
        values, base = reduced.get((system, load), {}), reduced.get((BASELINE, load), {})
        if ratio in values:
            facts = (
                f"waiting on average: {base['mean_waiting_requests']:.1f} ({BASELINE}), "
                f"{values['mean_waiting_requests']:.1f} ({system}); {values['preemptions']:.0f} preemptions; "
                f"ratio over repeats {values[f'{ratio}_min']:.3f} to {values[f'{ratio}_max']:.3f}"
            )
            judged.append(
                Goal(
                    metric=f"{system}.load_{load:g}.{ratio}",
                    value=values[ratio],
                    op="<=",
                    goal=limit,
                    note=f"{note} {facts}".strip(),
                )
            )
    return judged


def table(reduced: Mapping[tuple[str, float], Mapping[str, float]], columns: Mapping[str, str] = COLUMNS) -> str:
    """One line per load and system, in the order measured; ``columns`` maps metrics to headers."""
    by_load: Callable[[tuple[str, float]], float] = lambda key: key[1]  # noqa: E731 - a sort key, kept stable within a load
    rows = [
        [f"{load:g}", system, *(reduced[system, load].get(key) for key in columns)]
        for system, load in sorted(reduced, key=by_load)
    ]
    text: str = format_table(["load", "system", *columns.values()], rows)
    return text
