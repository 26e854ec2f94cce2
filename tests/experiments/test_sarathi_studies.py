"""What Sarathi-Serve's reproductions are made of: hardware, systems, the search for capacity, claims."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    assert base.MISTRAL.slo_ms("strict-5x") == pytest.approx(100, rel=0.02)
    assert base.FALCON.slo_ms("relaxed-25x") == pytest.approx(5 * base.FALCON.slo_ms("strict-5x"), rel=0.01)


def capacity_of(rate: float) -> Sustained:
    return Sustained(rate_per_s=rate, crossing_per_s=rate, limited_by=(capacity.TBT,), trials=())


def measured() -> dict[tuple[capacity.Cell, str], Sustained]:
    own = {capacity.PAPERS: 6.0, capacity.SARATHI: 7.0}
    budgets = {f"{capacity.TUNED} (512)": 2.5, f"{capacity.TUNED} (1024)": 5.0}
    rates = {"strict": {**own, capacity.VLLM_2023: 2.0, **budgets}, "relaxed": {**own, capacity.VLLM_2023: 4.0}}
    return {
        (capacity.Cell("yi-34b", DATASET, slo), name): capacity_of(rate)
        for slo, of_slo in rates.items()
        for name, rate in of_slo.items()
    }


@pytest.mark.parametrize(
    ("wanted", "ratio"), [({}, 3.0), ({"lowest": True}, 1.5), ({"dataset": DATASET, "slos": ("relaxed",)}, 1.5)]
)
def test_claim_compares_the_cells_that_the_paper_speaks_of(wanted: dict[str, Any], ratio: float) -> None:
    published = capacity.Published(paper=2.0, model="yi-34b", over=capacity.VLLM_2023, headline=True, **wanted)
    claim, _ = capacity.claims(published, measured())
    assert claim.value == ratio
    assert claim.headline
    assert "sarathi-published 6/s, limited by P99 TBT; vllm-2023" in claim.note


def test_tuned_vllm_has_the_better_of_its_budgets() -> None:
    strict = capacity.Cell("yi-34b", DATASET, "strict")
    names = (capacity.TUNED, capacity.VLLM_2023, capacity.ORACLE)
    rates = [capacity.rate(measured(), strict, name) for name in names]
    assert rates[:2] == [5.0, 2.0]
    assert math.isnan(rates[2])
