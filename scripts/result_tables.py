"""The tables of docs/results, computed from the files in benchmarks/results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headlines import NoHeadline, Result

from vllm_ext.report.provenance import RESULTS

_BASELINES = {
    "upstream-fcfs": "vLLM",
    "upstream-priority": "vLLM, priorities",
    "upstream-watermark": "vLLM, watermark 5 %",
    "upstream-chunked": "vLLM, steps of 256 tokens",
    "fcfs": "our `fcfs`",
}
"""Rows of engine_compare that are not called what --scheduler-cls takes."""
_CHATS = {
    "stateless": "vLLM, no prefix caching",
    "prefix-cache": "vLLM",
    "tier-lru": "LRU, early",
    "tier-arc": "ARC, early",
    "tier-retention": "retention value, early",
    "tier-retention-8": "retention value, early, 8 bits",
    "pensieve": "`pensieve` with gaps",
    "pensieve-8": "`pensieve` with gaps, 8 bits",
}
"""Rows of multi_turn; when these were measured `pensieve` had gaps."""
_ABLATION = {
    "gaps, leading": "gaps, leading ends first",
    "no gaps, retention": "no gaps, retention value: `pensieve`",
    "no gaps, tail": "no gaps, tails",
    "no gaps, lru": "no gaps, LRU",
}
"""Rows of kv_ablation."""
_KEPT = {
    "alise-published:defer": "Defer",
    "alise-published:recompute": "Recompute",
    "alise-published:swap-8-ahead": "host memory, 8 bits, `store: ahead`",
    "alise-published:in-place-10": "records, a tenth of the memory",
    "alise-published:in-place-20": "records, a fifth",
}
"""Rows of engine_compare that differ in what becomes of preempted requests' KV."""
_RANGE = ("", "_low", "_high")
_SIZES = ("multi_turn_small_tier.json", "multi_turn.json", "multi_turn_large_tier.json")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; every line ends in a newline."""
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:], ""])


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _system(name: str) -> str:
    return _BASELINES.get(name, f"`{name}`")


def latency(root: Path) -> str:
    """Mean normalised latency by load and system, and over vLLM's."""
    result = Result(root, "engine_compare.json")
    mean = "normalised_latency_mean"

    def cell(system: str, load: float) -> str:
        value = f"{result.value(system, f'load_{load:g}.{mean}_ms_per_token'):.3g}"
        if system == "upstream-fcfs":
            return value
        return f"{value} ({result.value(system, f'load_{load:g}.{mean}_ratio'):.2f})"

    systems = list(result.setting("systems"))
    loads = sorted(result.setting("loads"))
    return table(
        ["load", *map(_system, systems)], [[f"{load:g}", *(cell(name, load) for name in systems)] for load in loads]
    )


def objectives(root: Path) -> str:
    """Objectives met, and what that costs in throughput."""
    result = Result(root, "engine_compare_slo.json")

    def row(name: str) -> list[str]:
        def value(metric: str) -> float:
            return result.value(name, f"load_1.2.{metric}")

        met = [_share(value(f"slo_{kind}attainment_fraction")) for kind in ("", "ttft_", "tbt_")]
        output = "1" if name == "upstream-fcfs" else f"{value('throughput_tokens_ratio'):.2f}"
        late = f"{value('tbt_p99_over_slo'):.2f}"
        return [_system(name), *met, f"{value('goodput_requests_per_s'):.1f}", late, output]

    header = ["", "met all objectives", "TTFT met", "every TBT met", "requests/s in time"]
    header += ["P99 of gap over TBT objective", "output tokens/s over vLLM's"]
    return table(header, map(row, result.setting("systems")))


def memory(root: Path) -> str:
    """Preemptions and steps with little KV memory."""
    result = Result(root, "engine_compare_memory.json")

    def row(name: str) -> list[str]:
        counts = [result.value(name, f"load_2.{metric}") for metric in ("preemptions", "output_steps")]
        met = _share(result.value(name, "load_2.slo_attainment_fraction"))
        return [_system(name), *(f"{count:g}" for count in counts), met]

    return table(["", "preemptions", "steps", "met all objectives"], map(row, result.setting("systems")))


