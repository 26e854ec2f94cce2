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
    result, load = Result(root, "compare_memory.json"), "load_2"
    names = ("past-future", "vLLM, watermark 5 %", "upstream", "upstream, again")
    ours, reserved, stock, again = (result.compared(name, f"{load}.preemptions") for name in names)
    result.check_ranks(reserved - ours, abs(again - stock))
    longer = result.compared(names[0], f"{load}.mean e2e") / result.compared(names[1], f"{load}.mean e2e")
    return Headline(
        result=result,
        measured=f"preemptions of {result.setting('requests_per_run')} requests, KV memory full (engine's clock)",
        ours=f"**{ours:g}** (`past-future`)",
        baseline=f"{reserved:g} (vLLM, `--watermark 0.05`), {stock:g} (vLLM)",
        note=f"Mean end-to-end latency {longer:.2f} times that of vLLM with a watermark. A/A pair: vLLM twice differs "
        f"by {abs(again - stock):g} preemptions.",
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
        f"With {fewer} running a step takes up to {max(worst(name, fewer) for name in costs):.2f} times as long as "
        f"vLLM's. A/A pair: `fcfs`, which decides as vLLM does, takes at most {same:.2f} times.",
    )


def over_vllm(result: Result, server: str, metric: str, load: float) -> list[float]:
    """Return a server's metric over vLLM's in each workload of `benchmarks/simulated/tuning.py`."""
    ours, vllm = (result.data["baselines"].get(name, result.metrics) for name in (server, "vLLM"))
    keys = (f"{cell} at {load:g}.{metric}" for cell in result.setting("saturation_per_s"))
    return [ours[key] / vllm[key] for key in keys]


def order(root: Path) -> Headline:
    """A tuned budget with `alise`, against vLLM as it comes; beside it vLLM tuned, and vLLM with the same flags."""
    result, load = Result(root, "tuning.json"), 0.9
    cells = list(result.setting("saturation_per_s"))

    def share(server: str, metric: str = "e2e_mean_ms", at: float = load) -> float:
        """Return a server's latency over vLLM's, the geometric mean over the cells."""
        logs = [math.log(ratio) for ratio in over_vllm(result, server, metric, at)]
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
        "vLLM alone can be given too; limits on first tokens kept its own search from the same flags. At saturation "
        "the order adds to it: "
        f"{full:.2f} times with both, {full_same:.2f} with the flags alone. "
        f"A/A pair: vLLM with other seeds differs by a factor of {max(again, 1 / again):.2f}.",
    )


HEADLINES = (order, preemptions, step_cost)
"""The lines of the README's table."""
