"""Figures of single steps."""

from __future__ import annotations

import pytest

from tests.experiments.test_findings import MadeUp
from vllm_ext.experiments import catalogue
from vllm_ext.experiments.papers import alise_costs, pensieve_costs, sarathi_chunks, sarathi_costs
from vllm_ext.experiments.steps import findings, roofline
from vllm_ext.report.claim import PaperClaim
from vllm_ext.simulation.cost.step_shape import StepShape


def test_every_cell_is_a_metric_and_columns_are_drawn_over_the_rows() -> None:
    made = findings("batch", {1: {"a, ms": 2.0, "b": 3.0}, 8: {"a, ms": 4.0, "b": 5.0}}, [], lines=["b"], ylabel="b")
    assert made.metrics == {"batch 1: a, ms": 2.0, "batch 1: b": 3.0, "batch 8: a, ms": 4.0, "batch 8: b": 5.0}
    (table,) = made.tables
    assert (table.header, table.rows) == (("batch", "a, ms", "b"), [("1", 2.0, 3.0), ("8", 4.0, 5.0)])
    assert len(made.plots) == 1
    other = findings("batch", {1: {"a, ms": 2.0}}, [])
    assert not other.plots
    assert [one.rows for one in (*made.workload, *other.workload)] == [2, 1]  # type: ignore[union-attr]
    assert made.workload[0].sha256 != other.workload[0].sha256  # type: ignore[union-attr]


def test_a_tile_begins_with_the_257th_token() -> None:
    made = sarathi_costs.fig7(MadeUp())
    told = {name: made.metrics[f"tokens {name}: TP-4, ms"] for name in (256, 257, 384)}
    assert told[256] < told[257] == told[384]
    longer = next(claim for claim in made.claims if claim.name.startswith("a chunk of 257"))
    untiled = roofline("mistral-7b", tile_tokens=1)
    assert (
        longer.value > 0.2 > untiled.device_s(StepShape.of_chunk(257)) / untiled.device_s(StepShape.of_chunk(256)) - 1
    )


def test_a_chunk_fills_the_budget_beside_the_decodes() -> None:
    cost, decodes = roofline("mistral-7b"), StepShape.of_decodes(8, 1024)
    joined = StepShape(9, 256, 8, 9, 8 * 1024, 8192, 248 * (7944 + 124.5))
    made = sarathi_chunks.fig8(MadeUp()).metrics
    assert made["step mistral-7b, 8, 1024: chunk"] == pytest.approx(cost.device_s(joined) / cost.device_s(decodes))
    whole = StepShape(9, 4096 + 8, 8, 9, 8 * 1024, 4096, 4096 * 2048.5)
    assert made["step mistral-7b, 8, 1024: prompt of 4096"] == pytest.approx(
        cost.device_s(whole) / cost.device_s(decodes)
    )


def test_chunks_of_a_prompt_are_all_its_tokens_and_pairs() -> None:
    made = sarathi_chunks.fig11(MadeUp()).metrics
    cost = roofline("yi-34b", tensor_parallel=2)
    assert made["prompt, chunk 4096, 512: linear"] == pytest.approx(8 * cost.linear_s(512) / cost.linear_s(4096))
    chunks = [StepShape(1, 2048, 0, last, 0, held + 2048, 2048 * (held + 1024.5)) for held, last in ((0, 0), (2048, 1))]
    whole = StepShape(1, 4096, 0, 1, 0, 4096, 4096 * 2048.5)
    assert sum(one.prefill_pairs for one in chunks) == whole.prefill_pairs
    assert made["prompt, chunk 4096, 2048: all"] == pytest.approx(
        sum(map(cost.device_s, chunks)) / cost.device_s(whole)
    )


def test_history_is_the_first_whose_computation_outgrows_the_generation() -> None:
    cost = roofline("opt-13b")
    first = pensieve_costs.fig3(MadeUp()).claims[0]
    assert first.name.startswith("opt-13b")

    def outgrows(history: int) -> bool:
        prefill = StepShape.of_rows([(history + 32, 0)] * 32)
        decodes = [StepShape(32, 32, 32, 32, 32 * (history + 32 + at), 0, 0.0) for at in range(1, 201)]
        return cost.device_s(prefill) > sum(map(cost.device_s, decodes))

    assert outgrows(int(first.value))
    assert not outgrows(int(first.value) - 32)


class Lines:
    """Prefill costs a millisecond a token, each token that follows two and a microsecond per token before it."""

    def device_s(self, shape: StepShape) -> float:
        return 1e-3 * shape.num_prefill_tokens + 2e-3 * shape.num_decodes + 1e-6 * shape.decode_context_tokens

    def host_s(self, shape: StepShape) -> float:
        return 0.0


def test_equations_fit_what_obeys_them() -> None:
    prefills = {s: [StepShape.of_chunk(s)] for s in (64, 1024)}
    exact = alise_costs.errors(Lines(), prefills, [[s] for s in prefills])
    assert [cells["error"] for cells in exact.values()] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert exact["s = 64"]["ms"] == pytest.approx(64.0)
    constant = alise_costs.errors(Lines(), prefills, [[1.0] for _ in prefills])
    assert constant["s = 64"]["error"] == pytest.approx((64 + 1024) / 2 / 64 - 1)
    assert max(cells["error, ours"] for cells in constant.values()) < 0.05


@pytest.mark.parametrize("name", ["alise-fig2", "sarathi-fig1"])
def test_a_full_run_has_ours_and_todays_vllm_beside_the_papers_systems(name: str) -> None:
    runner = MadeUp()
    runner.quick = False
    ratios = [one for one in catalogue.experiments()[name].run(runner).claims if " / " in one.name]
    assert ratios
    assert all(isinstance(one, PaperClaim) and None not in (one.ours, one.tuned) for one in ratios)