def in_place(root: Path) -> str:
    """What becomes of preempted jobs' KV, on the device among others."""
    result = Result(root, "engine_compare_in_place.json")

    def row(name: str) -> list[str]:
        def value(metric: str) -> float:
            return result.value(name, f"load_1.5.{metric}")

        ratio, per_token = "normalised_latency_mean_ratio", value("normalised_latency_mean_ms_per_token")
        over = [f"{value(ratio + end):.2f}" for end in ("", "_min", "_max")] if name in _KEPT else []
        seconds = [value(metric) / 1000 for metric in ("e2e_mean_ms", "e2e_p99_ms", "ttft_mean_ms")]
        shown = [f"{per_token:.0f}", "{} ({} to {})".format(*over) if over else "1", *(f"{s:.1f}" for s in seconds)]
        return [_KEPT.get(name, _system(name)), *shown, f"{value('preemptions'):.0f}"]

    header = ["preempted KV", "mean ms per output token", "over vLLM's", "mean end-to-end, s", "P99, s", "mean TTFT, s"]
    return table([*header, "preemptions"], map(row, result.setting("systems")))


def conversations(root: Path) -> str:
    """Rate sustained, latency, and where histories came from."""
    result = Result(root, "multi_turn.json")

    def row(name: str) -> list[str]:
        rate = "0.62" if name == "stateless" else "0.84"
        sustained = f"{result.value(name, 'sustained_conversations_per_s'):.2f}"
        try:
            bound = result.value(name, "sustained_conversations_per_s_is_lower_bound")
        except NoHeadline:  # only bounds are marked
            bound = 0.0
        return [
            _CHATS[name] + (f" (at {rate}/s)" if rate != "0.84" else ""),
            f"> {sustained}" if bound else sustained,
            f"{result.value(name, f'rate_{rate}.normalised_latency_p90_ms_per_token'):.1f}",
            f"{result.value(name, f'rate_{rate}.ttft_later_mean_ms'):.0f}",
            *_histories(result, name, rate),
        ]

    header = ["", "sustained, conversations/s", "P90, ms per output token", "TTFT of later turns, ms"]
    header += ["found on device", "found in host memory", "computed again"]
    return table(header, map(row, result.setting("rows")))


def sizes(root: Path) -> str:
    """Less and more host memory."""
    rows = []
    for result in (Result(root, name) for name in _SIZES):
        for name in ("tier-lru", "tier-retention", "pensieve"):
            latency = result.value(name, "rate_0.84.normalised_latency_p90_ms_per_token")
            memory = f"{result.setting('tier_gib'):g} GiB, {result.setting('tier_tokens')[name]:,} tokens"
            rows.append([memory, _CHATS[name], f"{latency:.1f}", *_histories(result, name, "0.84")[1:]])
    return table(["host memory", "", "P90, ms per output token", "found in host memory", "computed again"], rows)


def ablation(root: Path) -> str:
    """What gaps and eviction policies are worth at equal stores; ratios are over `pensieve`, paired by seed."""
    result, base, upstream = Result(root, "kv_ablation.json"), "no gaps, retention", "vLLM, lru, early"
    rows = []
    for scene, setting in result.setting("scenes").items():
        for at in (f"{scene}, {host_gb:g} GB" for host_gb in setting["host_gb"]):
            for name, shown in {**_ABLATION, upstream: upstream}.items():
                row, prefix = (name, f"{at}.{name}.") if name == upstream else (f"{at}.{name}", "")
                found = result.value(row, f"{prefix}history_found_fraction")
                times = [result.value(row, prefix + metric) for metric in ("e2e_mean_ms", "e2e_p99_ms", "ttft_mean_ms")]
                ratio = "1"
                if name != base:
                    ends = [result.value(f"{at}: {name} over {base}", f"e2e_mean_ms_ratio{end}") for end in _RANGE]
                    ratio = "{:.3f} ({:.3f} to {:.3f})".format(*ends)
                seconds = [f"{times[0] / 1000:.2f}", ratio, f"{times[1] / 1000:.1f}", f"{times[2]:.0f}"]
                rows.append([at, shown, f"{100 * found:.1f} %", *seconds])
    header = ["", "", "histories found", "mean end-to-end, s", "over `pensieve`'s", "P99, s", "mean TTFT, ms"]
    return table(header, rows)


def _histories(result: Result, name: str, rate: str) -> list[str]:
    shares = ("device_hit_share", "host_hit_share", "recomputed_share")
    return [_share(result.value(name, f"rate_{rate}.{share}")) for share in shares]


def step_cost(root: Path) -> str:
    """CPU time of a step over vLLM's, for every system and queue."""
    result = Result(root, "step_overhead.json")
    queues = [f"{waiting}_waiting" for waiting in result.setting("waiting")]
    queues.append(f"{result.setting('waiting_memory_bound')}_waiting_memory_bound")
    measured = result.data["metrics"]
    rows = []
    for name in (name for group in result.setting("groups") for name in group):
        for running in result.setting("running"):
            keys = [f"{name}_{running}_running_{queue}_ratio" for queue in queues]
            cells = [f"{measured[key]:.2f}" if key in measured else "" for key in keys]
            rows.append([f"`{name}`", str(running), *cells])
    header = [f"{waiting:,} waiting" for waiting in result.setting("waiting")]
    return table(["", "running", *header, f"{result.setting('waiting_memory_bound'):,} waiting, KV memory full"], rows)


