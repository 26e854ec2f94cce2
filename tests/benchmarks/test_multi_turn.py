"""The benchmark of conversations on the real engine: its parts without an engine."""

from __future__ import annotations

import contextlib
import json
import math
from importlib import import_module as script
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext.config.kv_tier import KvTierConfig
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.requests import SimRequest


def options(*argv: str) -> Any:
    return script("multi_turn_options").parse("", argv)


def chats(folder: Path, *, turns: int = 3, count: int = 4) -> Path:
    """Conversations of 16 tokens to a message and 32 to an answer, at 4 characters to a token."""
    said = [{"from": "human", "value": "a " * 32}, {"from": "gpt", "value": "b " * 64}]
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps({"id": str(i), "conversations": said * turns}) + "\n" for i in range(count)))
    return file


def small(folder: Path, *argv: str) -> Any:
    return options("--conversations", str(chats(folder)), "--num-conversations", "4", "--length-scale", "1", *argv)


def openings(args: Any, rate: float, repeat: int = 0) -> list[SimRequest]:
    return list(build(script("multi_turn_workload").spec(args, repeat, rate)).start())


def second_turn(args: Any, *, finished_s: float, output_ids: list[int]) -> SimRequest:
    found = build(script("multi_turn_workload").spec(args, 0, 1.0))
    (turn,) = found.after(next(iter(found.start())), finished_s, output_ids)
    return turn


def test_a_rate_stretches_the_schedule_and_changes_nothing_else(tmp_path: Path) -> None:
    args = small(tmp_path)
    slow, fast = openings(args, 1.0), openings(args, 4.0)
    assert [r.arrival_s for r in slow] == pytest.approx([4 * r.arrival_s for r in fast])
    assert [r.token_ids for r in slow] == [r.token_ids for r in fast]
    assert openings(args, 1.0, repeat=1)[0].arrival_s != slow[0].arrival_s


def test_the_next_turn_says_what_the_engine_answered_and_comes_after_thinking(tmp_path: Path) -> None:
    args = small(tmp_path)
    opening = openings(args, 1.0)[0]
    answer = list(range(200, 232))
    turn = second_turn(args, finished_s=50.0, output_ids=answer)
    assert opening.token_ids is not None
    assert turn.token_ids is not None
    assert list(turn.token_ids[: 16 + 32]) == [*opening.token_ids, *answer]
    assert len(turn.token_ids) == 16 + 32 + 16
    later = second_turn(args, finished_s=60.0, output_ids=answer)
    assert (opening.output_tokens, opening.max_tokens) == (32, args.max_model_len - 16), "it does not tell the length"
    assert later.arrival_s - 60.0 == pytest.approx(turn.arrival_s - 50.0)
    assert turn.arrival_s > 50.0


def test_an_extent_follows_every_conversation_to_its_end(tmp_path: Path) -> None:
    args = small(tmp_path)
    workload = script("multi_turn_workload")
    found = workload.extent(build(workload.spec(args, 0, 1.0)))
    assert found == workload.Extent(
        conversations=4,
        turns=12,
        context_tokens=4 * 3 * 48,
        history_tokens=4 * (48 + 96),
        prompt_tokens=4 * (16 + 64 + 112),
        output_tokens=4 * 3 * 32,
    )


def test_sizes_that_are_not_given_follow_from_the_conversations(tmp_path: Path) -> None:
    workload = script("multi_turn_workload")
    total = SimpleNamespace(context_tokens=32_000)
    args = small(tmp_path)
    workload.set_sizes(args, total, 1024)
    assert args.tier_gib == 8000 * 1024 / 2**30
    assert args.num_gpu_blocks == 4000 // 32 + 1
    few = small(tmp_path, "--max-model-len", "8192")
    workload.set_sizes(few, total, 1024)
    assert few.num_gpu_blocks == 8192 // 32 + 1, "vLLM refuses a device that could not hold the longest request"
    given = small(tmp_path, "--tier-gib", "0.5", "--num-gpu-blocks", "40")
    workload.set_sizes(given, total, 1024)
    assert (given.tier_gib, given.num_gpu_blocks) == (0.5, 40)


