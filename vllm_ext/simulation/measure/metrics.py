"""From the data of a run to flat metrics, under the names that `latency.summarise` gives to those of real servers.

Latencies are those of requests that finished. A request that ended otherwise (its client gave up) is counted as
aborted, has no latency, and missed its objectives: nobody got an answer. So did one that was rejected, as its prompt
fills the model's context. A request that still ran or waited when the run was cut off is counted as unfinished; it
missed the objectives that it could no longer meet, and is left out of the shares of those that were still open.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ext.simulation.measure.latency import spread, summarise_columns
from vllm_ext.simulation.measure.run_data import REJECTED, RequestTable, RunData

_MS = 1000.0
ON_TIME_TTFT_S, ON_TIME_PER_TOKEN_S = 5.0, 0.2
"""A request is on time that has its first token within 5 s of its arrival and its last within 200 ms for each."""
BUCKET_TOKENS = 200
"""Width of the length buckets. ALISE's "evenly divided bins" have no stated number; this width is ours."""


def summarise(run: RunData) -> dict[str, float]:
    """Reduce a run to flat metrics; units are part of the names and every value is finite.

    What was not measured is left out: without a finished request there are the counts and the server's state only.
    ``tbt_*`` covers every gap between tokens, those of aborted requests included, and may be 0.1 % too high, the width
    of the histogram's bins. Each counter of the run becomes a metric of its name.
    """
    table, finished = run.requests, run.finished()
    metrics = {name: value for name, value in run.counters.items() if math.isfinite(value)}
    metrics["requests"] = float(finished.sum())
    metrics["aborted_requests"] = float(len(table) - finished.sum())
    metrics["output_tokens"] = float(table.column("output_tokens")[finished].sum())
    metrics.setdefault("preemptions", float(table.column("preemptions").sum()))
    metrics.update(_server(run))
    if finished.any():
        metrics.update(_latencies(run, finished))
        metrics.update(_objectives(run, finished, metrics["duration_s"]))
        metrics.update(_prediction(table, finished))
        metrics.update(_histories(table, finished))
    return metrics


def windows_of(run: RunData, count: int) -> dict[str, float]:
    """Return what parts of a run measured, so that two runs of the same requests can be compared part by part.

    Args:
        run: Its requests that ended are cut by arrival into parts of equal numbers.
        count: How many; 0: nothing is returned.

    Returns:
        ``window_K.`` and mean and P99 of the end-to-end latency, P90 of the TTFT, and share of the objectives met, of
        part K from 0; and ``middle_requests_per_s``, at which rate requests ended between the first and the last
        quarter of the ends: what a server carries that always has a queue.
    """
    table, finished = run.requests, run.finished()
    if not count or finished.sum() < 2 * count:
        return {}
    met = met_objectives(table, finished)["all"]
    e2e_ms, ttft_ms = table.column("e2e_s") * _MS, table.column("ttft_s") * _MS
    metrics = dict[str, float]()
    for number, rows in enumerate(np.array_split(np.argsort(table.column("arrival_s"), kind="stable"), count)):
        ended = rows[finished[rows]]
        if len(ended):
            found = spread("e2e", e2e_ms[ended], "ms", ("mean", "p99"))
            found |= spread("ttft", ttft_ms[ended], "ms", ("p90",))
            found["slo_attainment_fraction"] = float(met[rows].mean())
            metrics |= {f"window_{number}.{name}": value for name, value in found.items()}
    ends = np.sort(table.column("finish_s")[finished])
    first, last = len(ends) // 4, 3 * len(ends) // 4
    if (span_s := ends[last] - ends[first]) > 0:
        metrics["middle_requests_per_s"] = float((last - first) / span_s)
    return metrics


