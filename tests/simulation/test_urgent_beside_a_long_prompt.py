"""Requests that must answer soon go before the rest of a long prompt that runs, and it hardly ends later for that."""

from __future__ import annotations

import pytest

from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec, build
from vllm_ext.simulation.run import simulate_parts
from vllm_ext.simulation.spec import EngineSpec, RecordSpec, SimulationSpec

from .parts import as_workload, ask, rows

HARDWARE = HardwareSpec(model="opt-13b", device="a100-80")
COST = build(HARDWARE, CostSpec())
LONG, SHORT, TTFT_S = 12_000, 100, 0.5


def _scene(system: str) -> tuple[int, float]:
    """Return how many of 8 short prompts had their first token in time, and when the long one had its own."""
    spec = SimulationSpec(
        hardware=HARDWARE,
        engine=EngineSpec(
            system=system,
            max_num_seqs=32,
            max_num_batched_tokens=2048,
            max_model_len=16_384,
            block_size=16,
            prefix_caching=False,
            async_scheduling=False,
            profiled=not system.startswith("upstream"),
        ),
        record=RecordSpec(token_times=True),
    )
    long = ask("long", 0.0, LONG, 4)
    hints = {"ttft_slo_ms": 1000 * TTFT_S}
    short = [ask(f"short-{i}", 0.3, SHORT, 4, extra_args=hints) for i in range(8)]
    data, _ = simulate_parts(spec, workload=as_workload([long, *short]), cost=COST, num_blocks=4000)
    ended = rows(data.requests)
    in_time = sum(ended[f"short-{i}"]["first_token_s"] - 0.3 <= TTFT_S for i in range(8))
    return in_time, ended["long"]["first_token_s"]


@pytest.mark.parametrize("system", ["accelgen", "accelgen-published", "auto"])
def test_who_must_answer_soon_is_in_time_and_the_long_prompt_is_hardly_later(system: str) -> None:
    before, upstream_s = _scene("upstream-fcfs")
    assert before == 0, "stock vLLM computes the long prompt first"
    in_time, long_s = _scene(system)
    assert in_time >= 7
    assert long_s <= 1.2 * upstream_s
