"""Past-Future, Figures 3 and 4: how alike the output lengths of neighbouring windows of requests are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ext.experiments.experiment import Findings, line_plot
from vllm_ext.experiments.papers import past_future as base
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import PaperClaim
from vllm_ext.report.results import Workload
from vllm_ext.report.table import Table
from vllm_ext.simulation.workloads.sources import read
from vllm_ext.simulation.workloads.spec import WorkloadSpec
from vllm_ext.simulation.workloads.synthetic import PRESETS

BIN_TOKENS = 32
REQUESTS, QUICK_REQUESTS, MOST_REQUESTS = 40_000, 12_000, 100_000
"""Drawn of each trace; read of a file."""
WINDOW = 1000
HISTORIES, RUNNING = (100, 200, 500, 1000, 2000, 5000), (100, 200, 500)
"""Requests of the window before, and of the one after it."""
LEAST_REQUESTS = max(HISTORIES) + max(RUNNING)
TURN, LASTING, SPREAD = 100, 3000.0, 2.0
"""Of services that come and go: requests for which their shares stand, after how many these are forgotten (by 1/e), and
how far their logarithms spread."""
TRACES: Mapping[str, tuple[str, ...]] = {
    "burstgpt-conversations": ("sharegpt-vllm",),
    "burstgpt-api": ("alpaca-vllm", "sharegpt-vllm", "arxiv-summarization", "sharegpt-o1-like"),
    "mooncake-conversations": ("openchat-sharegpt4",),
}
"""Trace -> the services that stand for it: one alone does not change, several have shares that do."""
Counts = NDArray[np.float64]
"""Requests by window and length, shape [windows, bins]."""
DRAWN = (
    "The traces are ours, and what they show is what they were made of: one service draws from one distribution; the "
    f"API's are four, whose shares change with a memory of {LASTING:.0f} requests. `--data DIR` looks at BurstGPT and "
    f"Mooncake themselves (their first {MOST_REQUESTS} requests). The in-house traces are not public.",
    f"Lengths are counted in bins of {BIN_TOKENS} tokens; the paper does not say how.",
    "The figure prints no numbers.",
)


class Trace(NamedTuple):
    """Output lengths of requests in the order of their arrival."""

    workload: Workload
    outputs: NDArray[np.int64]

    def counts(self, size: int) -> Counts:
        """Return how many requests of each length successive windows of ``size`` have; what is left over is not."""
        windows = len(self.outputs) // size
        bins = int(self.outputs.max()) // BIN_TOKENS + 1
        places = np.repeat(np.arange(windows), size) * bins + self.outputs[: windows * size] // BIN_TOKENS
        return np.bincount(places, minlength=windows * bins).reshape(windows, bins).astype(np.float64)


def cosines(one: Counts, other: Counts) -> NDArray[np.float64]:
    """Return the cosine of every window of one with every window of the other, shape [windows, windows]."""
    first, second = (counts / np.linalg.norm(counts, axis=1, keepdims=True) for counts in (one, other))
    found: NDArray[np.float64] = first @ second.T
    return found


def neighbours(trace: Trace, history: int, running: int) -> tuple[float, float]:
    """Return the mean cosine of a window with the one after it, and with all that it shares no request with.

    Args:
        trace: Its length is many times the windows'.
        history: Requests of a window, a multiple of `TURN`, as is ``running``.
        running: Requests of the one that it is compared with.
    """
    until = np.cumsum(trace.counts(TURN), axis=0)
    until = np.concatenate([np.zeros((1, until.shape[1])), until])
    before, after = history // TURN, running // TURN
    starts = np.arange(before, len(until) - after, after)
    found = cosines(until[starts] - until[starts - before], until[starts + after] - until[starts])
    apart = (starts[None, :] >= starts[:, None]) | (starts[None, :] + after <= starts[:, None] - before)
    return float(np.diagonal(found).mean()), float(found[apart].mean())


def traces(runner: Runner) -> dict[str, Trace]:
    """Return the traces of files, where there are any of them, or drawn ones."""
    found = {name: _read(fields) for name in TRACES if (fields := runner.files.source(name))}
    return found or {name: _drawn(name, runner) for name in TRACES}


def _read(fields: Mapping[str, Any]) -> Trace:
    source = read(WorkloadSpec(**fields))
    lengths = [session.turns[0].output_tokens for session in itertools.islice(source.sessions(), MOST_REQUESTS)]
    if len(lengths) < LEAST_REQUESTS:
        raise ValueError(f"{source.name}: must have at least {LEAST_REQUESTS} requests, found {len(lengths)}")
    return Trace(Workload(name=source.name, rows=source.rows, sha256=source.sha256), np.array(lengths))


def _drawn(name: str, runner: Runner) -> Trace:
    services, count = TRACES[name], QUICK_REQUESTS if runner.quick else REQUESTS
    rng = np.random.default_rng((runner.seed, [*TRACES].index(name)))
    lengths = np.array([PRESETS[service].draw(rng, count)[1] for service in services])
    shares, kept = rng.normal(size=len(services)), np.exp(-TURN / LASTING)
    outputs = np.empty(count, dtype=np.int64)
    for start in range(0, count, TURN):
        shares = kept * shares + np.sqrt(1 - kept**2) * rng.normal(size=len(services))
        weights = np.exp(SPREAD * shares)
        part = slice(start, start + TURN)
        chosen = rng.choice(len(services), size=len(outputs[part]), p=weights / weights.sum())
        outputs[part] = lengths[chosen, np.arange(start, start + len(chosen))]
    told = Workload(name=f"{name}, of {', '.join(services)}", rows=count, sha256=sha256(outputs.tobytes()).hexdigest())
    return Trace(told, outputs)


@base.PAPER.figure(
    "past-future-fig3", "Figure 3", "How alike the output lengths of windows of 1000 requests are", DRAWN, repeats=3
)
def fig3(runner: Runner) -> Findings:
    """Do neighbouring windows of time have like output lengths, also where distant ones do not?

    Method: traces cut into windows of 1000 requests; the cosine of each pair of windows, by their distance.
    """
    given, found, by_distance = traces(runner), {}, {}
    for name, trace in given.items():
        pairs = cosines(*[trace.counts(WINDOW)] * 2)
        by_distance[name] = [float(np.diagonal(pairs, at).mean()) for at in range(1, len(pairs) // 2)]
        apart = pairs[~np.eye(len(pairs), dtype=np.bool_)]
        found[name] = {"neighbouring": by_distance[name][0], "all": float(apart.mean()), "least": float(apart.min())}
    over = {name: one["neighbouring"] / one["all"] for name, one in found.items()}
    return Findings(
        tables=[Table(("trace", "cosine of neighbouring windows", "of all", "least"),
                      [(name, *one.values()) for name, one in found.items()])],
        claims=[
            PaperClaim(name="cosine of neighbouring windows, least of the traces", kind="tendency", goal=0.9,
                       value=min(one["neighbouring"] for one in found.values()), headline=True),
            PaperClaim(name="cosine of neighbouring windows / of all, largest of the traces", kind="tendency",
                       goal=1.0, value=max(over.values()), headline=True,
                       facts=", ".join(f"{name} {ratio:.3f}" for name, ratio in over.items())),
        ],
        metrics={f"{name}.cosine_{which}": value for name, one in found.items() for which, value in one.items()},
        config={"window_requests": WINDOW, "bin_tokens": BIN_TOKENS},
        plots=[line_plot("", {name: enumerate(points, 1) for name, points in by_distance.items()},
                         xlabel="distance (windows of 1000 requests)", ylabel="mean cosine")],
        workload=[trace.workload for trace in given.values()],
    )  # fmt: skip


@base.PAPER.figure(
    "past-future-fig4", "Figure 4", "How alike windows are by the sizes of history and running batch", DRAWN, repeats=3
)
def fig4(runner: Runner) -> Findings:
    """How many finished requests tell most of those that run?

    Method: a window of history and the window of running requests after it; the mean cosine of neighbours, and of all.
    """
    given = traces(runner)
    found = {
        (name, running, history): neighbours(trace, history, running)
        for name, trace in given.items()
        for running in RUNNING
        for history in HISTORIES
    }
    near = {key: pair[0] for key, pair in found.items()}
    chosen = {
        (name, running): near[name, running, WINDOW] / max(near[name, running, history] for history in HISTORIES)
        for name in given
        for running in RUNNING
    }
    return Findings(
        tables=[Table(("trace", "running", "history", "cosine of neighbours", "of all"),
                      [(*key, *pair) for key, pair in found.items()])],
        claims=[
            PaperClaim(name="cosine with 1000 finished requests / with the best number, least of traces and batches",
                       kind="tendency", goal=0.95, value=min(chosen.values()), headline=True),
            PaperClaim(name="cosine with 1000 finished requests, least of traces and batches", kind="tendency",
                       goal=0.9, value=min(near[name, running, WINDOW] for name, running in chosen), headline=True),
        ],
        metrics={f"{name}.running_{running}.history_{history}.cosine": value
                 for (name, running, history), value in near.items()},
        config={"bin_tokens": BIN_TOKENS},
        plots=[line_plot(f"-{name}", {f"{running} running": [(history, near[name, running, history])
                                                             for history in HISTORIES] for running in RUNNING},
                         xlabel="finished requests", ylabel="mean cosine of neighbours", title=name, log_x=True)
               for name in given],
        workload=[trace.workload for trace in given.values()],
    )  # fmt: skip
