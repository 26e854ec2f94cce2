"""The tables of docs/results, from the files in benchmarks/results: rows, columns, and how a number is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from result_file import Result

from vllm_ext.report.provenance import RESULTS
from vllm_ext.report.table import Table

Columns = Mapping[str, tuple[str, Callable[[float], str]]]
"""Header -> metric, and how its value is written."""
_BASELINES = {"upstream-fcfs": "vLLM", "upstream-priority": "vLLM, priorities",
              "upstream-watermark": "vLLM, watermark 5 %",
              "upstream-chunked": "vLLM, steps of 256 tokens", "fcfs": "our `fcfs`"}  # fmt: skip
_CHATS = {"stateless": "vLLM, no prefix caching", "prefix-cache": "vLLM", "tier-lru": "LRU, early",
          "tier-arc": "ARC, early", "tier-retention": "retention value, early",
          "tier-retention-8": "retention value, early, 8 bits", "pensieve": "`pensieve` with gaps",
          "pensieve-8": "`pensieve` with gaps, 8 bits"}  # fmt: skip
_ABLATION = {"gaps, leading": "gaps, leading ends first", "no gaps, retention": "no gaps, retention value: `pensieve`",
             "no gaps, tail": "no gaps, tails", "no gaps, lru": "no gaps, LRU"}  # fmt: skip
_KEPT = {"alise-published:defer": "Defer", "alise-published:recompute": "Recompute",
         "alise-published:swap-8-ahead": "host memory, 8 bits, `store: ahead`",
         "alise-published:in-place-10": "records, a tenth of the memory",
         "alise-published:in-place-20": "records, a fifth"}  # fmt: skip
"""Rows of engine_compare, multi_turn and kv_ablation that are not called what --scheduler-cls takes."""
_PUBLIC = ("vllm#17885", "vllm#52906", "inference-sim#339")
"""Measurements of others."""


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _fixed(digits: int, scale: float = 1.0) -> Callable[[float], str]:
    return lambda value: f"{scale * value:.{digits}f}"


_plain = "{:g}".format
_seconds = _fixed(1, 1e-3)
_HISTORIES: Columns = {"found on device": ("device_hit_share", _share),
                       "found in host memory": ("host_hit_share", _share),
                       "computed again": ("recomputed_share", _share)}  # fmt: skip


def _cells(result: Result, row: str, at: str, columns: Columns) -> list[str]:
    return [write(result.value(row, f"{at}.{metric}")) for metric, write in columns.values()]


def latency(root: Path) -> str:
    """Mean normalised latency by load and system, and over vLLM's."""
    result, mean = Result(root, "engine_compare.json"), "normalised_latency_mean"

    def cell(system: str, at: str) -> str:
        value = f"{result.value(system, f'{at}.{mean}_ms_per_token'):.3g}"
        return value if system == "upstream-fcfs" else f"{value} ({result.value(system, f'{at}.{mean}_ratio'):.2f})"

    systems = list(result.setting("systems"))
    loads = sorted(result.setting("loads"))
    rows = [[f"{load:g}", *(cell(system, f"load_{load:g}") for system in systems)] for load in loads]
    return Table(["load", *(_BASELINES.get(one, f"`{one}`") for one in systems)], rows).markdown()


def by_system(root: Path, *, name: str, at: str, columns: Columns, first: str = "", ratio: str = "") -> str:
    """Return a row for each system at one load; ``ratio`` is 1 of vLLM, and has its extremes where others are named."""
    result, rows = Result(root, name), []
    for row in result.setting("systems"):
        cells = []
        for metric, write in columns.values():
            key = f"{at}.{metric}"
            text = "1" if metric == ratio and row == "upstream-fcfs" else write(result.value(row, key))
            if metric == ratio and row in _KEPT:
                text += " ({} to {})".format(*(write(result.value(row, f"{key}_{end}")) for end in ("min", "max")))
            cells.append(text)
        rows.append([{**_BASELINES, **_KEPT}.get(row, f"`{row}`"), *cells])
    return Table([first, *columns], rows).markdown()


_OBJECTIVES: Columns = {
    "met all objectives": ("slo_attainment_fraction", _share), "TTFT met": ("slo_ttft_attainment_fraction", _share),
    "every TBT met": ("slo_tbt_attainment_fraction", _share),
    "requests/s in time": ("goodput_requests_per_s", _fixed(1)),
    "P99 of gap over TBT objective": ("tbt_p99_over_slo", _fixed(2)),
    "output tokens/s over vLLM's": ("throughput_tokens_ratio", _fixed(2)),
}  # fmt: skip
_MEMORY: Columns = {"preemptions": ("preemptions", _plain), "steps": ("output_steps", _plain),
                    "met all objectives": ("slo_attainment_fraction", _share)}  # fmt: skip