def test_kv_of_a_token_follows_the_model_as_it_is_overridden(tmp_path: Path) -> None:
    workload = script("multi_turn_workload")
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert workload.kv_of(tmp_path, {}, 2) == workload.ModelKv(num_layers=2, bytes_per_token=2 * 2 * 4 * 16 * 2)
    overrides = {"num_key_value_heads": 1, "head_dim": 32}
    assert workload.kv_of(tmp_path, overrides, 4).bytes_per_token == 2 * 2 * 32 * 4
    with pytest.raises(ValueError, match="vocab_size=2048"):
        workload.kv_of(tmp_path, {"vocab_size": 2048}, 2)


def test_nothing_measured_begins_like_the_warm_up_and_nobody_thinks_in_calibration(tmp_path: Path) -> None:
    workload = script("multi_turn_workload")
    warm = {tuple(r.token_ids[:32]) for r in build(workload.WARMUP).start()}
    measured = {tuple((r.token_ids or ())[:32]) for r in openings(small(tmp_path), 1.0)}
    assert warm.isdisjoint(measured)
    phases = workload.calibration(small(tmp_path, "--max-num-seqs", "3"))
    clients = {name: (phase.clients, phase.think_s) for name, phase in phases.items()}
    assert clients == {"unloaded": (1, 0.0), "saturated": (3, 0.0)}


def test_all_rows_share_the_device_and_all_tiers_their_bytes(tmp_path: Path) -> None:
    rows = script("multi_turn_rows")
    args = small(tmp_path, "--tier-gib", "0.25", "--num-gpu-blocks", "40", "--block-size", "64")
    found = {name: rows.engine_args(name, args) for name in rows.ROWS}
    assert {own["num_gpu_blocks_override"] for own in found.values()} == {40}
    tiers = {
        name: KvTierConfig(**own["additional_config"]["vllm_ext"]["kv_tier"])
        for name, own in found.items()
        if "additional_config" in own
    }
    on_device = {name for name, tier in tiers.items() if tier.device_int8_share}
    assert on_device == {"records", "pensieve-records"}
    beside = "prefix-cache-own-kernel"  # what the kernel does without records
    kernels = {name: found[name]["additional_config"]["vllm_ext"].get("attention") for name in tiers}
    assert {name for name, kernel in kernels.items() if kernel == {"kernel": "own"}} == on_device | {beside}
    without_host = {"records", "pensieve-records", beside}
    assert {name: tier.gib for name, tier in tiers.items() if name in without_host} == dict.fromkeys(without_host)
    assert {tier.gib for name, tier in tiers.items() if name not in without_host} == {0.25}
    upstream = {name: own["enable_prefix_caching"] for name, own in found.items() if "scheduler_cls" not in own}
    assert upstream == {"stateless": False, "prefix-cache": True}
    assert upstream.keys().isdisjoint(tiers)
    assert [tiers[name].policy for name in ("tier-lru", "tier-arc", "tier-retention")] == ["lru", "arc", "retention"]
    assert tiers["tier-retention-8"].bits == 8


