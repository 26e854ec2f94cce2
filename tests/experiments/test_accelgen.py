"""What AccelGen's reproductions share: the settings of the paper, its systems, and how their figures are judged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vllm_ext.experiments.papers import accelgen as base
from vllm_ext.experiments.papers import accelgen_figures as figures
from vllm_ext.simulation.run import simulate
from vllm_ext.simulation.sweep.pools import simulate_point
from vllm_ext.simulation.workloads.build import build


def test_prompts_are_cut_to_what_the_kv_memory_holds() -> None:
    # 12 GB / (2 * 40 layers * 5120 * 2 bytes) = 14,648 tokens: 457 blocks of 32, of which vLLM keeps one.
    assert base.OPT_13B.context_tokens == 456 * 32
    assert base.LLAMA_70B.context_tokens == base.LONGEST_TOKENS < base.LLAMA_70B.kv_tokens
    load = base.Load(arrivals_s=60.0, drain_s=1.0)
    requests = list(build(base.workload_spec(base.OPT_13B, load, 0)).start())
    assert max(r.prompt_tokens + r.output_tokens for r in requests) <= base.OPT_13B.context_tokens
    assert max(r.output_tokens for r in requests) <= base.MAX_OUTPUT_TOKENS


def test_objectives_are_drawn_as_in_the_paper() -> None:
    load = base.Load(arrivals_s=120.0, drain_s=1.0)
    requests = list(build(base.workload_spec(base.OPT_13B, load, 0)).start())
    tbt = np.array([r.slo.tbt_s for r in requests])
    assert tbt.min() >= 0.75 * 0.1875
    assert tbt.max() <= 1.25 * 0.1875
    buckets = base.ttft_buckets(base.OPT_13B)
    scale = np.array([r.slo.ttft_s / buckets[(r.prompt_tokens - 1) // 512] for r in requests])
    assert (scale.min() >= 0.5, scale.max() <= 1.5) == (True, True)
    assert scale.mean() == pytest.approx(1.0, abs=0.05)
    assert np.mean([r.tier == base.BOOKS for r in requests]) == pytest.approx(0.35, abs=0.05)
    assert all(r.extra_args and "osl" not in r.extra_args for r in requests)


def test_load_of_the_paper_exceeds_the_memory_of_the_small_models_and_the_compute_of_the_large() -> None:
    load = base.Load(arrivals_s=60.0, drain_s=1.0)
    assert base.utilisation(base.OPT_13B, load, 0)["memory"] > 5
    assert base.utilisation(base.LLAMA_70B, load, 0)["compute"] > 2
    mild = replace(load, rate_per_s=0.25)
    assert base.utilisation(base.OPT_13B, mild, 0)["memory"] < 1


def test_nobody_is_preempted_where_the_memory_is_less_than_half_full() -> None:
    """Two readings of the paper were, and delivered less than any baseline."""
    load = base.Load(arrivals_s=180.0, drain_s=60.0, rate_per_s=0.25)
    assert base.utilisation(base.OPT_13B, load, 1)["memory"] < 0.5
    found = {c.name: simulate(base.spec(c, base.OPT_13B, load, 1)).counters["preemptions"]
             for c in (base.ACCELGEN, base.READINGS[2])}  # fmt: skip
    assert found[base.ACCELGEN.name] == 0
    assert found["both"] > 0


def test_pivot_budget_is_that_of_the_hardware_and_the_tuned_step_keeps_the_tightest_objective() -> None:
    for panel in base.PANELS:
        (sarathi,) = (c for c in base.baselines(panel) if c.name == "Sarathi-Serve")
        assert sarathi.options == {"budget": {"tokens": panel.pivot_tokens}}
        step_s = panel.tightest_tokens * base.prompt_s(panel.cost, panel.pivot_tokens) / panel.pivot_tokens
        assert step_s <= base.TIGHTEST_TBT_S


def test_a_window_counts_everybody_who_arrived_and_ends_on_time() -> None:
    load = base.Load(arrivals_s=4.0, drain_s=1.0)
    arrived = len(list(build(base.workload_spec(base.OPT_13B, load, 0)).start()))
    for variant in (base.UPSTREAM, base.ACCELGEN):
        found = simulate_point(base.spec(variant, base.OPT_13B, load, 0))
        assert found["requests"] + found["aborted_requests"] + found["unfinished_requests"] == arrived
        assert found[figures.TOKENS] > found[figures.GOODPUT] > 0
        assert found["jct_to_end_mean_s"] <= load.window_s + 1.0


def test_shortest_prompts_go_first_and_are_not_preempted_for() -> None:
    """It is `alise` without all that tells its requests apart but their prompts; near lengths go by arrival."""
    load = base.Load(arrivals_s=20.0, drain_s=10.0)
    variant = base.shortest_prompt_first(base.OPT_13B)
    run = simulate(base.spec(variant, base.OPT_13B, load, 0))
    assert not run.counters["policy_fallbacks"]
    waiting = [
        (row["prompt_tokens"], row["arrival_s"], row["first_scheduled_s"])
        for table in (run.requests, run.unserved)
        for row in table.rows()
    ]
    passed = [
        (one, other)
        for one in waiting
        for other in waiting
        # Both wait when the longer one starts, and the shorter one did not come while the step was under way.
        if 1.1 * one[0] + 32 < other[0] and one[1] < other[2] - 1.0 and not one[2] <= other[2]
    ]
    assert len(waiting) > 100
    assert not passed


def windows(**goodput: float) -> dict[tuple[str, float, str], dict[str, float]]:
    names = [c.name for c in base.baselines(base.OPT_13B)]
    found = {**dict.fromkeys(names, 100.0), base.tuned(base.OPT_13B).name: 200.0}
    found |= {base.ACCELGEN.name: 150.0, base.OURS.name: 300.0, base.RELEGATED.name: 145.0} | goodput
    return {("OPT-13B", 8.0, name): {figures.GOODPUT: value, "requests": 1.0} for name, value in found.items()}


def test_a_range_of_the_paper_is_its_least_and_its_largest_figure_beside_ours_and_tuned_vllm() -> None:
    found = windows(Orca=10.0)
    least, largest = figures._ranged(figures.RANGES[0], found, {})
    assert (least.value, least.ours, least.tuned, least.verdict) == (1.5, 3.0, 1.5, "matched")
    assert (largest.value, largest.ours, largest.tuned, largest.verdict) == (15.0, 30.0, 1.5, "matched")
    assert "Orca" in largest.facts


def test_our_order_is_the_reason_only_where_it_has_the_papers_factor() -> None:
    least, largest = figures._ranged(figures.RANGES[0], windows(AccelGen=50.0), {})
    assert (least.verdict, least.reason) == ("below", figures.LOST_FIRST["below"])
    assert (largest.verdict, largest.reason) == ("below", figures.NO_ORDER["below"])


def test_a_baseline_that_finished_nothing_is_not_compared() -> None:
    found = windows(Orca=1.0)
    found["OPT-13B", 8.0, "Orca"]["requests"] = 0.0
    _, largest = figures._ranged(figures.RANGES[0], found, {})
    assert largest.value == 1.5


def test_who_decides_alike_is_not_compared() -> None:
    metrics = {figures.TOKENS: 5.0, figures.GOODPUT: 4.0}
    claims = [*figures._beside_oracle({("OPT-13B", 8.0, c.name): metrics for c in (base.ACCELGEN, base.ORACLE)})]
    assert [(claim.value, claim.verdict) for claim in claims] == [(1.0, "not comparable")] * 2
    assert [claim.goal for claim in claims] == [0.88, pytest.approx(0.943, abs=1e-3)]


def test_what_aging_costs_is_told_beside_the_wait_and_what_it_cost_before() -> None:
    rows = {base.OURS: (90.0, 150.0), base.OURS_UNAGED: (100.0, 100.0), base.OURS_OLDEST_FIRST: (80.0, 200.0)}
    found = {("OPT-13B", 8.0, c.name): {figures.TOKENS: tokens, figures.WAIT: wait}
             for c, (tokens, wait) in rows.items()}  # fmt: skip
    tokens, wait = figures._aging(found, "")
    assert (tokens.value, wait.value) == (0.9, 50.0)
    assert tokens.facts == "OPT-13B at 8/s 0.9, oldest first / never aged 0.8"
    assert not wait.met
    del found["OPT-13B", 8.0, base.OURS_OLDEST_FIRST.name]
    assert [claim.value for claim in figures._aging(found, "")] == [0.9, 50.0]


def test_a_system_that_finished_nothing_has_no_wait() -> None:
    columns, found = (figures.TOKENS, figures.WAIT), {("OPT-13B", "Orca"): {figures.TOKENS: 3.0}}
    assert figures.table(found, ("m", "s"), columns).rows == [("OPT-13B", "Orca", 3.0, None)]
    assert figures.values(found, "{}.".format, columns)["baselines"] == {"Orca": {f"OPT-13B.{figures.TOKENS}": 3.0}}


def test_fewer_steps_in_the_same_time_are_longer_ones() -> None:
    assert figures.fewer(figures.STEPS)({figures.STEPS: 30.0}, {figures.STEPS: 20.0}) == 0.5


def test_a_figure_is_a_table_with_our_row_as_metrics_and_others_as_baselines() -> None:
    columns = (next(iter(figures.LABELS)),)
    found = {("OPT-13B", name): {columns[0]: value} for name, value in ((base.ACCELGEN.name, 3.0), ("Orca", 1.0))}
    assert figures.table(found, ("m", "s"), columns).rows == [
        ("OPT-13B", base.ACCELGEN.name, 3.0),
        ("OPT-13B", "Orca", 1.0),
    ]
    assert figures.values(found, "{}.".format, columns) == {
        "metrics": {f"OPT-13B.{columns[0]}": 3.0},
        "baselines": {"Orca": {f"OPT-13B.{columns[0]}": 1.0}},
    }
