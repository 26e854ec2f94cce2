"""Requests that must answer soon go before the rest of a long prompt that runs, and it hardly ends later for that."""

from __future__ import annotations

import pytest

from tests.support.simulation_parts import as_workload, ask, rows
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec, build
from vllm_ext.simulation.run import simulate
from vllm_ext.simulation.spec import EngineSpec, RecordSpec, SimulationSpec

HARDWARE = HardwareSpec(model="opt-13b", device="a100-80")
COST = build(HARDWARE.resolve(), CostSpec())
LONG, SHORT, TTFT_S = 12_000, 100, 0.5


def _scene(system: str, *, short: int = 8, seats: int = 32, blocks: int = 4000) -> tuple[int, float]:
    """Return how many of some short prompts had their first token in time, and when the long one had its own."""
    spec = SimulationSpec(
        hardware=HARDWARE,
        engine=EngineSpec(
            system=system,
            max_num_seqs=seats,
            max_num_batched_tokens=2048,
            max_model_len=12_100,
            block_size=16,
            num_blocks=blocks,
            prefix_caching=False,
            async_scheduling=False,
            profiled=not system.startswith("upstream"),
        ),
        record=RecordSpec(token_times=True),
    )
    long = ask("long", 0.0, LONG, 4)
    hints = {"ttft_slo_ms": 1000 * TTFT_S}
    names = [f"short-{i}" for i in range(short)]
    asked = [long, *(ask(name, 0.3, SHORT, 4, extra_args=hints) for name in names)]
    data = simulate(spec, workload=as_workload(asked), cost=COST)
    ended = rows(data.requests)
    in_time = sum(ended[name]["first_token_s"] - 0.3 <= TTFT_S for name in names)
    return in_time, ended["long"]["first_token_s"]


@pytest.mark.parametrize("system", ["accelgen", "accelgen-published", "auto"])
def test_who_must_answer_soon_is_in_time_and_the_long_prompt_is_hardly_later(system: str) -> None:
    before, upstream_s = _scene("upstream-fcfs")
    assert before == 0, "stock vLLM computes the long prompt first"
    in_time, long_s = _scene(system)
    assert in_time >= 7
    assert long_s <= 1.2 * upstream_s


@pytest.mark.parametrize("system", ["accelgen", "accelgen-published", "auto"])
def test_they_are_in_time_where_the_long_prompt_needs_nearly_all_kv(system: str) -> None:
    blocks = LONG // 16 + 8
    assert _scene("upstream-fcfs", blocks=blocks)[0] == 0
    assert _scene(system, blocks=blocks)[0] >= 7


@pytest.mark.parametrize("system", ["accelgen", "accelgen-published"])
@pytest.mark.parametrize("seats", [1, 2])
def test_they_are_in_time_where_the_long_prompt_has_the_seat(system: str, seats: int) -> None:
    """``auto`` asks whether that pays: the long prompt is computed again."""
    assert _scene("upstream-fcfs", short=seats, seats=seats)[0] == 0
    assert _scene(system, short=seats, seats=seats)[0] == seats
