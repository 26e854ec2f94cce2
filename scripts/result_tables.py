"""The tables of docs/results, from the files in benchmarks/results: rows, columns, and how a number is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from result_file import Result

from vllm_ext.experiments.report import of_paper
from vllm_ext.report.claim import PaperClaim, Verdict
from vllm_ext.report.provenance import RESULTS
from vllm_ext.report.table import Table

_ABLATION = {"gaps, leading": "gaps, leading ends first", "no gaps, retention": "no gaps, retention value: `pensieve`",
             "no gaps, tail": "no gaps, tails", "no gaps, lru": "no gaps, LRU"}  # fmt: skip
_COMPARED = ("objectives", "memory", "conversations", "swapping")
"""Of `benchmarks/engine/comparisons.py`."""
_VALIDATED = {"independent requests": "", "too few KV blocks": "_memory", "conversations, prefix cache": "_turns",
              "conversations, KV tier": "_tier"}  # fmt: skip
"""What `benchmarks/engine/simulator_validation.py` looks at, and the end of its result's name."""
_PUBLIC = ("vllm#17885", "vllm#52906", "inference-sim#339")
"""Measurements of others."""


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


_RANKED = ("below", "above", "matched", "not comparable", "tendency")
"""Verdicts: a figure of several claims has the first that one of them has."""
_COUNTED: Mapping[str, str] = {
    "matched": "matched",
    "above": "above",
    "below": "below",
    "tendency": "without a number in the paper",
    "not comparable": "not comparable",
}


def _figures(root: Path) -> Iterator[tuple[str, Result, list[PaperClaim], Verdict]]:
    """Each figure with what its paper is known by, and its verdict."""
    for name in sorted(path.stem for path in (root / RESULTS / "repro").glob("*.json")):
        result = Result(root, f"repro/{name}.json")
        if claims := [claim for claim in of_paper(result.claims) if claim.headline]:
            yield name, result, claims, min((claim.verdict for claim in claims), key=_RANKED.index)


def papers_count(root: Path) -> str:
    """How many figures are matched, and what becomes of the others."""
    verdicts: list[str] = [verdict for *_, verdict in _figures(root)]
    counts = [[shown, verdicts.count(kind)] for kind, shown in _COUNTED.items()]
    return Table(["verdict", "figures"], [*counts, ["all", len(verdicts)]]).markdown()


def papers(root: Path) -> str:
    """A line for each figure: what the paper states beside ours."""
    rows = []
    for name, result, claims, verdict in _figures(root):
        like = sum(claim.verdict == verdict for claim in claims)
        of_which = f" ({like} of {len(claims)})" if like < len(claims) else ""
        reasons = dict.fromkeys(f"{one.text} ({one.shown_by})" for claim in claims if (one := claim.reason))
        columns = [[claim.name, claim.paper, claim.measured, _number(claim.ours), _number(claim.tuned)]
                   for claim in claims]  # fmt: skip
        what, paper, here, ours, tuned = ("<br>".join(column) if any(column) else ""
                                          for column in zip(*columns, strict=True))  # fmt: skip
        link, judged = f"[{name}](../../benchmarks/results/repro/{name}.json)", f"**{verdict}**{of_which}"
        seeds = len(result.data["config"].get("seeds", ()))
        at = result.measured_at + (f", {seeds} seeds" if seeds else "")
        rows.append([link, what, paper, here, judged, "<br>".join(reasons), ours, tuned, at])
    header = ["figure", "claim", "paper", "here", "verdict", "reason", "ours", "ours over tuned vLLM", "measured at"]
    return Table(header, rows).markdown()


def papers_left_out(root: Path) -> str:  # noqa: ARG001 - it is in the code
    """Figures and tables of papers that no experiment simulates, and why."""
    rows = [[paper, what, why] for paper, module in _LEFT_OUT.items()
            for what, why in import_module(f"vllm_ext.experiments.papers.{module}").NOT_SIMULATED.items()]  # fmt: skip
    return Table(["paper", "not simulated", "why"], rows).markdown()


_LEFT_OUT = {"ALISE": "alise_costs", "Sarathi-Serve": "sarathi_costs", "AccelGen": "accelgen_batches",
             "Past-Future": "past_future_engines", "Pensieve": "pensieve_costs",
             "BatchMaker": "batchmaker"}  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


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


