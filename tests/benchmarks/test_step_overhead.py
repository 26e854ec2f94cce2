"""The benchmark of a scheduler step: what it measures, that its two states are held, and how it judges."""

from __future__ import annotations

import json
from importlib import import_module as script
from pathlib import Path
from typing import Any

import pytest

from vllm_ext import systems
from vllm_ext.systems import past_future

RUNNING = 20


def cell(*, waiting: int = 6, memory_bound: bool = False) -> Any:
    return script("step_overhead").Cell(running=RUNNING, waiting=waiting, memory_bound=memory_bound)


def subject(name: str, **kwargs: Any) -> Any:
    return script("step_overhead").Subject(name, cell(**kwargs), lambda: 0.0)


def test_every_system_that_may_serve_is_measured_and_no_other() -> None:
    names = script("step_overhead").default_systems(quick=False)
    assert {row.name for row in systems.table() if not row.oracle} <= set(names)
    assert [name for name in names if "+" in name], "compositions too"
    assert not [name for name in names if systems.resolve(name.partition(":")[0]).oracle]


@pytest.mark.parametrize(("tier", "copies"), [("tier-early", True), ("tier-ahead", False)])
def test_a_tier_copies_what_it_stores_early_and_holds_nobody_up(tier: str, *, copies: bool) -> None:
    one = subject(f"fcfs:{tier}")
    for _ in range(8):
        one.block(5)
    assert (one._tier.copies.stored_blocks > 0) == copies
    assert one.mean_running == RUNNING
    assert one.preempted == 0
    one.drop()
    assert one.fallbacks == 0


def test_fastserve_is_measured_in_a_steady_state() -> None:
    one = subject("fastserve", waiting=20, memory_bound=True)
    for _ in range(20):
        one.block(5)
    assert (one.preempted, one.mean_running) == (0, RUNNING)
    assert len(one.times.policy) == 20


def test_gaps_are_crossed_without_a_tier_and_only_where_that_is_asked_for() -> None:
    one = subject("fcfs:gaps")
    for _ in range(8):
        one.block(5)
    assert one.scheduler.gaps is not None
    assert one._tier is None
    assert one.mean_running == RUNNING
    one.drop()
    assert subject("fcfs").scheduler.gaps is None


def test_an_unknown_tier_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script("step_overhead").parse(["--systems", "fcfs,fcfs:tier-soon"])
    known = "tier-early, tier-ahead, gaps"
    assert f"fcfs:tier-soon: what follows : must be one of {known}" in capsys.readouterr().err


def test_each_system_is_in_one_group_and_only_the_groups_of_long_queues_have_long_queues() -> None:
    overhead = script("step_overhead")
    args = overhead.parse([])
    groups = overhead.groups(args.systems, 3)
    assert sorted(name for group in groups for name in group) == sorted(args.systems)
    assert max(map(len, groups)) == 3
    for group in groups:
        longest = max(cell.waiting for cell in overhead.cells(group, args))
        assert longest == (100_000 if set(group) & set(overhead.LONG_QUEUES) else 10_000)
        assert [cell for cell in overhead.cells(group, args) if cell.memory_bound and cell.running == 256]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--systems", "oracle-alise"], "oracles are for offline benchmarks"),
        (["--systems", "nonsense"], "nonsense"),
        (["--running", "0"], "must be at least 1"),
        (["--waiting", "-1"], "must be 0 or more"),
    ],
)
def test_unusable_options_are_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        script("step_overhead").parse(argv)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["upstream", "fcfs", "alise", "accelgen", "past-future", "aggressive", "conservative"])
@pytest.mark.parametrize("memory_bound", [False, True], ids=["seats", "memory"])
def test_nobody_joins_or_leaves_while_steps_are_timed(name: str, memory_bound: bool) -> None:
    held = subject(name, memory_bound=memory_bound)
    before = {r.request_id: r.num_computed_tokens for r in held.scheduler.running}
    held.block(20)
    after = {r.request_id: r.num_computed_tokens for r in held.scheduler.running}
    assert len(before) == RUNNING
    assert after == {req_id: computed + 20 for req_id, computed in before.items()}
    assert held.preempted == 0
    seats = held.scheduler.max_num_running_reqs
    assert (seats > RUNNING) == memory_bound