def test_a_tier_of_8_bits_holds_the_more_tokens_the_larger_a_block_is(tmp_path: Path) -> None:
    rows, workload = script("multi_turn_rows"), script("multi_turn_workload")
    args = small(tmp_path, "--tier-gib", "0.0625")
    kv = workload.ModelKv(num_layers=8, bytes_per_token=8192)
    assert rows.tier_tokens("tier-lru", args, kv) == rows.tier_tokens("tier-retention", args, kv) == 2**26 // 8192
    assert 1.77 < rows.tier_tokens("tier-retention-8", args, kv) / (2**26 // 8192) < 1.78
    args.block_size = 64
    assert 1.87 < rows.tier_tokens("tier-retention-8", args, kv) / (2**26 // 8192) < 1.89
    assert rows.tier_tokens("prefix-cache", args, kv) is None


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rows", "stateless,tier-fifo"], "tier-fifo: must be one of"),
        (["--rates", "1,x"], "--rates=1,x: must be a comma list"),
        (["--rates", "1,1"], "must be different numbers"),
        (["--min-turns", "1"], "--min-turns=1: must be at least 2"),
        (["--length-scale", "0"], "--length-scale=0: must be greater than 0"),
        (["--dtype", "int8"], "--dtype=int8: must be one of"),
    ],
)
def test_bad_options_are_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(*argv)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("points", "rate", "bound"),
    [
        ([(1.0, 10.0), (2.0, 30.0)], 1.5, ""),
        ([(2.0, 30.0), (1.0, 10.0)], 1.5, ""),
        ([(1.0, 10.0), (2.0, 20.0)], 2.0, ">="),
        ([(1.0, 21.0), (2.0, 19.0)], 1.0, "<="),
        ([(1.0, 10.0), (2.0, 30.0), (3.0, 15.0)], 1.5, ""),
    ],
)
def test_a_rate_at_the_target_is_interpolated_or_bounded(
    points: list[tuple[float, float]], rate: float, bound: str
) -> None:
    found = script("multi_turn_report").crossing(points, 20.0)
    assert (found.value, str(found).rpartition(" ")[0]) == (pytest.approx(rate), bound)


@pytest.mark.parametrize(
    ("crosses_at", "measured"),
    [(0.5, [3.0, 2.0, 1.0]), (1.5, [3.0, 2.0, 1.0]), (2.5, [3.0, 2.0]), (3.5, [3.0, 4.0]), (9.0, [3.0, 4.0, 5.0])],
)
def test_rates_are_measured_from_the_middle_to_where_latency_crosses(crosses_at: float, measured: list[float]) -> None:
    climb = script("multi_turn_report").climb([5.0, 1.0, 2.0, 4.0, 3.0], 20.0)
    asked = [next(climb)]
    with contextlib.suppress(StopIteration):
        while True:
            asked.append(climb.send(30.0 if asked[-1] > crosses_at else 10.0))
    assert asked == measured


def test_a_curve_needs_points_of_different_rates() -> None:
    crossing = script("multi_turn_report").crossing
    for points in ([], [(1.0, 2.0), (1.0, 3.0)]):
        with pytest.raises(ValueError, match="at least one, each of another rate"):
            crossing(points, 1.0)


KNOWN = {"=": lambda x: (x, x), ">=": lambda x: (x, math.inf), "<=": lambda x: (0.0, x)}


@pytest.mark.parametrize(
    ("above", "below", "expected"),
    [("=", "=", "2"), (">=", "=", ">= 2"), ("=", ">=", "<= 2"), (">=", "<=", ">= 2"), (">=", ">=", None)],
)
def test_a_ratio_of_bounds_is_a_bound_or_open(above: str, below: str, expected: str | None) -> None:
    report = script("multi_turn_report")
    found = report.Known(*KNOWN[above](4.0)) / report.Known(*KNOWN[below](2.0))
    assert (None if found == report.OPEN else str(found)) == expected


def test_the_middle_keeps_its_bound() -> None:
    report = script("multi_turn_report")
    numbers = [report.Known(3.0, math.inf), report.Known(1.0, 1.0), report.Known(2.0, 2.0)]
    assert [str(report.middle(some)) for some in (numbers, numbers[:1], numbers[:2])] == ["2", ">= 3", "1"]