def _latencies(run: RunData, finished: NDArray[np.bool_]) -> dict[str, float]:
    def of(name: str) -> NDArray[Any]:
        return run.requests.column(name)[finished]

    metrics = summarise_columns(*map(of, ("arrival_s", "first_token_s", "finish_s", "output_tokens")))
    metrics.update(spread("scheduling_delay", of("scheduling_delay_s"), "s", ("mean", "p50", "p99")))
    metrics.update(spread("waited", of("waited_s"), "s", ("mean", "p99", "max")))
    on_time = (of("ttft_s") <= ON_TIME_TTFT_S) & (of("e2e_s") <= ON_TIME_PER_TOKEN_S * of("output_tokens"))
    metrics["on_time_fraction"] = float(on_time.mean())
    metrics["prompt_tokens"] = float(of("prompt_tokens").sum())
    metrics["cached_prompt_tokens_fraction"] = float(of("cached_prompt_tokens").sum() / of("prompt_tokens").sum())
    metrics["preempted_requests_fraction"] = float((of("preemptions") > 0).mean())
    if run.gaps.count:
        metrics["tbt_mean_ms"] = run.gaps.mean_s * _MS
        for percent in (50, 90, 99):
            metrics[f"tbt_p{percent}_ms"] = run.gaps.quantile_s(percent / 100) * _MS
        metrics["tbt_max_ms"] = run.gaps.max_s * _MS
    return metrics


def met_objectives(table: RequestTable, finished: NDArray[np.bool_]) -> dict[str, NDArray[np.bool_]]:
    """Return which requests met which objective, each of shape [rows].

    Returns:
        ``ttft``, ``tbt`` and ``e2e``, and ``all`` of them. An objective that a request does not have is met if it
        finished, as is that of the gaps between tokens where there is one token only.
    """
    taken_s = {"ttft": "ttft_s", "tbt": "max_gap_s", "e2e": "e2e_s"}
    met = {name: finished & ~(table.column(of) > table.column(f"slo_{name}_s")) for name, of in taken_s.items()}
    return {**met, "all": met["ttft"] & met["tbt"] & met["e2e"]}


def missed_for_certain(run: RunData) -> dict[str, NDArray[np.bool_]]:
    """Return which requests of `RunData.unserved` missed which objective whatever came later, each of shape [rows].

    Returns:
        ``ttft``, ``tbt`` and ``e2e``, and ``all``: any of them. Who was rejected missed all.
    """
    table, now_s = run.unserved, run.duration_s
    arrival_s, first_token_s = table.column("arrival_s"), table.column("first_token_s")
    rejected = table.column("finish_reason") == REJECTED
    taken_s = {
        "ttft": np.where(np.isnan(first_token_s), now_s, first_token_s) - arrival_s,
        "tbt": table.column("max_gap_s"),
        "e2e": now_s - arrival_s,
    }
    missed = {name: rejected | (taken > table.column(f"slo_{name}_s")) for name, taken in taken_s.items()}
    return {**missed, "all": missed["ttft"] | missed["tbt"] | missed["e2e"]}


def _objectives(run: RunData, finished: NDArray[np.bool_], span_s: float) -> dict[str, float]:
    table, met, missed = run.requests, met_objectives(run.requests, finished), missed_for_certain(run)
    metrics = {}
    for name in ("ttft", "tbt", "e2e"):
        asked, asked_in_vain = (~np.isnan(one.column(f"slo_{name}_s")) for one in (table, run.unserved))
        if judged := asked.sum() + (missed[name] & asked_in_vain).sum():
            metrics[f"slo_{name}_attainment_fraction"] = float(met[name][asked].sum() / judged)
    of_tier, of_lost = table.column("tier"), run.unserved.column("tier")[missed["all"]]
    tiers = {f"tier.{tier}.": tier for tier in sorted({*of_tier, *of_lost} - {""})}
    for prefix, tier in {"": None, **tiers}.items():
        rows = np.ones_like(finished) if tier is None else of_tier == tier
        lost = len(of_lost) if tier is None else int((of_lost == tier).sum())
        metrics.update(_goodput(table, met["all"] & rows, int(rows.sum()) + lost, span_s, prefix))
        if prefix:
            metrics.update(_of_tier(table, rows & finished, prefix))
    return metrics


def _goodput(table: RequestTable, good: NDArray[np.bool_], judged: int, span_s: float, prefix: str) -> dict[str, float]:
    tokens = table.column("output_tokens")[good].sum()
    return {
        f"{prefix}slo_attainment_fraction": float(good.sum() / judged),
        f"{prefix}goodput_requests_per_s": float(good.sum()) / span_s if span_s > 0 else 0.0,
        f"{prefix}goodput_tokens_per_s": float(tokens) / span_s if span_s > 0 else 0.0,
    }


