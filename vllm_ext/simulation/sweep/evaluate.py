"""From a description to metrics: what every pool does with a point."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from vllm_ext.simulation.spec import SimulationSpec

Evaluate = Callable[[SimulationSpec], Mapping[str, float]]
"""Runs a point and returns its metrics. Importable by name, as it is sent to other processes."""


def simulate_point(spec: SimulationSpec) -> dict[str, float]:
    """Simulate a point and reduce it to metrics; whatever `simulate` raises comes through.

    vLLM is imported here: this is called in workers, or where there is but one process.
    """
    from vllm_ext.simulation.metrics import summarise
    from vllm_ext.simulation.run import simulate

    return {name: value for name, value in summarise(simulate(spec)).items() if math.isfinite(value)}
