"""What Sarathi-Serve's reproductions are made of: hardware, systems, the search for capacity, claims."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.experiments.experiment import Variant
from vllm_ext.experiments.papers import sarathi as base
from vllm_ext.experiments.papers import sarathi_capacity as capacity
from vllm_ext.experiments.runner import RunFailed, Runner, Sustained
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.pools import InProcessPool
from vllm_ext.simulation.sweep.store import PointStore

DATASET = "openchat_sharegpt4"


def sustained(folder: Path, slo_ms: float, *, queue_at_per_s: float = 100.0, fallbacks: float = 0.0) -> Sustained:
    """Search where gaps grow with the rate by 100 ms per request/s, and a queue forms at a rate of its own."""

    def evaluate(spec: SimulationSpec) -> Mapping[str, float]:
        rate = spec.workload.rate_per_s or 0.0
        delay = 100.0 if rate > queue_at_per_s else 0.0
        return {capacity.TBT: 100 * rate, capacity.DELAY: delay, "policy_fallbacks": fallbacks}

    with PointStore(folder) as store:
        runner = Runner(quick=True, seed=0, pool=InProcessPool(evaluate), store=store)
        limits = {capacity.TBT: slo_ms, capacity.DELAY: capacity.DELAY_LIMIT_S}
        return runner.sustained({"orca": one}, limits, start_per_s=lambda _: 1.0, tolerance=0.01)["orca"]


def one(rate_per_s: float, panel: base.Panel = base.MISTRAL) -> SimulationSpec:
    return base.spec(Variant(name="x", system="fcfs"), panel, DATASET, rate_per_s, requests=8, seed=0)


@pytest.mark.parametrize(("queue_at", "limited_by"), [(100.0, "tbt_p99_ms"), (3.0, "scheduling_delay_p50_s")])
def test_capacity_is_the_highest_rate_that_meets_both_limits(queue_at: float, limited_by: str, tmp_path: Path) -> None:
    found = sustained(tmp_path, 500.0, queue_at_per_s=queue_at)
    limit = min(5.0, queue_at)
    assert limit / 1.01 <= found.rate_per_s <= limit
    assert found.limited_by == (limited_by,)
    assert dict(found.trials)[found.rate_per_s]["tbt_p99_ms"] == pytest.approx(100 * found.rate_per_s)


def test_limits_that_are_never_met_name_the_system(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"orca: tbt_p99_ms<=500 and scheduling_delay_p50_s<=2 is never met"):
        sustained(tmp_path, 500.0, queue_at_per_s=0.0)


def test_run_in_which_a_policy_failed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"orca at 1 requests/s: its policies failed 7 times"):
        sustained(tmp_path, 500.0, fallbacks=7)


def test_pipeline_stage_sees_half_the_requests_and_the_memory_of_half_the_layers() -> None:
    whole, panel = base.MISTRAL, base.FALCON
    assert whole.hardware.kv_memory_bytes is None
    assert one(3.0).workload.rate_per_s == 3.0
    assert one(3.0, panel).workload.rate_per_s == 1.5
    hardware = panel.hardware
    assert hardware.tensor_parallel == 4
    weights = hardware.resolve().model.weight_bytes(8)
    usable = 0.9 * hardware.resolve().device.memory_bytes
    assert 0 < usable - weights - hardware.kv_memory_bytes < 2 << 30  # what is left out are activations


def test_seats_and_budgets_are_those_of_the_published_experiments() -> None:
    by_name = {c.name: c for c in capacity.variants(base.LLAMA, DATASET, "relaxed")}
    assert by_name["orca"].engine["max_num_seqs"] == 4  # 8 over two micro-batches
    assert by_name["vllm-2023"].engine["max_num_batched_tokens"] == 8192
    assert by_name["sarathi-published"].options["budget"] == {"tokens": 1536}
    assert by_name["sarathi"].options == {"slo": {"tbt_ms": 5000}}
    assert by_name["vLLM 0.32"].engine == {"max_num_seqs": 128}  # 256 over two


def test_objectives_by_the_papers_rule_are_near_its_table_for_mistral() -> None:
    assert base.MISTRAL.slo_ms("strict") == 100
    assert base.MISTRAL.slo_ms("strict-5x") == pytest.approx(100, rel=0.1)
    assert base.FALCON.slo_ms("relaxed-25x") == pytest.approx(5 * base.FALCON.slo_ms("strict-5x"), rel=0.01)


def capacity_of(rate: float) -> Sustained:
    return Sustained(rate_per_s=rate, crossing_per_s=rate, limited_by=(capacity.TBT,), trials=())


def measured() -> dict[tuple[capacity.Cell, str], Sustained]:
    own = {capacity.PAPERS: 6.0, capacity.SARATHI: 7.0}
    budgets = {f"{capacity.TUNED} (512)": 2.5, f"{capacity.TUNED} (1024)": 5.0}
    baselines = {"strict-5x": 2.0, "relaxed-25x": 4.0, "strict": 0.1}  # the last by Table 3, which no claim is of
    return {
        (capacity.Cell("yi-34b", DATASET, slo), name): capacity_of(rate)
        for slo, vllm in baselines.items()
        for name, rate in {**own, capacity.VLLM_2023: vllm, **budgets}.items()
    }


@pytest.mark.parametrize(
    ("wanted", "ratio", "ours"),
    [
        ({}, 3.0, 3.5),
        ({"kind": "tendency"}, 1.5, 1.75),
        ({"kind": "value", "dataset": DATASET, "strict": False}, 1.5, 1.75),
    ],
)
def test_claim_compares_the_cells_that_the_paper_speaks_of(wanted: dict[str, Any], ratio: float, ours: float) -> None:
    published = capacity.Published(paper=2.0, model="yi-34b", over=capacity.VLLM_2023, headline=True, **wanted)
    (claim,) = capacity.claims(published, measured())
    assert (claim.value, claim.ours, claim.tuned) == (ratio, ours, 7 / 5)
    assert claim.headline
    assert "sarathi-published 6/s, limited by P99 TBT; vllm-2023" in claim.facts


@pytest.mark.parametrize(("limited_by", "known"), [((capacity.DELAY,), True), ((capacity.TBT,), False)])
def test_queueing_is_the_reason_only_where_it_is_the_limit(limited_by: tuple[str, ...], known: bool) -> None:
    found = {
        key: replace(one, limited_by=limited_by) if key[1] == capacity.PAPERS else one
        for key, one in measured().items()
    }
    published = capacity.Published(paper=9.0, model="yi-34b", over=capacity.VLLM_2023)
    (claim,) = capacity.claims(published, found)
    assert claim.verdict == "below"
    assert (claim.reason is not None) is known


def test_pipelines_are_not_compared() -> None:
    published = capacity.Published(model="yi-34b", over=capacity.VLLM_2023, paper=3.0, reasons=capacity.NO_PIPELINE)
    (claim,) = capacity.claims(published, measured())
    assert claim.verdict == "not comparable"


def test_table_4_sets_either_technique_alone_over_both_and_ours_and_tuned_vllm_beside() -> None:
    taken = {base.HYBRID: (0.8, 1.0), base.CHUNKED: (1.2, 0.3), base.COMBINED: (1.0, 0.2), base.DYNAMIC: (0.5, 0.25),
             base.TUNED: (1.0, 0.5)}  # fmt: skip
    shown = {(base.CHATS, name): {base.TTFT: ttft, base.TBT: tbt} for name, (ttft, tbt) in taken.items()}
    stall, _, _, _, absolute = base._table4_claims(base.CHATS, shown)
    assert (stall.value, stall.ours, stall.tuned) == (5.0, 4.0, 2.0)
    assert (stall.verdict, stall.headline) == ("above", True)
    assert (absolute.value, absolute.ours, absolute.tuned, absolute.verdict) == (0.2, 0.25, 0.5, "above")


def test_tuned_vllm_has_the_better_of_its_budgets() -> None:
    strict = capacity.Cell("yi-34b", DATASET, "strict-5x")
    names = (capacity.TUNED, capacity.VLLM_2023, capacity.ORACLE)
    rates = [capacity.rate(measured(), strict, name) for name in names]
    assert rates[:2] == [5.0, 2.0]
    assert math.isnan(rates[2])
