"""What Sarathi-Serve's reproductions are made of: hardware, systems, the search for capacity, claims."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from vllm_ext.repro import catalogue
from vllm_ext.repro.bench import RunFailed
from vllm_ext.repro.studies import sarathi as base
from vllm_ext.repro.studies import sarathi_capacity as capacity
from vllm_ext.simulation.spec import SimulationSpec

DATASET = "openchat_sharegpt4"


class FakeBench:
    """Gaps grow with the rate by 100 ms per request/s; a queue forms at its own rate."""

    def __init__(self, queue_at_per_s: float, fallbacks: float = 0.0) -> None:
        self.queue_at_per_s = queue_at_per_s
        self.fallbacks = fallbacks
        self.rounds = 0

    def metrics(self, specs: Mapping[Any, SimulationSpec]) -> dict[Any, dict[str, float]]:
        self.rounds += 1
        return {key: self._measure(spec.workload.rate_per_s or 0.0) for key, spec in specs.items()}

    def _measure(self, rate: float) -> dict[str, float]:
        delay = 100.0 if rate > self.queue_at_per_s else 0.0
        return {"tbt_p99_ms": 100 * rate, "scheduling_delay_p50_s": delay, "policy_fallbacks": self.fallbacks}


def one(rate_per_s: float) -> SimulationSpec:
    made: SimulationSpec = base.spec(
        base.Contender(name="x", system="fcfs"), base.MISTRAL, DATASET, rate_per_s, requests=8, seed=0
    )
    return made


def search(bench: FakeBench, slo_ms: Mapping[str, float]) -> Any:
    make = dict.fromkeys(slo_ms, one)
    return capacity.capacities(bench, make, slo_ms, dict.fromkeys(slo_ms, 1.0), tolerance=0.01)


def test_all_three_studies_are_listed_with_their_figures() -> None:
    found = catalogue.studies()
    papers = {name: found[name].paper for name in ("sarathi-fig9", "sarathi-fig10", "sarathi-table4")}
    assert [paper.split(", ")[1] for paper in papers.values()] == ["Figure 9", "Figure 10", "Table 4"]


@pytest.mark.parametrize(("queue_at", "limited_by"), [(100.0, "tbt_p99_ms"), (3.0, "scheduling_delay_p50_s")])
def test_capacity_is_the_highest_rate_that_meets_both_limits(queue_at: float, limited_by: str) -> None:
    found = search(FakeBench(queue_at), {"x": 500.0})["x"]
    limit = min(5.0, queue_at)
    assert limit / 1.01 <= found.rate_per_s <= limit
    assert found.limited_by == (limited_by,)
    assert math.isclose(found.metrics["tbt_p99_ms"], 100 * found.rate_per_s)


def test_searches_take_their_steps_together() -> None:
    alone, both = FakeBench(100.0), FakeBench(100.0)
    expected = search(alone, {"strict": 100.0})["strict"]
    found = search(both, {"strict": 100.0, "relaxed": 110.0})
    assert found["strict"] == expected
    assert both.rounds <= alone.rounds + 1


def test_limits_that_are_never_met_name_the_system() -> None:
    with pytest.raises(RunFailed, match=r"orca: the limits are never met"):
        search(FakeBench(0.0), {"orca": 500.0})


def test_run_in_which_a_policy_failed_is_refused() -> None:
    with pytest.raises(RunFailed, match=r"orca: a policy failed in 7 steps"):
        search(FakeBench(100.0, fallbacks=7), {"orca": 500.0})


def test_pipeline_stage_sees_half_the_requests_and_the_memory_of_half_the_layers() -> None:
    whole, panel = base.MISTRAL, base.FALCON
    assert whole.hardware.kv_memory_bytes is None
    assert one(3.0).workload.rate_per_s == 3.0
    staged = base.spec(base.Contender(name="x", system="fcfs"), panel, DATASET, 3.0, requests=8, seed=0)
    assert staged.workload.rate_per_s == 1.5
    hardware = panel.hardware
    assert hardware.tensor_parallel == 4
    weights = hardware.resolve_model().weight_bytes(8)
    usable = 0.9 * hardware.resolve_device().memory_bytes
    assert 0 < usable - weights - hardware.kv_memory_bytes < 2 << 30  # what is left out are activations


def test_seats_and_budgets_are_those_of_the_published_experiments() -> None:
    by_name = {c.name: c for c in base.contenders(base.LLAMA, DATASET, "relaxed")}
    assert by_name["orca"].engine["max_num_seqs"] == 4  # 8 over two micro-batches
    assert by_name["vllm-2023"].engine["max_num_batched_tokens"] == 8192
    assert by_name["sarathi-published"].options["budget"] == {"tokens": 1536}
    assert by_name["sarathi"].options == {"slo": {"tbt_ms": 5000}}
    assert by_name["vLLM 0.32"].engine == {"max_num_seqs": 128}  # 256 over two


def test_objectives_by_the_papers_rule_are_near_its_table_for_mistral() -> None:
    assert base.MISTRAL.slo_ms("strict") == 100
    assert base.MISTRAL.slo_ms("strict-5x") == pytest.approx(100, rel=0.02)
    assert base.FALCON.slo_ms("relaxed-25x") == pytest.approx(5 * base.FALCON.slo_ms("strict-5x"), rel=0.01)


def figure() -> Any:
    rates = {"strict": {base.PAPERS: 6.0, base.VLLM_2023: 2.0}, "relaxed": {base.PAPERS: 6.0, base.VLLM_2023: 4.0}}
    cells = [capacity.Cell("yi-34b", DATASET, slo) for slo in rates]
    found = {
        (cell, name): capacity.Found(rate_per_s=rate, metrics={}, limited_by=("tbt_p99_ms",))
        for cell in cells
        for name, rate in rates[cell.slo].items()
    }
    for budget, rate in ((512, 2.5), (1024, 5.0)):
        found[cells[0], f"{base.TUNED} ({budget})"] = capacity.Found(rate_per_s=rate, metrics={}, limited_by=())
    return capacity.Figure(found=found, cells=cells)


@pytest.mark.parametrize(
    ("wanted", "ratio"), [({}, 3.0), ({"lowest": True}, 1.5), ({"dataset": DATASET, "slos": ("relaxed",)}, 1.5)]
)
def test_claim_compares_the_cells_that_the_paper_speaks_of(wanted: dict[str, Any], ratio: float) -> None:
    published = capacity.Published(paper=2.0, model="yi-34b", over=base.VLLM_2023, headline=True, **wanted)
    claim = figure().claim(published, base.PAPERS)
    assert claim.ours == ratio
    assert claim.headline
    assert "sarathi-published 6/s, limited by P99 TBT; vllm-2023" in claim.note


def test_tuned_vllm_has_the_better_of_its_budgets() -> None:
    made = figure()
    assert made.rate(made.cells[0], base.TUNED) == 5.0
    assert made.rate(made.cells[0], base.VLLM_2023) == 2.0
    assert math.isnan(made.rate(made.cells[0], base.ORACLE))
