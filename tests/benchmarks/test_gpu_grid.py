"""The grid of steps: which cells are measured, in which order, and what becomes of steps that are not as planned."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.simulation.cost.fitted import Fitted
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.step_time import profile as profiles

from .fake_gpu_engine import FakeEngine


@pytest.fixture
def grid() -> Any:
    return importlib.import_module("gpu_grid")


def cells(grid: Any) -> list[Any]:
    """A device whose steps take 5 ms, 20 us a decode, 50 us a prompt token, 0.1 us a token of context."""
    return [
        grid.Cell(
            decodes=n, context=c, prompt_tokens=p, steps=4,
            seconds=(5e-3 + 2e-5 * n + 5e-5 * p + 1e-7 * (n * (c + 2) + p),) * 2,
        )
        for n, c, sizes in grid.GridSpec().cells(400_000, 8192)
        for p in sizes
    ]  # fmt: skip


def test_cells_fit_into_the_kv_beside_a_prompt(grid: Any) -> None:
    few = [(n, c) for n, c, _ in grid.GridSpec().cells(300_000, 8192)]
    assert few[0] == (0, 0)
    assert (256, 512) in few
    assert (256, 1024) not in few
    assert all(n * c <= 0.95 * (300_000 - 2 * 8192) for n, c in few)


def test_a_step_has_room_for_decodes_and_prompt(grid: Any) -> None:
    assert all(n + p <= 8192 for n, _, sizes in grid.GridSpec().cells(400_000, 8192) for p in sizes)


def test_both_models_are_fitted_to_a_grid(grid: Any, tmp_path: Path) -> None:
    measured, key = cells(grid), profiles.EngineKey("llama-8b", "a device", "bfloat16", 1)
    grid.save_profile(measured, key, "0.32.0", tmp_path / "profile.json")
    found = profiles.load(tmp_path / "profile.json")
    assert found.key == key
    assert found.coefficients.base_s == pytest.approx(5e-3, rel=0.02)
    assert found.coefficients.decode_s == pytest.approx(2e-5, rel=0.05)
    assert found.coefficients.prefill_token_s == pytest.approx(5e-5, rel=0.02)
    assert found.coefficients.context_token_s == pytest.approx(1e-7, rel=0.05)
    cost = grid.cost_of(measured, "a device")
    cost.save(tmp_path / "cost.json")
    shape = StepShape.of_decodes(100, 1000).plus(StepShape.of_chunk(300))
    expected = 5e-3 + 2e-3 + 300 * 5e-5 + 1e-7 * 100_300
    assert Fitted.load(tmp_path / "cost.json").device_s(shape) == pytest.approx(expected, rel=0.05)


def test_the_pivot_is_the_smallest_step_of_prompts_with_nearly_the_best_throughput(grid: Any) -> None:
    """Of 8,192 tokens a step takes 415 ms, of 2,048 107 ms: 97 % of the throughput; of 1,024 94 %."""
    assert grid.pivot(cells(grid)) == (2048, pytest.approx(0.1076, rel=0.01))


@pytest.mark.parametrize(("seats", "kv_tokens", "running"), [(256, 10**9, 256), (256, 30_000, 99), (4, 10**9, 4)])
def test_saturation_is_where_a_full_batch_is_just_enough(grid: Any, seats: int, kv_tokens: int, running: int) -> None:
    """N requests of 200 and 200 tokens: each step N decodes and N prompt tokens; a request takes 200 steps."""
    cost = grid.cost_of(cells(grid), "a device")
    found = grid.saturation_per_s(cost, prompt=200.0, output=200.0, seats=seats, kv_tokens=kv_tokens)
    step_s = 5e-3 + running * (2e-5 + 5e-5 + 301 * 1e-7)
    assert found == pytest.approx(running / (200 * step_s), rel=0.06 if running > 10 else 0.3)


def measured(grid: Any, engine: FakeEngine, until_s: float = float("inf"), **options: Any) -> Any:
    """Return a grid that was measured until a time of the engine's clock."""
    found = grid.Grid(engine)
    for _ in itertools.takewhile(
        lambda _: engine.now() < until_s, found.measure(grid.GridSpec(**(options and {"inner": (), **options})))
    ):
        pass
    return found


def test_there_are_more_seats_than_decodes(grid: Any) -> None:
    spec = grid.GridSpec()
    assert spec.seats > max(decodes for decodes, _ in (*spec.corners, *spec.inner))