def validation(root: Path) -> str:
    """Errors of predicted latencies of the real engine, beside those of a second run of the engine."""
    rows = []
    for setting, ending in _VALIDATED.items():
        result = Result(root, f"simulator_validation{ending}.json")
        again = result.data["baselines"]["another run of the real engine"]
        for at in (name.removesuffix(".e2e_error_median") for name in again if name.endswith(".e2e_error_median")):
            system, load = at.rsplit(".load_", 1)
            found = [*(one[f"{at}.{name}_error_median"] for name in ("e2e", "ttft") for one in (result.metrics, again)),
                     result.metrics[f"{at}.e2e_mean_error"]]  # fmt: skip
            equal = result.metrics.get(f"{at}.replayed_equal_steps_fraction")
            shown = [f"{100 * value:.1f} %" for value in found]
            rows.append(
                [setting, f"`{system}`", load, *shown, "not replayed" if equal is None else f"{100 * equal:.0f} %"]
            )
    header = ["", "system", "load", "e2e: error", "engine again", "TTFT: error", "engine again", "mean e2e",
              "decisions replayed"]  # fmt: skip
    return Table(header, rows).markdown()


def _device(root: Path, part: str, run: str) -> dict[str, Any]:
    """Return what a part of `gpu_check.py` found on a GPU."""
    found: dict[str, Any] = Result(root, f"device/{part}.json").data["runs"][run]["result"]
    return found


def gpu_attention(root: Path) -> str:
    """Microseconds of a layer's attention: ours, FlashAttention 3, vLLM's Triton kernel, and ours with KV in 8 bits."""
    found = _device(root, "attention", "kernels")
    names = {"own": "ours", "flash_attn_3": "FlashAttention 3", "triton_unified": "vLLM's Triton kernel",
             "own_int8": "ours, KV in 8 bits"}  # fmt: skip
    told = {"own": found["metrics"], "own_int8": found["metrics"], **found["baselines"]}
    rows = []
    for cell in found["config"]["cells"]:
        times = [told[name][f"{cell}_{name}_us"] for name in names]
        over = [f"{times[0] / one:.2f}" for one in times[1:]]
        rows.append([f"`{cell}`", *(f"{one:.0f}" for one in times), *over])
    header = ["cell", *(f"{name}, us" for name in names.values()), *(f"ours over {one}" for one in
              ("FlashAttention 3", "Triton", "8 bits"))]  # fmt: skip
    return Table(header, rows).markdown()


def gpu_decode(root: Path) -> str:
    """Milliseconds of a decode step of an 8B model: vLLM's scheduler and `alise`."""
    found, rows = _device(root, "decode", "steps")["settings"], []
    for name in [name for name in found["stock"] if name.endswith("_ms")]:
        batch, context = name.removeprefix("batch_").removesuffix("_ms").split("_context_")
        middle = {one: median(found[one][name]) for one in ("stock", "alise")}
        ratio = found["alise"][f"{name.removesuffix('_ms')}_over_stock"]
        rows.append([batch, context, f"{middle['stock']:.2f}", f"{middle['alise']:.2f}", f"{ratio:.3f}"])
    return Table(["requests", "context", "vLLM, ms", "`alise`, ms", "ratio"], rows).markdown()


def gpu_copies(root: Path) -> str:
    """GB/s of KV between device and host memory."""
    found = _device(root, "swap", "copies")["metrics"]
    rows = [[shown, *(f"{found[f'{bits}_{name}']:.0f}" for bits in ("raw", "8bit"))]
            for name, shown in _COPIED.items()]  # fmt: skip
    return Table(["", "16 bits", "8 bits"], rows).markdown()


_COPIED = {
    "store_gb_per_s": "to host memory, GB/s of KV",
    "load_gb_per_s": "from host memory, GB/s of KV",
    "pack_kernel_gb_per_s": "the kernel that packs, alone",
    "unpack_kernel_gb_per_s": "the kernel that unpacks, alone",
    "store_of_one_chunk_through_us": "a chunk of 4 MiB to the host, us",
    "load_of_one_chunk_through_us": "and back, us",
}


