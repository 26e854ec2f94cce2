"""What README.md shows of benchmarks/results: headlines, and what is none.

A headline compares two rows of one run. An A/A pair, two rows that serve by the same rules, shows the noise of the
run: a headline must be larger than the distance of that pair.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from result_file import Result, Unshown

from vllm_ext.report.provenance import RESULTS

TIERED = "alise-ttft:tier-early"


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
    longer, later, tail = (
        result.compared(names[0], f"{load}.{metric}") / result.compared(names[1], f"{load}.{metric}")
        for metric in ("mean e2e", "mean TTFT", "P99 e2e")
    )
    return Headline(
        result=result,
        measured=f"preemptions of {result.setting('requests_per_run')} requests, KV memory full (engine's clock)",
        ours=f"**{ours:g}** (`past-future`)",
        baseline=f"{reserved:g} (vLLM, `--watermark 0.05`), {stock:g} (vLLM)",
        note=f"Answers pause less, and nothing is faster: beside vLLM with a watermark mean end-to-end latency is "
        f"{longer:.2f} times as long, P99 {tail:.2f} times, mean TTFT {later:.2f} times. A/A pair: vLLM twice differs "
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
    short = max(costs, key=lambda name: worst(name, fewer))
    result.check_ranks(costs[dearest] - 1, same - 1)
    return Headline(
        result=result,
        measured=f"CPU time of a scheduler step, {running} running, up to {queues[-1]:,} waiting",
        ours=f"at most **{costs[dearest]:.2f}** times vLLM's (`{dearest}`)",
        baseline="1 (vLLM)",
        note=f"The dearest of {', '.join(map(shown, costs))}. With {fewer} running it is `{short}`, "
        f"{worst(short, fewer):.2f} times; `alise-ttft` with a KV tier takes {worst(TIERED):.2f} and "
        f"{worst(TIERED, fewer):.2f} times. A/A pair: `fcfs`, which decides as vLLM does, takes at most {same:.2f} "
        "times.",
    )


def over_vllm(result: Result, server: str, metric: str, load: float, device: str = "") -> list[float]:
    """Return a server's metric over vLLM's in each workload of `benchmarks/simulated/tuning.py` on such a device."""
    ours, vllm = (result.data["baselines"].get(name, result.metrics) for name in (server, "vLLM"))
    keys = (f"{cell} at {load:g}.{metric}" for cell in result.setting("saturation_per_s") if device in cell)
    return [ours[key] / vllm[key] for key in keys]


def order(root: Path) -> Headline:
    """A tuned budget with `alise`, against vLLM as it comes; beside it vLLM tuned, and vLLM with the same flags."""
    result, load, devices = Result(root, "tuning.json"), 0.9, ("a100", "h100")

    def mean(server: str, metric: str = "e2e_mean_ms", at: float = load, device: str = "") -> float:
        """Return a server's latency over vLLM's, the geometric mean over the workloads."""
        return geometric_mean(over_vllm(result, server, metric, at, device))

    def shown(server: str, metric: str = "e2e_mean_ms", at: float = load) -> str:
        return " / ".join(f"{mean(server, metric, at, device):.2f}" for device in devices)

    ours, same, other = "ours tuned", "vLLM, flags of ours tuned", "vLLM, other seeds"
    result.check_ranks(abs(math.log(mean(ours))), abs(math.log(mean(other))))
    chance = max(max(ratio, 1 / ratio) for ratio in over_vllm(result, other, "e2e_mean_ms", load))
    counts = [sum(device in cell for cell in result.setting("saturation_per_s")) for device in devices]
    return Headline(
        result=result,
        measured=f"mean end-to-end latency at {load:g} of vLLM's saturation rate, simulated: geometric mean of "
        f"{counts[0]} workloads on A100 / {counts[1]} on H100",
        ours=f"**{shown(ours)}** times vLLM's ([budget and order tuned](docs/results/tuning.md))",
        baseline=f"1 (vLLM), {shown('vLLM tuned')} (vLLM, tuned), {shown(same)} (vLLM, the flags found for ours)",
        note=f"P99 {shown(ours, 'e2e_p99_ms')} times vLLM's, P90 of the TTFT {shown(ours, 'ttft_p90_ms')} times: on "
        "H100 first tokens pay, and the search for vLLM alone rejected these flags for that. Most of the gain is the "
        f"token budget, which vLLM alone can be given too. At saturation {shown(ours, at=1.0)} times, "
        f"{shown(same, at=1.0)} with the flags alone. A/A pair: vLLM with other seeds differs by a factor of up to "
        f"{chance:.2f} in a workload; all servers have the same seeds.",
    )


HEADLINES = (order, preemptions, step_cost)
"""The lines of the README's table."""