def goals(of: Iterable[Mapping[str, Any]]) -> str:
    """Goals as they were set, and what came of each."""
    return table(
        ["metric", "goal", "measured", ""],
        [
            [f"`{_plain(goal['metric'])}`", f"{goal['op']} {goal['goal']:g}", f"{goal['value']:.4g}", _verdict(goal)]
            for goal in of
        ],
    )


def _verdict(goal: Mapping[str, Any]) -> str:
    return "met" if goal["met"] else "**missed**"


def papers(root: Path) -> str:
    """The figures that papers are known by, beside ours."""
    studies = sorted(path.stem for path in (root / RESULTS / "repro").glob("*.json"))
    rows = []
    for study in studies:
        for goal in Result(root, f"repro/{study}.json").goals:
            figure = [f"[{study}](../reproductions.md#{study})", goal["metric"]]
            rows.append([*figure, f"{goal['goal']:.4g}", f"{goal['value']:.4g}", "yes" if goal["met"] else "**no**"])
    return table(["figure", "claim", "paper", "ours", "reached"], rows)


_ORDERING = {"mean e2e": "ratio", "P99 e2e": "ratio", "mean normalised": "ratio", "P90 TTFT": "ratio",
             "longest gap": "ratio", "share on time": "points"}  # fmt: skip
"""Measures of ordering.py that pages show, and how each is compared."""
_ORDERING_HEADER = [f"{name}, points" if kind == "points" else name for name, kind in _ORDERING.items()]


_NOT_TUNED = {"upstream tuned": "vLLM", "x tuned": "x vLLM", "than tuned": "than vLLM"}
"""How results call vLLM with a watermark and its default budget, and what that is called where users read it."""


def _plain(name: str) -> str:
    for said, meant in _NOT_TUNED.items():
        name = name.replace(said, meant)
    return name


def _contender(name: str) -> str:
    """Return what a row of ordering.py is called on a page."""
    return "vLLM, no watermark" if name == "upstream" else _plain(name)


def _ordering_cell(result: Result, system: str, at: str, measure: str) -> str:
    found = result.data["baselines"].get(system, result.data["metrics"])
    value = found[f"{at}.{measure}.{_ORDERING[measure]}"]
    if _ORDERING[measure] == "points":
        return f"{value:+.0f}"
    return f"{value:.2f}"


def ordering(root: Path, name: str) -> str:
    """Geometric means over the workloads, vLLM's over the system's, by load."""
    result = Result(root, name)
    loads = sorted(result.setting("loads"))
    rows = []
    for system in result.setting("systems")[1:]:
        cells = ((_ordering_cell(result, system, f"all.{load:g}", measure) for load in loads) for measure in _ORDERING)
        rows.append([_contender(system), *(" / ".join(cell) for cell in cells)])
    return table([f"at load {' / '.join(f'{load:g}' for load in loads)}", *_ORDERING_HEADER], rows)


def workloads(root: Path, name: str) -> str:
    """Each workload at each of its loads: vLLM's over the system's, with the interval of the mean latency."""
    result = Result(root, name)
    metrics, mean = result.data["metrics"], ".mean e2e.ratio"
    rows = []
    for at in (key.removesuffix(mean) for key in metrics if key.endswith(mean) and not key.startswith("all.")):
        for system in result.setting("systems")[1:]:
            found = result.data["baselines"].get(system, metrics)
            low, high = found[f"{at}.mean e2e.low"], found[f"{at}.mean e2e.high"]
            cells = [_ordering_cell(result, system, at, measure) for measure in _ORDERING]
            rows.append(
                [at.replace(".", " at ", 1), _contender(system), f"{cells[0]} ({low:.2f} to {high:.2f})", *cells[1:]]
            )
    return table(["", "", *_ORDERING_HEADER], rows)


TABLES: dict[str, Callable[[Path], str]] = {
    "latency": latency,
    "objectives": objectives,
    "memory": memory,
    "in-place": in_place,
    "conversations": conversations,
    "sizes": sizes,
    "ablation": ablation,
    "step-cost": step_cost,
    "papers": papers,
    "ordering-long": functools.partial(workloads, name="ordering_long.json"),
    "ordering-more": functools.partial(workloads, name="ordering_more.json"),
    "ordering-alpaca": functools.partial(ordering, name="ordering_alpaca.json"),
    "ordering-predicted": functools.partial(ordering, name="ordering_predicted.json"),
}
"""The tables by the names that pages call them by."""