def turn(req_id: str, *, history: int, cached: int, first_s: float, tokens: int = 2, **changed: Any) -> dict[str, Any]:
    return {
        "req_id": req_id,
        "arrival_s": 1.0,
        "sent_s": 1.5,
        "token_times_s": [1.0 + first_s] * tokens,
        "output_tokens": tokens,
        "prompt_tokens": history + 10,
        "history_tokens": history,
        "cached_tokens": cached,
        "finish_reason": "stop",
        **changed,
    }


def phase(*requests: dict[str, Any], **load: float) -> dict[str, Any]:
    cell = script("engine_cell")
    copies = {**dict.fromkeys((*cell.FOUND, *cell.COPIED), 0.0), **load}
    return {"requests": list(requests), "load": {"preemptions": 0.0}, "copies": copies, "foreign_cpu_cores": 0.5}


def test_metrics_say_where_histories_came_from() -> None:
    report = script("multi_turn_report")
    found = report.cell_metrics(
        "x",
        phase(
            turn("r0.0", history=0, cached=0, first_s=0.1),
            turn("r0.1", history=100, cached=64, first_s=0.2),
            turn("r0.2", history=100, cached=104, first_s=0.4),
            device_hit_tokens=72.0,
            host_hit_tokens=96.0,
            preempted_tokens=50.0,
            preempted_device_hit_tokens=20.0,
            preempted_host_hit_tokens=4.0,
            host_stored_bytes=2e6,
        ),
        turns=3,
    )
    assert found["ttft_first_mean_ms"] == pytest.approx(100)
    assert found["ttft_later_mean_ms"] == pytest.approx(300)
    assert found["recomputed_history_tokens"] == 36, "what is cached beyond the history counts for nothing"
    assert found["recomputed_preempted_tokens"] == 26
    assert (found["device_hit_share"], found["host_hit_share"]) == (0.36, 0.48)
    assert (found["host_stored_mb"], found["client_lateness_max_ms"]) == (2, 500)
    assert found[report.P90] == pytest.approx(180)


@pytest.mark.parametrize(
    ("changed", "said"), [({"output_tokens": 3}, "ended with 2 tokens"), ({"finish_reason": "length"}, "'length'")]
)
def test_a_wrong_output_fails_the_run(changed: dict[str, Any], said: str) -> None:
    report = script("multi_turn_report")
    with pytest.raises(script("engine_report").WrongOutput, match=said):
        report.cell_metrics("x", phase(turn("r0", history=0, cached=0, first_s=0.1, **changed)), turns=1)
    with pytest.raises(script("engine_report").WrongOutput, match="1 requests were served, expected 2"):
        report.cell_metrics("x", phase(turn("r0", history=0, cached=0, first_s=0.1)), turns=2)


def test_counts_add_up_over_steps() -> None:
    stats = script("engine_cell").StepStats()
    hits = SimpleNamespace(hits=32, preempted_queries=10, preempted_hits=3)
    loads = {"data": {"vllm:kv_offload_load_bytes": {(): 7, ("a",): 1}}}
    for host, moved in ((None, None), (hits, loads)):
        stats.observe_copies(
            SimpleNamespace(prefix_cache_stats=hits, connector_prefix_cache_stats=host, kv_connector_stats=moved)
        )
    assert stats.copies == {
        "device_hit_tokens": 64,
        "host_hit_tokens": 32,
        "preempted_tokens": 20,
        "preempted_device_hit_tokens": 6,
        "preempted_host_hit_tokens": 3,
        "host_stored_bytes": 0,
        "host_loaded_bytes": 8,
    }


def judged(measured: list[Any], tokens: dict[str, int]) -> list[Any]:
    reduced = script("engine_report").reduce(measured)
    report = script("multi_turn_report")
    found: list[Any] = report.claims(reduced, report.sustained(measured, 20.0), tokens, "why.")
    return found


def cells(p90s: dict[str, list[dict[float, float]]], **metrics: float) -> list[Any]:
    """Cells by row and repeat, each with the P90 of its rates."""
    report = script("multi_turn_report")
    return [
        report.Cell(system=row, at=rate, repeat=repeat, metrics={**metrics, report.P90: p90})
        for row, repeats in p90s.items()
        for repeat, points in enumerate(repeats)
        for rate, p90 in points.items()
    ]


