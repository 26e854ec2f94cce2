"""How a recommendation is judged on what it has not seen, from made-up runs."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from vllm_ext.simulation.plan.answer import Answer
from vllm_ext.simulation.plan.candidates import DEFAULT, Candidate
from vllm_ext.simulation.plan.evidence import MEAN, P99, TTFT_P90, Objective
from vllm_ext.simulation.plan.runs import Tried

from .conftest import BENCHMARKS

CHOSEN, SMALLER = Candidate(tokens=512), Candidate(tokens=256)


@pytest.fixture
def held_out(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "simulated"))
    return importlib.import_module("plan_held_out")


def run(mean: float, p99: float, ttft: float) -> dict[str, float]:
    return {MEAN: mean, P99: p99, TTFT_P90: ttft}


def judged(held_out: ModuleType, mean: float = 80.0) -> object:
    found = Answer(CHOSEN, Tried(), {}, {}, Objective(with_slo=False), 1.0)
    runs = {
        DEFAULT: dict.fromkeys((0.5, 0.7, 0.9), run(100.0, 300.0, 2000.0)),
        CHOSEN: {0.5: run(99.0, 310.0, 2000.0), 0.7: run(90.0, 290.0, 2000.0), 0.9: run(mean, 250.0, 2000.0)},
        SMALLER: {0.9: run(50.0, 200.0, 9000.0)},
    }
    return held_out.Judged(found, 4.0, 4.4, runs)


def test_the_best_is_that_of_all_and_that_of_those_that_keep_to_the_limits(held_out: ModuleType) -> None:
    one = judged(held_out)
    assert one.best() == SMALLER
    assert one.missed(SMALLER) == pytest.approx(50 / 80)
    assert one.best(Objective(with_slo=False)) == CHOSEN, "the other's first token takes 9 s"
    assert one.missed(CHOSEN) == 1


def test_goals_are_held_against_the_worst_cell_and_load(held_out: ModuleType) -> None:
    seen, fresh = held_out._SEEN[0], "arxiv, llama-3.1-8b, 1 x h100"
    claims = {one.name: one for one in held_out.claims({seen: judged(held_out), fresh: judged(held_out, mean=50.0)})}
    values = {name: one.value for name, one in claims.items()}
    best = f"recommended over the best of the grid at 0.9: mean e2e, worst ({seen})"
    assert (values[best], claims[best].met) == (0.625, False)
    assert values[f"recommended over vLLM as it is, 0.5 to 0.9: P99 e2e, worst ({seen} at 0.5)"] == 0.9677
    gain = "recommended over vLLM as it is at 0.9{}: mean e2e, geometric mean"
    assert values[gain.format("")] == pytest.approx((1.25 * 2) ** 0.5, abs=1e-4)
    assert (values[gain.format(", unseen cells")], claims[gain.format(", unseen cells")].met) == (2.0, True)
    assert values[f"recommended over the best of the grid at 0.9, unseen cells: mean e2e, worst ({fresh})"] == 1.0


def test_there_are_twelve_cells_and_the_reserved_third_follows_what_plan_saw(held_out: ModuleType) -> None:
    assert len(held_out.CELLS) == 12
    assert set(held_out._SEEN) <= held_out.CELLS.keys()
    table = held_out.table({"a cell": judged(held_out)})
    assert len(table.rows) == 1
    assert table.rows[0][-1] == pytest.approx(0.625)
