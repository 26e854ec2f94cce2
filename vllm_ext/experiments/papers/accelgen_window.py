"""What AccelGen's reproductions measure.

Objectives hold per iteration, as in the paper: a first token within the request's TTFT objective, every further token
within its TBT objective after the one before. Everything is measured over one window for all systems: at its end
whoever still waits or runs leaves. An answer that is not complete by then has missed its objectives as a whole, and
counts with the tokens that it got.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_ext.experiments.runner import RunFailed
from vllm_ext.simulation.measure.run_data import RequestTable, RunData
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.requests import SimRequest, Workload

K = TypeVar("K", bound=Hashable)
Observed = Mapping[str, float]


def observe_all(specs: Mapping[K, SimulationSpec]) -> dict[K, dict[str, float]]:
    """Run one after the other, and say on stderr how it goes.

    They need the time of every token, which the reproductions' pool does not hand on, so nothing is kept on disk.
    """
    found = {}
    for number, (key, described) in enumerate(specs.items(), 1):
        print(f"window {number} of {len(specs)}: {key}", file=sys.stderr, flush=True)
        found[key] = observe(described)
    return found


class LeavingAtTheEnd:
    """A workload whose clients all leave at one moment, so that every request has a row in the run's table."""

    def __init__(self, inner: Workload, end_s: float) -> None:
        self._inner = inner
        self._end_s = end_s
        self.name, self.rows, self.sha256 = inner.name, inner.rows, inner.sha256

    def start(self) -> Iterator[SimRequest]:
        """Yield the requests; each is given up at the end of the window."""
        return (replace(r, abort_after_s=self._end_s - r.arrival_s) for r in self._inner.start())

    def after(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:  # noqa: ARG002 - as any workload's
        """Return nothing: requests stand alone."""
        return ()


def observe(described: SimulationSpec) -> dict[str, float]:
    """Simulate the window and return what was measured; see `measured_of`.

    Raises:
        RunFailed: a policy raised in some step, so that the run is not of the system that was asked for.
    """
    from vllm_ext.simulation.run import simulate  # imports vLLM, which a list of reproductions does not need

    window_s = described.max_time_s
    if window_s is None:
        raise ValueError("max_time_s=None: must be the end of the window")
    run = simulate(
        described.model_copy(update={"max_time_s": None}),
        workload=LeavingAtTheEnd(build(described.workload), window_s),
    )
    if run.counters.get("policy_fallbacks"):
        raise RunFailed(f"{described.engine.system}: {run.counters['policy_fallbacks']:.0f} steps without a plan")
    return measured_of(run)


def measured_of(run: RunData) -> dict[str, float]:
    """Reduce a run in which every request has ended, or left at the end of the window.

    Returns:
        ``attainment_fraction``: of the tokens that were delivered, those in time (the paper's iteration-level
        attainment); ``goodput_tokens_per_s``: those tokens; ``request_*``: requests that met all objectives, of those
        that arrived; ``deadline_attainment_fraction``: requests complete by TTFT objective + tokens x TBT objective;
        ``ttft_attainment_fraction`` and ``tbt_attainment_fraction``: of those that arrived, and of those that finished.
    """
    table, finished, span_s, counted = run.requests, run.finished(), run.duration_s, run.counters
    arrival, ttft, tbt = (table.column(name) for name in ("arrival_s", "slo_ttft_s", "slo_tbt_s"))
    taken = table.column("finish_s") - arrival
    in_time, delivered = tokens_in_time(table)
    on_time_first = table.column("first_token_s") - arrival <= ttft
    steady = ~(table.column("max_gap_s") > tbt)
    met = finished & on_time_first & steady
    deadline = finished & (taken <= ttft + (table.column("output_tokens") - 1) * tbt)
    tokens = counted["prefill_tokens"] + counted["decode_tokens"]
    steps = max(counted["steps"], 1.0)
    found = {
        "arrived_requests": float(len(table)),
        "finished_requests": float(finished.sum()),
        "requests_per_s": finished.sum() / span_s,
        "output_tokens_per_s": delivered.sum() / span_s,
        "processed_tokens_per_s": tokens / span_s,
        "goodput_tokens_per_s": in_time.sum() / span_s,
        "attainment_fraction": in_time.sum() / max(delivered.sum(), 1),
        "request_goodput_per_s": met.sum() / span_s,
        "request_attainment_fraction": met.mean(),
        "ttft_attainment_fraction": on_time_first.mean(),
        "tbt_attainment_fraction": steady[finished].mean() if finished.any() else 0.0,
        "deadline_attainment_fraction": deadline.mean(),
        "jct_mean_s": taken[finished].mean() if finished.any() else span_s,
        "jct_to_window_end_mean_s": taken.mean(),
        "device_busy_fraction": counted["device_busy_s"] / span_s,
        "tokens_per_step": tokens / steps,
        "unallocated_kv_fraction": 1 - counted["mean_kv_used_fraction"],
        "preemptions": counted["preemptions"],
        "wall_s_per_step": run.wall_s / steps,
    }
    tiers = table.column("tier")
    for tier in sorted(set(tiers.tolist())):
        mine = tiers == tier
        found[f"{tier}.finished_fraction"] = finished[mine].mean()
        found[f"{tier}.request_attainment_fraction"] = met[mine].mean()
        found[f"{tier}.deadline_attainment_fraction"] = deadline[mine].mean()
    return {name: float(value) for name, value in found.items()}


def tokens_in_time(table: RequestTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many tokens of each request came in time, and how many came; the run kept their times."""
    arrival, ttft, tbt = (table.column(name) for name in ("arrival_s", "slo_ttft_s", "slo_tbt_s"))
    in_time = np.zeros(len(table), dtype=np.int64)
    delivered = np.zeros(len(table), dtype=np.int64)
    for row, kept in enumerate(table.token_times):
        if kept:
            times = np.array(kept)
            delivered[row] = len(times)
            in_time[row] = int(times[0] - arrival[row] <= ttft[row]) + int((np.diff(times) <= tbt[row]).sum())
    return in_time, delivered