_IN_PLACE: Columns = {
    "mean ms per output token": ("normalised_latency_mean_ms_per_token", _fixed(0)),
    "over vLLM's": ("normalised_latency_mean_ratio", _fixed(2)), "mean end-to-end, s": ("e2e_mean_ms", _seconds),
    "P99, s": ("e2e_p99_ms", _seconds), "mean TTFT, s": ("ttft_mean_ms", _seconds),
    "preemptions": ("preemptions", _fixed(0)),
}  # fmt: skip
_TURNS: Columns = {"P90, ms per output token": ("normalised_latency_p90_ms_per_token", _fixed(1)),
                   "TTFT of later turns, ms": ("ttft_later_mean_ms", _fixed(0)), **_HISTORIES}  # fmt: skip


def conversations(root: Path) -> str:
    """Rate sustained, latency, and where histories came from."""
    result, rows = Result(root, "multi_turn.json"), []
    for row in result.setting("rows"):
        rate = "0.62" if row == "stateless" else "0.84"
        sustained = f"{result.value(row, 'sustained_conversations_per_s'):.2f}"
        bound = result.value(row, "sustained_conversations_per_s_is_lower_bound", default=0.0)
        name = _CHATS[row] + (f" (at {rate}/s)" if rate != "0.84" else "")
        rows.append([name, f"> {sustained}" if bound else sustained, *_cells(result, row, f"rate_{rate}", _TURNS)])
    return Table(["", "sustained, conversations/s", *_TURNS], rows).markdown()


def sizes(root: Path) -> str:
    """Less and more host memory."""
    columns = {name: _TURNS[name] for name in _TURNS if name not in ("TTFT of later turns, ms", "found on device")}
    rows = []
    for name in ("multi_turn_small_tier.json", "multi_turn.json", "multi_turn_large_tier.json"):
        result = Result(root, name)
        for row in ("tier-lru", "tier-retention", "pensieve"):
            memory = f"{result.setting('tier_gib'):g} GiB, {result.setting('tier_tokens')[row]:,} tokens"
            rows.append([memory, _CHATS[row], *_cells(result, row, "rate_0.84", columns)])
    return Table(["host memory", "", *columns], rows).markdown()


def ablation(root: Path) -> str:
    """What gaps and eviction policies are worth at equal stores; ratios are over `pensieve`, paired by seed."""
    result, base, upstream = Result(root, "kv_ablation.json"), "no gaps, retention", "vLLM, lru, early"
    rows = []
    for scene, setting in result.setting("scenes").items():
        for at in (f"{scene}, {host_gb:g} GB" for host_gb in setting["host_gb"]):
            for name, shown in {**_ABLATION, upstream: upstream}.items():
                row, prefix = (name, f"{at}.{name}.") if name == upstream else (f"{at}.{name}", "")
                names = ("history_found_fraction", "e2e_mean_ms", "e2e_p99_ms", "ttft_mean_ms")
                found, mean, p99, ttft = (result.value(row, prefix + metric) for metric in names)
                ratio = "1"
                if name != base:
                    pair = f"{at}: {name} over {base}"
                    ends = [result.value(pair, f"e2e_mean_ms_ratio{end}") for end in ("", "_low", "_high")]
                    ratio = "{:.3f} ({:.3f} to {:.3f})".format(*ends)
                seconds = [f"{mean / 1000:.2f}", ratio, f"{p99 / 1000:.1f}", f"{ttft:.0f}"]
                rows.append([at, shown, f"{100 * found:.1f} %", *seconds])
    header = ["", "", "histories found", "mean end-to-end, s", "over `pensieve`'s", "P99, s", "mean TTFT, ms"]
    return Table(header, rows).markdown()