MEASURED = {
    "stateless": [{1.0: 10.0, 2.0: 30.0}, {1.0: 20.0, 2.0: 40.0}],
    "tier-lru": [{1.0: 5.0, 2.0: 20.0}, {1.0: 10.0, 2.0: 30.0}],
    "tier-retention": [{1.0: 5.0, 2.0: 10.0}, {1.0: 5.0, 2.0: 35.0}],
}


def test_rows_are_compared_within_a_repeat() -> None:
    report = script("multi_turn_report")
    rates = report.sustained(cells(MEASURED), 20.0)
    assert {row: [str(known) for known in repeats.values()] for row, repeats in rates.items()} == {
        "stateless": ["1.5", "1"],
        "tier-lru": [">= 2", "1.5"],
        "tier-retention": [">= 2", "1.5"],
    }
    over = {row: [str(known) for known in found] for row, found in report.gains(rates, "stateless").items()}
    assert over == {"tier-lru": [">= 1.33", "1.5"], "tier-retention": [">= 1.33", "1.5"]}
    assert [str(known) for known in report.gains(rates, "tier-lru")["tier-retention"]] == ["1"], "two bounds: open"


def test_results_hold_medians_spread_and_bounds() -> None:
    report = script("multi_turn_report")
    measured = cells(MEASURED, recomputed_share=0.25)
    reduced, rates = script("engine_report").reduce(measured), report.sustained(measured, 20.0)
    report.add_spread(measured, reduced)
    own = reduced["tier-retention", 2.0]
    assert (own[report.P90], own[f"{report.P90}_min"], own[f"{report.P90}_max"]) == (22.5, 10.0, 35.0)
    summed = report.summary(rates)
    assert summed["tier-retention"]["sustained_over_stateless_ratio_is_lower_bound"] == 1.0
    assert summed["stateless"]["sustained_conversations_per_s"] == 1.0
    text = "\n".join(map(str, report.tables(reduced, rates, 20.0)))
    assert ">= 1.33 (>= 1.33, 1.5)" in text


def test_goals_are_judged_where_their_rows_were_measured() -> None:
    report = script("multi_turn_report")
    measured = cells(MEASURED, recomputed_share=0.25)
    measured += cells({"tier-retention-8": [{1.0: 5.0}]}, recomputed_share=0.125)
    tokens = {"tier-retention": 100, "tier-retention-8": 200}
    found = {goal.name: (goal.value, goal.met) for goal in judged(measured, tokens)}
    assert found["tier-retention.sustained_over_stateless_ratio"] == (pytest.approx(4 / 3), True)
    assert found["tier-retention.sustained_over_tier_lru_ratio"] == (1.0, False)
    assert found[report.DENSITY] == (2.0, True)
    assert found[report.FOUND] == (pytest.approx(0.125), True)


def test_history_found_on_the_device_is_compared_with_prefix_caching() -> None:
    report = script("multi_turn_report")
    measured = cells({"records": [{1.0: 5.0}]}, device_hit_share=0.6)
    measured += cells({"prefix-cache": [{1.0: 10.0}]}, device_hit_share=0.3)
    found = {goal.name: (goal.value, goal.met) for goal in judged(measured, {})}
    assert found[report.ON_DEVICE] == (2.0, True)


def test_an_upper_bound_meets_no_goal() -> None:
    measured = cells({"stateless": [{1.0: 30.0}], "tier-retention": [{1.0: 10.0, 3.0: 30.0}]})
    assert [goal.met for goal in judged(measured, {})] == [True]
    measured = cells({"stateless": [{1.0: 10.0}], "tier-retention": [{1.5: 30.0}]})
    assert judged(measured, {}) == []
