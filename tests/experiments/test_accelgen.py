"""What AccelGen's reproductions share: the settings of the paper, and the measures over a window."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from vllm_ext.experiments.experiment import Findings
from vllm_ext.experiments.papers import accelgen as base
from vllm_ext.experiments.papers import accelgen_figures as figures
from vllm_ext.experiments.papers import accelgen_window as measure
from vllm_ext.simulation.measure.run_data import RequestRow, RequestTable, RunData
from vllm_ext.simulation.run import simulate
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
    assert base.utilisation(base.OPT_13B, load, 0)["memory"] < 0.5
    found = {c.name: simulate(base.spec(c, base.OPT_13B, load, 0)).counters["preemptions"]
             for c in (base.ACCELGEN, base.READINGS[2])}  # fmt: skip
    assert found[base.ACCELGEN.name] == 0
    assert found["both"] > 0


def test_pivot_budget_is_that_of_the_hardware_and_the_tuned_step_keeps_the_tightest_objective() -> None:
    for panel in base.PANELS:
        (sarathi,) = (c for c in base.baselines(panel) if c.name == "Sarathi-Serve")
        assert sarathi.options == {"budget": {"tokens": panel.pivot_tokens}}
        step_s = panel.tightest_tokens * base.prompt_s(panel.cost, panel.pivot_tokens) / panel.pivot_tokens
        assert step_s <= base.TIGHTEST_TBT_S


def made_table(*rows: tuple[list[float], str]) -> RequestTable:
    """Requests of tier ``t`` that arrive at 0 s with a TTFT of 1 s and a TBT of 0.2 s, by their tokens' times."""
    table = RequestTable()
    for times, reason in rows:
        gaps = np.diff(times)
        row = RequestRow(
            tier="t", finish_reason=reason, output_tokens=len(times), prompt_tokens=1, arrival_s=0.0,
            first_token_s=times[0] if times else np.nan, finish_s=times[-1] if times else 10.0,
            max_gap_s=gaps.max() if len(gaps) else np.nan, slo_ttft_s=1.0, slo_tbt_s=0.2,
        )  # fmt: skip
        table.append(row, array("d", times))
    return table


def test_measures_of_four_requests_worked_by_hand() -> None:
    run = RunData(
        label="x",
        requests=made_table(
            ([0.5, 0.6, 0.7], "stop"),  # all in time
            ([0.5, 0.9, 1.0], "stop"),  # one gap too long, but done before 1 + 2 * 0.2
            ([3.0, 3.1], "stop"),  # first token late
            ([], "abort"),  # nobody came
        ),
        gaps=None,  # type: ignore[arg-type]  # not looked at
        series=None,  # type: ignore[arg-type]
        counters={"steps": 4.0, "prefill_tokens": 4.0, "decode_tokens": 4.0, "device_busy_s": 5.0,
                  "mean_kv_used_fraction": 0.25, "preemptions": 0.0},
        duration_s=10.0,
    )  # fmt: skip
    found = measure.measured_of(run)
    assert found["attainment_fraction"] == pytest.approx(6 / 8)
    assert found["goodput_tokens_per_s"] == pytest.approx(0.6)
    assert found["request_attainment_fraction"] == pytest.approx(1 / 4)
    assert found["deadline_attainment_fraction"] == pytest.approx(2 / 4)
    assert found["ttft_attainment_fraction"] == pytest.approx(2 / 4)
    assert found["tbt_attainment_fraction"] == pytest.approx(2 / 3)
    assert found["requests_per_s"] == pytest.approx(0.3)
    assert found["jct_mean_s"] == pytest.approx((0.7 + 1.0 + 3.1) / 3)
    assert found["tokens_per_step"] == pytest.approx(2.0)
    assert found["unallocated_kv_fraction"] == pytest.approx(0.75)


def test_everybody_who_arrived_has_a_row_and_the_window_ends_on_time() -> None:
    load = base.Load(arrivals_s=4.0, drain_s=1.0)
    arrived = len(list(build(base.workload_spec(base.OPT_13B, load, 0)).start()))
    for variant in (base.UPSTREAM, base.ACCELGEN):
        found = measure.observe(base.spec(variant, base.OPT_13B, load, 0))
        assert found["arrived_requests"] == arrived
        assert found["output_tokens_per_s"] > 0
        assert found["goodput_tokens_per_s"] <= found["output_tokens_per_s"]
        assert found["jct_to_window_end_mean_s"] <= load.window_s + 1.0


def test_a_figure_is_a_table_with_our_row_as_metrics_and_others_as_baselines() -> None:
    columns = (next(iter(figures.LABELS)),)
    found = {("OPT-13B", name): {columns[0]: value} for name, value in ((base.ACCELGEN.name, 3.0), ("Orca", 1.0))}
    made = Findings(**figures.table(found, columns), claims=[], workload=[])
    assert made.tables[0].rows == [("OPT-13B", base.ACCELGEN.name, 3.0), ("OPT-13B", "Orca", 1.0)]
    assert (made.metrics, made.baselines) == ({f"OPT-13B.{columns[0]}": 3.0}, {"Orca": {f"OPT-13B.{columns[0]}": 1.0}})