def step_cost(root: Path) -> str:
    """CPU time of a step over vLLM's, for every system and queue."""
    result = Result(root, "step_overhead.json")
    full = result.setting("waiting_memory_bound")
    queues = {f"{waiting}_waiting": f"{waiting:,} waiting" for waiting in result.setting("waiting")}
    queues[f"{full}_waiting_memory_bound"] = f"{full:,} waiting, KV memory full"
    rows = []
    for name in (name for group in result.setting("groups") for name in group):
        for running in result.setting("running"):
            ratios = [result.metrics.get(f"{name}_{running}_running_{queue}_ratio") for queue in queues]
            rows.append([f"`{name}`", str(running), *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    return Table(["", "running", *queues.values()], rows).markdown()


def papers(root: Path) -> str:
    """The figures that papers are known by, beside ours."""
    rows = []
    for name in sorted(path.stem for path in (root / RESULTS / "repro").glob("*.json")):
        for claim in Result(root, f"repro/{name}.json").claims:
            if claim["headline"]:
                values = [f"{claim['goal']:.4g}", f"{claim['value']:.4g}", "yes" if claim["met"] else "**no**"]
                rows.append([f"[{name}](../../benchmarks/results/repro/{name}.json)", claim["name"], *values])
    return Table(["figure", "claim", "paper", "ours", "reached"], rows).markdown()


def claims(of: Iterable[Mapping[str, Any]]) -> str:
    """Goals as they were set, and what came of each."""
    rows = [(f"`{one['name']}`", f"{one['op']} {one['goal']:g}", f"{one['value']:.4g}",
             "met" if one["met"] else "**missed**") for one in of]  # fmt: skip
    return Table(["metric", "goal", "measured", ""], rows).markdown()


def public(root: Path, name: str) -> str:
    """Return what others published of a measurement beside what is simulated."""
    result = Result(root, "public_measurements.json")
    published = {key: value for key, value in result.data["baselines"]["published"].items() if key.startswith(name)}
    rows = []
    for key, value in published.items():
        ours = result.value("simulated", key)
        rows.append([key.removeprefix(f"{name}, "), f"{value:.4g}", f"{ours:.4g}", f"{ours / value:.2f}"])
    return Table(["", "published", "simulated", "simulated over published"], rows).markdown()


def kept(root: Path, name: str, title: str = "") -> str:
    """Return the table that a result keeps as its rows, or the one of that title."""
    result = Result(root, name)
    header, *rows = result.setting("tables")[title] if title else (result.setting("columns"), *result.setting("rows"))
    return Table(header, rows).markdown()


def engine_clock(root: Path) -> str:
    """Seconds of the engine and of the simulator for the same requests, and vLLM's over each system's on the engine."""
    result, rows = Result(root, "engine_clock.json"), []
    for load in result.setting("loads"):
        for name in result.setting("rows"):
            found = result.data["baselines"].get(name, result.metrics)
            cells = [f"{load:g}", name]
            for measure in ("mean e2e", "P99 e2e"):
                cells += [f"{found[f'load_{load:g}.{who}{measure}_s']:.3f}" for who in ("", "simulated ")]
            for measure in ("mean e2e", "P99 e2e"):
                at = f"load_{load:g}.{measure}"
                value, low, high = (found.get(f"{at}.{end}", 1.0) for end in ("ratio", "low", "high"))
                cells.append(f"{value:.2f} ({low:.2f} to {high:.2f})")
            rows.append(cells)
    header = ["load", "", "mean e2e, s: engine", "simulator", "P99 e2e, s: engine", "simulator",
              "mean, vLLM's over", "P99, vLLM's over"]  # fmt: skip
    return Table(header, rows).markdown()


TABLES: dict[str, Callable[[Path], str]] = {
    "latency": latency,
    "objectives": partial(by_system, name="engine_compare_slo.json", at="load_1.2", columns=_OBJECTIVES,
                          ratio="throughput_tokens_ratio"),
    "memory": partial(by_system, name="engine_compare_memory.json", at="load_2", columns=_MEMORY),
    "in-place": partial(by_system, name="engine_compare_in_place.json", at="load_1.5", columns=_IN_PLACE,
                        first="preempted KV", ratio="normalised_latency_mean_ratio"),
    "conversations": conversations,
    "sizes": sizes,
    "ablation": ablation,
    "step-cost": step_cost,
    "papers": papers,
    "tuning-papers": partial(kept, name="tuning.json", title="papers' models on A100"),
    "tuning-modern": partial(kept, name="tuning.json", title="8B and 70B on H100"),
    "tuning-lengths": partial(kept, name="tuning.json", title="lengths"),
    "engine-clock": engine_clock,
    "plan-held-out": partial(kept, name="plan_held_out.json"),
    **{f"public-{name}": partial(public, name=name) for name in _PUBLIC},
}  # fmt: skip
"""The tables by the names that pages call them by."""