def _of_tier(table: RequestTable, rows: NDArray[np.bool_], prefix: str) -> dict[str, float]:
    """Counts and latencies of the finished requests of a tier."""
    metrics = {f"{prefix}requests": float(rows.sum())}
    if rows.any():
        normalised_ms = (table.column("e2e_s") * _MS / np.maximum(table.column("output_tokens"), 1))[rows]
        ttft_ms = (table.column("ttft_s") * _MS)[rows]
        metrics.update(spread(f"{prefix}normalised_latency", normalised_ms, "ms_per_token", ("mean", "p99")))
        metrics.update(spread(f"{prefix}ttft", ttft_ms, "ms", ("mean", "p99")))
    return metrics


def _prediction(table: RequestTable, finished: NDArray[np.bool_]) -> dict[str, float]:
    """How good the predicted output lengths of finished requests were; nothing if nobody predicted."""
    known = finished & (table.column("predicted_tokens") > 0)
    if not known.any():
        return {}
    predicted, true = table.column("predicted_tokens")[known], table.column("output_tokens")[known]
    metrics = {
        "predicted_requests": float(known.sum()),
        "prediction_relative_error_median_fraction": float(np.median(np.abs(predicted - true) / true)),
        "prediction_bucket_accuracy_fraction": float((predicted // BUCKET_TOKENS == true // BUCKET_TOKENS).mean()),
    }
    if len(true) > 1:
        from scipy import stats

        tau = float(stats.kendalltau(predicted, true).statistic)
        if math.isfinite(tau):  # all predictions, or all lengths, may be equal
            metrics["prediction_kendall_tau"] = tau
    return metrics


def _histories(table: RequestTable, finished: NDArray[np.bool_]) -> dict[str, float]:
    """What later turns found of what earlier ones said; nothing where no conversation went on.

    Each turn's prompt begins with the turn before and its answer, or where the context is full with a part of them.
    """
    columns = [table.column(name).tolist() for name in ("prompt_tokens", "output_tokens", "cached_prompt_tokens")]
    sessions = table.column("session_id").tolist()
    said: dict[str, int] = {}
    history = found = 0
    for row in np.argsort(table.column("arrival_s"), kind="stable"):
        if (session := sessions[row]) and finished[row]:
            prompt, output, cached = (column[row] for column in columns)
            before = min(said.get(session, 0), prompt)
            history += before
            found += min(cached, before)
            said[session] = prompt + output
    if not history:
        return {}
    return {
        "history_tokens": float(history),
        "history_computed_tokens": float(history - found),
        "history_found_fraction": found / history,
    }


def _server(run: RunData) -> dict[str, float]:
    """The server's state over the whole run. What the run integrated exactly goes before what its samples say."""
    series, counters, duration_s = run.series, run.counters, run.duration_s
    metrics = {"run_duration_s": duration_s}
    if len(series):
        names = {"running": "running_requests", "waiting": "waiting_requests", "kv_used_fraction": "kv_used_fraction"}
        if series.column("tier_used_fraction").any():
            names["tier_used_fraction"] = "tier_used_fraction"
        time_s = series.column("time_s")
        weights = np.diff(time_s, append=max(duration_s, float(time_s[-1])))  # each sample stands until the next one
        for column, name in names.items():
            values = series.column(column)
            mean = np.average(values, weights=weights) if weights.sum() > 0 else values.mean()
            metrics |= {f"mean_{name}": float(mean), f"max_{name}": float(values.max())}
        metrics["transfer_bytes"] = float(series.column("transfer_bytes").max())
        metrics |= {name: counters[name] for name in metrics.keys() & counters.keys()}
    if duration_s > 0 and "steps" in counters:
        metrics["steps_per_s"] = counters["steps"] / duration_s
    if duration_s > 0 and "device_busy_s" in counters:
        metrics["device_busy_fraction"] = counters["device_busy_s"] / duration_s
    if counters.get("steps") and {"prefill_tokens", "decode_tokens"} <= counters.keys():
        metrics["tokens_per_step"] = (counters["prefill_tokens"] + counters["decode_tokens"]) / counters["steps"]
    return metrics
