"""One run of a cluster, as the routing benchmark asks for it: what is served, on what, by which row. A part of it."""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import conversations
import numpy as np
from conversations import FILES, Conversations, drawn, recorded
from rivals import LLM_D, RIVALS

from vllm_ext.routing.fleet import Ask, Fleet
from vllm_ext.routing.routers import ROUTERS, Marginal, Router
from vllm_ext.simulation.measure.run_data import RunData
from vllm_ext.simulation.spec import SimulationSpec

OURS = "marginal"
AGAIN, OLD, FRESH, UNCOUNTED = "marginal again", "marginal, 1 s", "marginal, 0.1 s", "marginal, 1 s, sent not counted"
REPLICAS = 8
REPORT_S, SCRAPED_S = 0.5, 0.05
"""Between reports of a replica to ours, and between looks of llm-d's picker at its metrics: both as they come."""
NORMALISED = "normalised_latency_p90_ms_per_token"
WINDOW = (0.3, 0.9)
"""Part of a run whose requests are measured."""


@dataclass
class Shaken:
    """A router whose first requests go anywhere: no difference to it is one of the routers'."""

    router: Router
    left: int = 24
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def choose(self, ask: Ask, fleet: Fleet, now: float) -> str:
        """Choose by chance, or as it does."""
        if self.left > 0:
            self.left -= 1
            return self.rng.choice([*fleet.replicas])
        return self.router.choose(ask, fleet, now)


@dataclass
class Uncounted:
    """A router that forgets what was sent since the last reports."""

    router: Router

    def choose(self, ask: Ask, fleet: Fleet, now: float) -> str:
        """Choose by the reports alone."""
        for replica in fleet.replicas.values():
            replica.forget(math.inf)
        return self.router.choose(ask, fleet, now)


@dataclass(frozen=True)
class Row:
    """A router, and how old its reports are, in seconds."""

    make: Callable[[], Router]
    report_s: float = REPORT_S


ROWS: Mapping[str, Row] = {
    **{name: Row(make, SCRAPED_S if name == LLM_D else REPORT_S) for name, make in {**ROUTERS, **RIVALS}.items()},
    AGAIN: Row(lambda: Shaken(Marginal())),
}
"""Each with one setting for all scenes."""
ABLATIONS: Mapping[str, Row] = {
    FRESH: Row(Marginal, 0.1),
    OLD: Row(Marginal, 1.0),
    UNCOUNTED: Row(lambda: Uncounted(Marginal()), 1.0),
}


class Point(SimulationSpec):
    """A run: one replica is what a `SimulationSpec` says, the workload apart."""

    row: str
    replicas: int
    slow: float
    """How many times as long a step of the first replica takes."""
    shares: dict[str, float]
    """Kind of conversation -> its share."""
    rate_per_s: float
    """Of conversations."""
    seed: int
    until_s: float
    """The run ends then; measured are requests that come within `WINDOW` of it."""
    file: tuple[str, ...] = ()
    """Of each kind; none: conversations are made up."""
    held_out: bool = False
    sources: str
    """Checksum of what decides a run and is no part of the simulator."""


@functools.cache
def sources() -> str:
    """Return the checksum of rows, of rivals, and of what is served; what is in the package the store looks at."""
    files = [Path(__file__), Path(__file__).with_name("rivals.py"), Path(conversations.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


@functools.lru_cache(maxsize=4)
def _recorded(file: str, kind: str, held_out: bool) -> Sequence[conversations.Conversation]:
    return recorded(Path(file), kind, held_out=held_out)


def workload(point: Point) -> Conversations:
    """Return what a run serves."""
    data = None
    if point.file:
        data = {
            kind: _recorded(file, kind, point.held_out) for kind, file in zip(point.shares, point.file, strict=True)
        }
    return Conversations(
        lambda: drawn(point.shares, point.seed, data), rate_per_s=point.rate_per_s, seed=point.seed,
        ends_s=point.until_s, context_tokens=point.engine.max_model_len or 0,
    )  # fmt: skip


def files(data: Path | None, shares: Mapping[str, float]) -> tuple[str, ...]:
    """Return the files that conversations of some kinds are read from."""
    return () if data is None else tuple(str(data / FILES[kind][0]) for kind in shares)


def measured(point: SimulationSpec) -> dict[str, float]:
    """Simulate a run and reduce it to metrics; vLLM is imported here."""
    from vllm_ext.simulation.cluster import simulate_cluster

    assert isinstance(point, Point)
    row = {**ROWS, **ABLATIONS}[point.row]
    run = simulate_cluster(
        point, replicas=point.replicas, router=row.make(), report_s=row.report_s, slow=point.slow,
        workload=workload(point),
    )  # fmt: skip
    found = latencies(run.whole, point.until_s)
    counts = [len(one.requests) for one in run.replicas]
    return {
        **found,
        "moved_fraction": run.moved / max(1, len(run.whole.requests)),
        "prefill_tokens": run.whole.counters["prefill_tokens"],
        "preemptions": run.whole.counters["preemptions"],
        "steps": run.whole.counters["steps"],
        "busiest_over_mean_requests": max(counts) * len(counts) / max(1, sum(counts)),
    }


def latencies(run: RunData, until_s: float, window: tuple[float, float] = WINDOW) -> dict[str, float]:
    """Return latencies of the requests that came within a part of a run.

    Who was not done when it ended is taken to go on at its pace; without a token it is taken to be done then.

    Args:
        run: What was served, and what not.
        until_s: When it ended.
        window: Shares of that.
    """
    tables = (run.requests, run.unserved)
    arrival, first, finish, tokens, made = (
        np.concatenate([np.asarray(table.column(name), dtype=float) for table in tables])
        for name in ("arrival_s", "first_token_s", "finish_s", "true_output_tokens", "output_tokens")
    )
    inside = (arrival >= window[0] * until_s) & (arrival < window[1] * until_s)
    if not inside.any():
        return {"requests": 0.0}
    ended = ~np.isnan(finish)
    first = np.where(np.isnan(first), until_s, first)
    paced = first + (until_s - first) * tokens / np.maximum(made, 1)
    e2e = (np.where(ended, finish, paced) - arrival)[inside]
    ttft = (first - arrival)[inside]
    return {
        "requests": float(inside.sum()),
        "finished_fraction": float(ended[inside].mean()),
        NORMALISED: float(np.percentile(1e3 * e2e / tokens[inside], 90)),
        "e2e_mean_ms": float(1e3 * e2e.mean()),
        "e2e_p99_ms": float(1e3 * np.percentile(e2e, 99)),
        "ttft_p50_ms": float(1e3 * np.median(ttft)),
        "ttft_p99_ms": float(1e3 * np.percentile(ttft, 99)),
    }