@pytest.mark.parametrize("in_flight", [0, 1])
def test_steps_of_a_cell_have_all_its_decodes_and_its_prompt(grid: Any, in_flight: int) -> None:
    engine = FakeEngine(seats=20, in_flight=in_flight)
    found = measured(grid, engine, corners=((8, 64),), corner_tokens=(0, 128), alone=(64,), steps=3, runs=2)
    assert [(cell.decodes, cell.prompt_tokens, cell.steps) for cell in found.cells] == [
        (0, 64, 7), (8, 0, 7), (8, 128, 7)
    ]  # fmt: skip
    assert found.dropped == []
    decoding = [cell.context for cell in found.cells if cell.decodes]
    assert decoding == sorted(decoding)
    assert decoding[0] > 64, "tokens that were generated before are context as well"
    timed = [size for size in engine.steps if size == (8, 128)]
    assert len(timed) == 1 + 2 * 7


def test_a_step_under_way_is_not_timed_with_those_of_the_next_run(grid: Any) -> None:
    """With async scheduling a step of decodes alone is under way when prompts are handed in."""
    said = []
    for in_flight in (0, 1):
        found = measured(grid, FakeEngine(seats=20, in_flight=in_flight), corners=((8, 4096),), alone=(64,))
        said.append([round(min(cell.seconds), 5) for cell in found.cells])
    assert said[0] == pytest.approx(said[1], rel=0.01)


def test_decodes_that_take_all_seats_leave_no_prompt_waiting_for_their_end(grid: Any) -> None:
    """The cells that need a seat for a prompt are dropped with the reason, after a few steps rather than thousands."""
    engine = FakeEngine(seats=8)
    found = measured(grid, engine, corners=((8, 64),), corner_tokens=(0, 128, 16), alone=(64,))
    assert [(cell.decodes, cell.prompt_tokens) for cell in found.cells] == [(0, 64), (8, 0)]
    assert [(cell["prompt_tokens"], cell["reason"]) for cell in found.dropped] == [
        (128, "a step had 8 requests with 8 tokens rather than 9 requests with 136 tokens"),
        (16, "a step had 8 requests with 8 tokens rather than 9 requests with 24 tokens"),
    ]
    assert len(engine.steps) < 100
    assert not engine.is_busy


def test_more_decodes_than_seats_are_given_up(grid: Any) -> None:
    engine = FakeEngine(seats=8)
    found = measured(grid, engine, corners=((12, 64), (4, 64)), corner_tokens=(0, 16), alone=(64,))
    assert [cell.decodes for cell in found.cells] == [0, 4, 4]
    assert {cell["reason"] for cell in found.dropped} == {"8 of 12 decodes run after 4 steps"}
    assert len(engine.steps) < 200


def test_a_decode_that_stops_drops_the_cell(grid: Any) -> None:
    engine = FakeEngine(seats=20)
    found = grid.Grid(engine)
    for _ in found.measure(grid.GridSpec(inner=(), corners=((8, 64),), corner_tokens=(0, 16, 32), alone=(64,))):
        if len(found.cells) == 2 and not found.dropped:
            engine.scheduler.waiting.append(engine.scheduler.running.pop())  # as if preempted for want of KV
            engine.scheduler.refused = 1
    assert [cell["prompt_tokens"] for cell in found.dropped] == [16]
    assert [(cell.decodes, cell.prompt_tokens) for cell in found.cells] == [(0, 64), (8, 0), (8, 32)]


def test_what_an_h100_has_measured_after_20_s_brackets_the_grid(grid: Any) -> None:
    """By a roofline: 1 and 256 decodes, contexts of 512 and 16k, the most KV, with no prompt and the largest."""
    spec = grid.GridSpec()
    found = measured(grid, FakeEngine(in_flight=1), until_s=20.0)
    corners = {(cell.decodes, cell.prompt_tokens) for cell in found.cells}
    assert {(1, 0), (1, 8191), (128, 0), (256, 0), (256, 7936), (0, 128), (0, 8192)} <= corners
    contexts = [cell.context for cell in found.cells if cell.decodes]
    assert min(contexts) < 600
    assert max(contexts) > 16_000
    held = max(cell.decodes * cell.context for cell in found.cells)
    assert held >= max(n * c for n, c in (*spec.corners, *spec.inner))
    assert grid.cost_of(found.cells, "").quality.num_steps == 2 * len(found.cells)


def test_an_h100_measures_all_cells_within_the_time_of_the_grid(grid: Any) -> None:
    engine = FakeEngine(kv_tokens=410_000, in_flight=1)
    found = measured(grid, engine)
    assert {cell.decodes for cell in found.cells} == {0, 1, 8, 16, 32, 64, 128, 256}
    assert found.dropped == []
    assert engine.now() < 30.0
