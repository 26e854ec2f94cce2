"""What records cost, and what the planner makes of it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ext.contract import RequestView, StepStats, Victim
from vllm_ext.kv.int8.geometry import ArenaGeometry
from vllm_ext.kv.int8.place import DevicePlace
from vllm_ext.kv.int8.prices import RecordPrices, measured
from vllm_ext.kv.int8.step import Direction, RecordMove, RecordStep

PRICES = RecordPrices(block_tokens=16, to_record_s=2.0, to_block_s=1.0, read_s=0.25)
GEOMETRY = ArenaGeometry(
    num_blocks=4, arena_pages=2, scratch_pages=3, num_layers=8, page_bytes=16384, record_bytes=8704
)


def test_a_block_is_read_in_its_record_as_long_as_that_costs_less_than_to_move_it_back() -> None:
    assert PRICES.stay_s(32, 2) == 2 * (2.0 + 2 * 0.25)
    assert PRICES.stay_s(33, 100) == 3 * (2.0 + 1.0), "a part of a block is moved as a whole"


def test_a_step_takes_longer_by_its_moves_and_by_what_it_reads() -> None:
    moves = [RecordMove(Direction.TO_RECORD, 1, 4), RecordMove(Direction.TO_BLOCK, 1, 5)]
    assert PRICES.step_s(RecordStep(moves, [4, 5, 6])) == 2.0 + 1.0 + 3 * 0.25


def test_bytes_are_read_and_written_once_in_each_layer() -> None:
    prices = RecordPrices.by_bandwidth(GEOMETRY, 64, 1e9, unpacks=True)
    assert prices.to_record_s == prices.to_block_s == prices.read_s == pytest.approx(8 * (16384 + 8704) / 1e9)
    assert RecordPrices.by_bandwidth(GEOMETRY, 64, 1e9, unpacks=False).read_s == 0.0


@pytest.mark.parametrize("unpacks", [True, False])
def test_a_cpu_is_timed(unpacks: bool) -> None:
    prices = measured(GEOMETRY, 64, torch.bfloat16, on_cpu=True, unpacks=unpacks)
    assert 0 < prices.to_record_s < math.inf
    assert 0 < prices.to_block_s < math.inf
    assert prices.read_s == (prices.to_block_s if unpacks else 0.0)


@pytest.mark.parametrize("wrong", [{"block_tokens": 0}, {"to_record_s": -1.0}, {"read_s": math.nan}])
def test_prices_that_can_not_be_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}=.*: must be"):
        RecordPrices(**{**vars(PRICES), **wrong})


def view(computed: int, remaining_s: float) -> RequestView:
    return RequestView(
        "r", 0.0, 10, num_computed_tokens=computed, predicted_remaining_s=remaining_s, step_stats=StepStats(step_s=1.0)
    )


def place(num_free: int) -> DevicePlace:
    records: Any = SimpleNamespace(num_free=num_free)
    return DevicePlace(records, PRICES)


def test_a_preemption_costs_what_is_cheapest() -> None:
    """Two blocks for two more steps: 5 s, of which all hold everybody up."""
    victim = Victim(view(32, 2.0), (), 2, restore_s=6.0, stall_s=1.0)
    assert place(2).priced(victim)[3:] == (5.0, 5.0)
    assert place(2).priced(victim._replace(restore_s=4.0)).restore_s == 4.0


def test_without_a_record_for_every_block_kv_can_not_stay() -> None:
    assert place(1).stay_s(view(32, 2.0)) == math.inf
    assert place(9).stay_s(view(0, 2.0)) == math.inf, "nor where there is none"