def gpu_budget(root: Path) -> str:
    """What requests saw under each token budget, on the device and in the simulator."""
    measured, simulated = (_device(root, "token_budget", run) for run in ("measured", "simulated"))
    rows = []
    for budget, window in measured["windows"].items():
        by_grid = simulated["windows"][budget]
        cells = [f"{one[name]:.2f}" for name in ("mean_e2e_s", "p99_e2e_s", "mean_ttft_s") for one in (window, by_grid)]
        rows.append([budget, *cells, f"{window['unfinished']:.0f} of {window['requests']:.0f}"])
    header = ["tokens of a step", *(f"{name}, s: {where}" for name in ("mean e2e", "P99 e2e", "mean TTFT")
              for where in ("device", "simulated")), "unfinished after 6 s"]  # fmt: skip
    return Table(header, rows).markdown()


_PREDICTORS = {"ridge+neighbours": "predictor", "ridge": "ridge alone", "mlp": "small network (as ALISE's decoder)"}
_SETS = {"dolly": "Dolly", "alpaca": "Alpaca", "wildchat": "WildChat", "gsm8k": "gsm8k", "halueval": "HaluEval",
         "sharegpt": "ShareGPT", "mtbench101": "MT-Bench-101", "oasst1": "OASST1"}  # fmt: skip
_MEANS = {"tau": "mean tau", "pinball": "mean pinball loss", "coverage": "mean share within the P90"}


def prediction(root: Path) -> str:
    """How well lengths are ordered, by set and turn, and the means over the sets."""
    result = Result(root, "prediction.json")

    def cells(at: str, metric: str) -> list[str]:
        return [f"{result.metrics[f'{name}/{at}/{metric}']:.3f}" for name in _PREDICTORS]

    rows = []
    for key, shown in _SETS.items():
        turns = [turn for turn in ("first", "later") if f"mlp/{key}/{turn}/tau" in result.metrics] or ["all"]
        rows += [[shown, turn, *cells(f"{key}/{turn}", "tau")] for turn in turns]
    rows += [[shown, "all", *cells("mean", metric)] for metric, shown in _MEANS.items()]
    return Table(["tau", "turns", *_PREDICTORS.values()], rows).markdown()


_AS_ALISE = {"bucket_accuracy": "in the right bucket of ten", "error_of_longest": "error, over 2,048 tokens",
             "mean_relative_error": "error, over the true length"}  # fmt: skip


def prediction_as_alise(root: Path) -> str:
    """What ALISE's Table 2 measures, on the two sets that its paper has."""
    result, rows = Result(root, "prediction.json"), []
    shown = {**_PREDICTORS, "history": "history", "announced": "true lengths, 9.2 % off"}
    for key in ("sharegpt", "alpaca"):
        for name, said in shown.items():
            found = [f"{result.metrics[f'{name}/{key}/all/{metric}']:.3f}" for metric in _AS_ALISE]
            rows.append([_SETS[key], said, *found])
    return Table(["", "predicted by", *_AS_ALISE.values()], rows).markdown()


_BRANCHES = {"vllm lru, prompts": "vLLM `lru`, prompts only (its default)", "vllm lru, all": "vLLM `lru`, all",
             "all, ahead": "false", "prompts, ahead": "true", "auto, ahead": "`auto`",
             "auto, early": "`auto`, `early`"}  # fmt: skip


def dead_branches(root: Path) -> str:
    """Share of histories that are found in host memory, by what is kept of generated tokens."""
    result, rows = Result(root, "dead_branches.json"), []
    for thinking in (0, 600):
        for chunks in (400, 800, 1600):
            metric = f"chunks_{chunks}.thinking_{thinking}.found_share"
            found = [f"{result.value(name, metric):.3f}" for name in _BRANCHES]
            rows.append([str(thinking), f"{chunks:,}", *found])
    return Table(["thinking, tokens", "chunks", *_BRANCHES.values()], rows).markdown()


def attention(root: Path) -> str:
    """Times of our attention kernel over those of vLLM's, and of INT8 over bfloat16, at the longest context."""
    results = {shown: Result(root, name) for shown, name in (("AVX512-BF16", "attention.json"),
                                                             ("AVX2", "attention_avx2.json"))}  # fmt: skip
    first = next(iter(results.values()))
    context, rows = max(first.setting("contexts")), []
    for query in first.setting("queries"):
        at = f"sweep_q{query}_{context}"
        found = [
            one.metrics[f"{at}_{name}"] for one in results.values() for name in ("own_over_stock", "int8_over_bf16")
        ]
        rows.append([str(query), *(f"{ratio:.2f}" for ratio in found)])
    columns = ("ours over vLLM's `CPU_ATTN`", "all KV in INT8, over bfloat16")
    return Table(["query tokens", *(f"{shown}: {name}" for shown in results for name in columns)], rows).markdown()


