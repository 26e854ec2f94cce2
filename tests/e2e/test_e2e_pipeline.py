"""Two pipeline stages, with two batches in flight: every system answers as stock vLLM with one.

On vLLM's CPU backend; see `pipeline_shim` for what it takes there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, EAGER, SEATS, TIGHT, Engines, Outcome, long_then_short
from test_e2e_systems import SYSTEMS

from tests.support.extent import with_full

pytestmark = pytest.mark.e2e

ARRIVALS = long_then_short(seed=1)


def in_two_stages(name: str, model: Path, **engine: Any) -> dict[str, Any]:
    whole = {**BASE_ENGINE, "model": str(model), "pipeline_parallel_size": 2, **engine}
    return {"name": name, "engine": whole, "arrivals": ARRIVALS}


@pytest.fixture(scope="module")
def stock(run_engines: Engines, llama: Path) -> Outcome:
    """One stage, with room for all."""
    return run_engines([{"name": "stock", "engine": {**BASE_ENGINE, "model": str(llama)}, "arrivals": ARRIVALS}])[
        "stock"
    ]


def assert_same(found: Outcome, stock: Outcome) -> None:
    assert found.batch_queue == 2
    assert found.tokens == stock.tokens
    assert (found.blocks_missing, found.left_running, found.left_waiting, found.fallbacks) == (0, 0, 0, 0)


def test_4_stock_preempts_for_memory_and_answers_alike(run_engines: Engines, llama: Path, stock: Outcome) -> None:
    """Without this the cases below would say nothing of us."""
    (found,) = run_engines([in_two_stages("tight", llama, **TIGHT)], boot="pipeline").values()
    assert found.preemptions > 0
    assert_same(found, stock)


@pytest.mark.parametrize("limits", [SEATS, TIGHT], ids=["seats", "tight"])
@pytest.mark.parametrize("system", with_full(["alise-published"], ["alise-published", "fcfs", *SYSTEMS]))
def test_4_every_system_answers_alike(
    run_engines: Engines, llama: Path, stock: Outcome, system: str, limits: dict[str, Any]
) -> None:
    ours = {"scheduler_cls": system, "additional_config": EAGER, **limits}
    (found,) = run_engines([in_two_stages(system, llama, **ours)], boot="pipeline").values()
    assert_same(found, stock)
