"""What a shadow expects of another order is near what a server of that order does with the same requests."""

from __future__ import annotations

import pytest

from vllm_ext.simulation.run import simulate
from vllm_ext.simulation.spec import SimulationSpec, with_values

SHADOW_OF = {"fcfs": "alise", "alise": "fcfs"}


def waits(system: str, rate_per_s: float) -> tuple[float, float]:
    """Return the mean wait under a system, and what its shadow expects, in seconds."""
    changes = {
        "engine.system": system,
        "engine.options": {"shadow": SHADOW_OF[system], "prediction": {"hints": "believed"}},
        "engine.max_num_seqs": 8,
        "engine.max_model_len": 2048,
        "cost.kind": "constant",
        "workload.announce": "hint",
        "workload.max_output_tokens": 300,
        "workload.num_requests": 300,
        "workload.rate_per_s": rate_per_s,
    }
    found = simulate(with_values(SimulationSpec(), changes)).counters
    assert found["shadow_requests"] > 290
    return (
        found["shadow_wait_s_real"] / found["shadow_requests"],
        found["shadow_wait_s_shadow"] / found["shadow_requests"],
    )


@pytest.mark.parametrize("rate_per_s", [1.98, 2.2], ids=["0.9 of saturation", "1.0"])
def test_the_gain_it_expects_is_the_gain_there_is(rate_per_s: float) -> None:
    by_arrival, alise_expected = waits("fcfs", rate_per_s)
    alise, by_arrival_expected = waits("alise", rate_per_s)
    assert alise < 0.9 * by_arrival
    assert alise_expected == pytest.approx(alise, abs=0.1 * by_arrival)
    assert by_arrival_expected == pytest.approx(by_arrival, abs=0.1 * by_arrival)