def tested(root: Path) -> str:
    """How many tests passed with which versions, by area: passed, and in brackets failed and skipped if any were."""
    results = [Result(root, f"tested/{path.name}") for path in sorted((root / RESULTS / "tested").glob("*.json"))]
    areas = sorted({area for one in results for area in one.setting("areas")})

    def cell(one: Result, area: str) -> str:
        counts = [int(one.metrics.get(f"{area}.{outcome}_tests", 0)) for outcome in ("passed", "failed", "skipped")]
        others = [f"{count} {name}" for count, name in zip(counts[1:], ("failed", "skipped"), strict=True) if count]
        return f"{counts[0]:,}" + (f" ({', '.join(others)})" if others else "")

    rows = [
        [
            *map(one.setting, ("vllm", "python", "device")),
            *(cell(one, area) for area in areas),
            ", ".join(one.setting("without")) or "-",
            one.measured_at,
        ]
        for one in results
    ]
    return Table(["vLLM", "Python", "device", *areas, "without", "at"], rows).markdown()


def routing(root: Path, shown: Callable[[list[Any], float], str], name: str = "routing.json") -> str:
    """A row for each router and a column for each load of `benchmarks/cluster/routing.py`.

    Args:
        root: The checkout.
        shown: Router's row of the load, and the most that a router carries there -> cell.
        name: Of the result.
    """
    tables = Result(root, name).setting("tables")
    scenes = {scene: {row[0]: row for row in rows} for scene, (_, *rows) in tables.items()}
    most = {scene: max(map(_rate, rows.values())) for scene, rows in scenes.items()}
    table = [
        [router, *(shown(rows[router], most[scene]) if router in rows else "" for scene, rows in scenes.items())]
        for router in dict.fromkeys(router for rows in scenes.values() for router in rows)
    ]
    return Table(["router", *scenes], table).markdown()


def _capacity(row: list[Any], most: float) -> str:
    """Conversations per second, the most in bold, and how many times round robin's that is, with its 95 % interval."""
    rate = f"**{row[1]}**" if _rate(row) == most else str(row[1])
    return rate if row[0] == "round-robin" else f"{rate}; {row[2]}"


def _latency(row: list[Any], _most: float) -> str:
    """Mean end-to-end latency and P99 of the time to the first token at the fixed load, in seconds."""
    return f"{row[3] / 1000:.3g} / {row[5] / 1000:.3g}"


def _rate(row: list[Any]) -> float:
    return float(str(row[1]).split()[0])


TABLES: dict[str, Callable[[Path], str]] = {
    **{name: partial(kept, name=f"compare_{name}.json", title=name) for name in _COMPARED},
    "ablation": ablation,
    "attention": attention,
    "auto": partial(kept, name="systems_compared.json"),
    "dead-branches": dead_branches,
    "prediction": prediction,
    "prediction-as-alise": prediction_as_alise,
    "routing-capacity": partial(routing, shown=_capacity),
    "routing-latency": partial(routing, shown=_latency),
    "routing-held-out": partial(routing, shown=_capacity, name="routing_held_out.json"),
    "step-cost": step_cost,
    "tested": tested,
    "papers": papers,
    "papers-count": papers_count,
    "papers-left-out": papers_left_out,
    "tuning-papers": partial(kept, name="tuning.json", title="papers' models on A100"),
    "tuning-modern": partial(kept, name="tuning.json", title="8B and 70B on H100"),
    "tuning-lengths": partial(kept, name="tuning.json", title="lengths"),
    "engine-clock": engine_clock,
    "validation": validation,
    "clock-agreement": partial(kept, name="clock_agreement.json"),
    "plan-held-out": partial(kept, name="plan_held_out.json"),
    "shadow": partial(kept, name="shadow.json"),
    "compare-noise": partial(kept, name="compare_noise.json"),
    "layer-times": partial(kept, name="layer_times.json"),
    "step-grid": partial(kept, name="step_grid.json"),
    "gpu-attention": gpu_attention,
    "gpu-decode": gpu_decode,
    "gpu-copies": gpu_copies,
    "gpu-budget": gpu_budget,
    **{f"public-{name}": partial(public, name=name) for name in _PUBLIC},
}  # fmt: skip
"""The tables by the names that pages call them by."""
