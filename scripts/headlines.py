"""What README.md shows of benchmarks/results: headlines, and what is none.

A headline compares two rows of one run. An A/A pair, two rows that serve by the same rules, shows the noise of the
run: a headline must be larger than the distance of that pair.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from result_file import Result, Unshown

from vllm_ext.report.provenance import RESULTS


class Headline(NamedTuple):
    """A line of the table, and what the reader must know beside it."""

    result: Result
    measured: str
    ours: str
    baseline: str
    note: str


def preemptions(root: Path) -> Headline:
    """`past-future` under little KV memory, against vLLM with its watermark, the best of vLLM's rows."""
    result = Result(root, "engine_compare_memory.json")
    rows = ("past-future", "upstream-watermark", "upstream-fcfs", "fcfs")
    ours, reserved, stock, same = (result.value(row, "load_2.preemptions") for row in rows)
    result.check_ranks(reserved - ours, abs(same - stock))
    longer = result.value(rows[0], "load_2.output_steps") / result.value(rows[1], "load_2.output_steps") - 1
    share, repeats = result.setting("systems")[rows[1]]["watermark"], int(result.setting("repeats"))
    return Headline(
        result=result,
        measured=f"preemptions of {result.value(rows[0], 'load_2.requests'):.0f} requests, KV memory full",
        ours=f"**{ours:g}** (`past-future`)",
        baseline=f"{reserved:g} (vLLM, `--watermark {share:g}`)",
        note=f"`past-future` needed {100 * longer:.1f} % more steps than that. vLLM without a watermark had {stock:g} "
        f"preemptions. A/A pair: our `fcfs` and vLLM's differ by {abs(same - stock):g}. "
        f"{'One repeat' if repeats == 1 else f'Medians of {repeats} repeats'}.",
    )


def step_cost(root: Path) -> Headline:
    """The CPU time of a scheduler step, against vLLM's."""
    result = Result(root, "step_overhead.json")
    fewer, running = (end(result.setting("running")) for end in (min, max))
    queues = sorted(result.setting("waiting"))

    def worst(system: str, batch: int = running) -> float:
        start = f"{system}_{batch}_running_"
        found = [value for key, value in result.metrics.items() if key.startswith(start) and key.endswith("_ratio")]
        if not found:
            raise Unshown(f"{RESULTS / result.name} has no metric {start}*_ratio: measure it again ({result.command})")
        return max(found)

    def shown(system: str) -> str:
        key = f"{system}_{running}_running_{{}}_waiting_ratio"
        measured = [waiting for waiting in queues if key.format(waiting) in result.metrics]
        return f"`{system}`" if measured[-1:] == queues[-1:] else f"`{system}` (up to {max(measured):,} waiting)"

    costs = {system: worst(system) for system in ("alise", "sarathi", "accelgen", "past-future", "auto")}
    dearest, same = max(costs, key=costs.__getitem__), worst("fcfs")
    result.check_ranks(costs[dearest] - 1, same - 1)
    return Headline(
        result=result,
        measured=f"CPU time of a scheduler step, {running} running, up to {queues[-1]:,} waiting",
        ours=f"at most **{costs[dearest]:.2f}** times vLLM's (`{dearest}`)",
        baseline="1 (vLLM)",
        note=f"This is what a system costs: of {', '.join(map(shown, costs))}, `{dearest}` costs most. "
        f"With {fewer} running they cost up to {max(worst(name, fewer) for name in costs):.2f}. "
        f"A/A pair: our `fcfs` takes at most {same:.2f}.",
    )


def order(root: Path) -> Headline:
    """A tuned budget with `alise`, against vLLM as it comes; beside it vLLM tuned, and vLLM with the same flags."""
    result, load = Result(root, "tuning.json"), 0.9
    cells = list(result.setting("saturation_per_s"))

    def share(server: str, metric: str = "e2e_mean_ms", at: float = load) -> float:
        """Return a server's latency over vLLM's, the geometric mean over the cells."""
        ours, vllm = (result.data["baselines"].get(name, result.metrics) for name in (server, "vLLM"))
        logs = [math.log(ours[key] / vllm[key]) for key in (f"{cell} at {at:g}.{metric}" for cell in cells)]
        return math.exp(sum(logs) / len(logs))

    ours, same, tuned, again = map(
        share, ("ours tuned", "vLLM, flags of ours tuned", "vLLM tuned", "vLLM, other seeds")
    )
    result.check_ranks(abs(math.log(ours)), abs(math.log(again)))
    tail, first = (share("ours tuned", f"{name}_ms") for name in ("e2e_p99", "ttft_p90"))
    full, full_same = (share(server, at=1.0) for server in ("ours tuned", "vLLM, flags of ours tuned"))
    return Headline(
        result=result,
        measured=f"mean end-to-end latency at {load:g} of what vLLM carries, {len(cells)} workloads (simulated)",
        ours=f"**{ours:.2f}** times vLLM's ([budget and order tuned](docs/results/tuning.md))",
        baseline=f"1 (vLLM), {tuned:.2f} (vLLM, tuned), {same:.2f} (vLLM, the same flags)",
        note=f"P99 {tail:.2f} times vLLM's, P90 of the TTFT {first:.2f} times. Most of it is the token budget, which "
        "vLLM alone can be given too. At saturation the order adds to it: "
        f"{full:.2f} times with both, {full_same:.2f} with the flags alone. "
        f"A/A pair: vLLM with other seeds differs by a factor of {max(again, 1 / again):.2f}.",
    )


def latency(root: Path) -> str:
    """Say why the mean latency near saturation is no headline."""
    result = Result(root, "engine_compare.json")
    ours, same = (result.value(row, "load_0.9.normalised_latency_mean_ratio") for row in ("alise", "fcfs"))
    _check_still_none(result, "alise", abs(math.log(ours)), abs(math.log(same)))
    return (
        f"Not a headline: at 0.9 of capacity `alise` had {ours:.2f} times vLLM's mean latency. The A/A pair of that "
        f"run, vLLM and our `fcfs`, differs by a factor of {max(same, 1 / same):.2f}."
    )


def objectives(root: Path) -> str:
    """Say why the share of requests that met all objectives is no headline."""
    result = Result(root, "engine_compare_slo.json")
    rows = ("accelgen", "fcfs", "upstream-fcfs", *result.data["baselines"])
    ours, same, stock, *vllm = (result.value(row, "load_1.2.slo_attainment_fraction") for row in rows)
    _check_still_none(result, "accelgen", ours - max(vllm), abs(stock - same))
    return (
        f"Not a headline: with `accelgen` {100 * ours:.1f} % of the requests met all objectives, and with vLLM's best "
        f"setting {100 * max(vllm):.1f} %. The A/A pair of that run differs by {100 * abs(stock - same):.0f} points."
    )


def _check_still_none(result: Result, system: str, effect: float, noise: float) -> None:
    if effect > noise:
        raise Unshown(f"{RESULTS / result.name} ranks {system} now: make it a headline in scripts/headlines.py")


HEADLINES = (order, preemptions, step_cost)
"""The lines of the README's table."""
NOT_HEADLINES = (latency, objectives)
"""Results that readers look for, of runs that can't rank them or have not the baseline that counts."""
