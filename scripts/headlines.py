"""What README.md shows of benchmarks/results: headlines, and what is none.

A headline compares two rows of one run. An A/A pair, two rows that serve by the same rules, shows the noise of the
run: a headline must be larger than the distance of that pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from result_file import Result, Unshown

from vllm_ext.experiments.papers.accelgen_figures import OVER_TUNED
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


def objectives(root: Path) -> Headline:
    """`accelgen` for requests with objectives of their own, against vLLM whose steps keep the tightest of them."""
    result = Result(root, "repro/accelgen-fig11.json")

    def claim(where: str) -> Mapping[str, Any]:
        name = OVER_TUNED.format(where)
        found = next((one for one in result.claims if one["name"] == name and "interval" in one), None)
        if found is None:
            raise Unshown(f"{RESULTS / result.name} has no claim {name!r} of several seeds: {result.command}")
        return found

    crowded, mild = claim(""), claim(" near capacity")
    low, high = crowded["interval"]
    result.check_ranks(crowded["value"] - 1, (high - low) / 2)
    ours, shortest = (_in_time(result, name) for name in ("accelgen, ours", "shortest prompt first"))
    return Headline(
        result=result,
        measured="output tokens in time per second, requests with objectives of their own, 8 a second, which is beyond "
        "capacity; simulated",
        ours=f"at least **{crowded['value']:.2f}** times vLLM's, tuned (`accelgen`, four models)",
        baseline="1 (vLLM, tuned)",
        note=f"{crowded['note'].replace(' at 8/s', '')}. Near capacity there is less to gain, and nothing on the large "
        f"model: {mild['note'].partition(';')[0]}. Under such overload the shortest prompts first bring "
        f"{shortest / ours:.2f} times as much in time (one seed), while long ones wait. In place of an A/A pair: "
        f"{low:.2f} to {high:.2f} over {len(result.setting('seeds'))} seeds.",
    )


def _in_time(result: Result, row: str) -> float:
    """Return the mean over models of a row's tokens in time beyond capacity, of its first seed if it has no other."""
    found = {key.removeprefix("seed 0: "): value for key, value in result.data["baselines"].get(row, {}).items()}
    values = [value for key, value in found.items() if key.endswith("at 8/s.tokens_in_time_per_s")]
    if not values:
        raise Unshown(f"{RESULTS / result.name} has no row {row!r}: measure it again ({result.command})")
    return fmean(values)


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
    kept = over_vllm(result, "vLLM tuned", "e2e_mean_ms", load, devices[1]).count(1.0)
    return Headline(
        result=result,
        measured=f"mean end-to-end latency at {load:g} of vLLM's saturation rate, simulated: geometric mean of "
        f"{counts[0]} workloads on A100 / {counts[1]} on H100",
        ours=f"**{shown(ours)}** times vLLM's ([budget and order tuned](docs/results/tuning.md))",
        baseline=f"1 (vLLM), {shown('vLLM tuned')} (vLLM, tuned), {shown(same)} (vLLM, the flags found for ours)",
        note=f"P99 {shown(ours, 'e2e_p99_ms')} times vLLM's, P90 of the TTFT {shown(ours, 'ttft_p90_ms')} times: on "
        f"H100 first tokens pay, for which the search for vLLM alone kept its defaults in {kept} of the {counts[1]}. "
        "Most of the gain is the token budget, which vLLM alone can be given too. At saturation "
        f"{shown(ours, at=1.0)} times, {shown(same, at=1.0)} with the flags alone. A/A pair: vLLM with other seeds "
        f"differs by a factor of up to {chance:.2f} in a workload; all servers have the same seeds.",
    )


HEADLINES = (order, objectives, preemptions)
"""The lines of the README's table."""