def test_head_of_the_queue_never_fits_in_the_memory_bound_state_though_blocks_are_free() -> None:
    held = subject("upstream", memory_bound=True)
    free = []
    for _ in range(20):
        held.step()
        free.append(held.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
    assert min(free) > 0
    assert max(free) < script("step_overhead_subject").LONG_PROMPT_TOKENS // 16


@pytest.mark.parametrize("memory_bound", [False, True], ids=["seats", "memory"])
def test_past_future_forecasts_nothing_for_a_head_without_seat_or_blocks(
    memory_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = subject("past-future", memory_bound=memory_bound)
    original, made = past_future.Forecast, []

    def counted(*args: Any) -> Any:
        made.append(args)
        return original(*args)

    monkeypatch.setattr(past_future, "Forecast", counted)
    held.block(10 * past_future.PeakMemory().redraw_steps)
    assert made == []
    assert list(held.scheduler.planner.why.values()) == ["blocks" if memory_bound else "seats"]


def test_steps_without_a_token_count_to_the_step_after_them() -> None:
    held = subject("sarathi-chunked-only")  # leaves out the decodes of every other step
    before = sum(r.num_computed_tokens for r in held.scheduler.running)
    held.block(10)
    assert sum(r.num_computed_tokens for r in held.scheduler.running) == before + 10 * RUNNING


def test_measured_times_have_one_value_per_step_and_the_share_of_policies_where_there_are_some() -> None:
    overhead = script("step_overhead")
    found = overhead.measure(["fcfs", "past-future"], cell(memory_bound=True), 2, 3)
    assert list(found) == ["upstream", "fcfs", "past-future"]
    assert all(one.times.total().shape == (2, 3) for one in found.values())
    assert [len(found[name].times.policy) for name in found] == [0, 0, 2]
    assert not hasattr(found["fcfs"], "scheduler"), "a long queue holds gigabytes"


def judged(ratios: dict[str, float], *, share: float = 0.02) -> dict[str, Any]:
    """Goals of past-future for steps of 1000 us upstream and the given ratios by cell."""
    report, overhead = script("step_overhead_report"), script("step_overhead")
    points = {
        "0": overhead.Cell(running=256, waiting=0),
        "1000": overhead.Cell(running=256, waiting=1000),
        "memory": overhead.Cell(running=256, waiting=1000, memory_bound=True),
    }

    def facts(times: float) -> dict[str, float]:
        parts = {"step": 1000.0 * times, "schedule": 600.0 * times, "update": 400.0 * times}
        return {f"{part}_us": value for part, value in parts.items()}

    ours: dict[str, float] = {}
    base: dict[str, float] = {}
    for name, ratio in ratios.items():
        key = points[name].key
        ours |= {f"{key}_{part}": value for part, value in facts(ratio).items()}
        ours |= {f"{key}_ratio": ratio, f"{key}_preemptions": 0.0, f"{key}_mean_running_requests": 256.0}
        ours |= {f"{key}_policy_share_of_25ms_step": share}
        base |= {f"{key}_{part}": value for part, value in facts(1.0).items()}
    made = report.claims({"past-future": ours}, {"past-future": base}, points.values(), 256)
    return {goal.name: goal for goal in made}


def test_worst_state_is_judged_and_growth_from_an_empty_queue() -> None:
    made = judged({"0": 1.0, "1000": 1.05, "memory": 1.3})
    worst = made["past-future_worst_ratio_256_running"]
    assert (worst.value, worst.met) == (1.3, False)
    assert worst.note.startswith("worst with 1000 waiting, bound by memory: schedule +180 us, update +120 us")
    growth = made["past-future_growth_over_upstream_growth_256_running"]
    assert (growth.value, growth.met) == (1.05, True)


def test_share_of_past_future_in_a_model_step_is_judged() -> None:
    goal = judged({"0": 1.0, "memory": 1.1}, share=0.02)["past-future_policy_share_of_25ms_step_256_running"]
    assert (goal.value, goal.goal, goal.met) == (0.02, 0.01, False)
    assert "500 us" in goal.note


def test_the_time_of_policies_is_judged_with_few_running() -> None:
    report, overhead = script("step_overhead_report"), script("step_overhead")
    cells = [overhead.Cell(running=8, waiting=count) for count in (0, 1000)] + [overhead.Cell(running=256, waiting=0)]
    ours = {"256_running_0_waiting_ratio": 1.0, "256_running_0_waiting_policy_us": 500.0}
    ours |= {"8_running_0_waiting_policy_us": 20.0, "8_running_1000_waiting_policy_us": 110.0}
    for cell in cells:
        ours |= {f"{cell.key}_{part}": 1.0 for part in ("step_us", "schedule_us", "update_us", "preemptions")}
        ours[f"{cell.key}_mean_running_requests"] = float(cell.running)
    made = {goal.name: goal for goal in report.claims({"alise": ours}, {"alise": ours}, cells, 256)}
    goal = made["alise_worst_policy_us_8_running"]
    assert (goal.value, goal.goal, goal.met) == (110.0, 100.0, False)
    assert goal.note.startswith("worst with 1000 waiting")


def test_smallest_run_prints_a_table_and_one_line_of_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--systems", "past-future", "--running", "8", "--waiting", "0", "4", "--memory-waiting", "4"]
    script("step_overhead").main([*options, "--blocks", "2", "--out", str(out)])
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert result["metrics"]["past-future_8_running_4_waiting_memory_bound_policy_us"] > 0
    upstream = result["baselines"]["upstream"]
    assert set(upstream) <= set(result["metrics"]), (
        "upstream's values are found under the names of the system beside it"
    )
    assert "% of 25 ms" in printed.err
