"""The same bursts against stock vLLM and against a system of ours, by a clock that every machine has.

Two runs on a small or busy machine differ by more than two schedulers do. So vLLM's engine computes the tokens here,
and each step takes what a kept profile of this model says (`step_times.json`, by `vllm-ext profile`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ext.compare.observed import MEAN, MEASURES, P99, Observed, measured
from vllm_ext.compare.replay import observed
from vllm_ext.compare.servers import Clocked, Row
from vllm_ext.compare.verdict import ratio, who_pays
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec
from vllm_ext.step_time import profile

STEP_TIMES = Path(__file__).with_name("step_times.json")
BURSTS = WorkloadSpec(
    source="sharegpt-like", scale_prompt=0.3, scale_output=0.25, max_model_len=1024, over_context="cut",
    max_tokens=320, arrivals="gamma", cv=2.0, rate_per_s=4.0, num_requests=150, seed=3,
)  # fmt: skip
"""As long as the tiny model can serve in seconds, and as many a second as it carries: else nobody would wait."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Enough for a tiny model; several would wait for each other where others compute as well."""
_SHOWN = (MEAN, P99, "mean TTFT", "P90 TTFT", "mean normalised")


@dataclass(frozen=True)
class Duel:
    """What became of the same requests on both."""

    system: str
    ours: Observed
    base: Observed

    def table(self) -> Table:
        """Return two columns, and how many times better the second is."""
        mine, theirs = measured(self.ours), measured(self.base)
        rows = [
            [f"{name} (s{'/token' if 'normalised' in name else ''})", theirs[name], mine[name],
             str(ratio(MEASURES[name], [self.ours], [self.base]))]
            for name in _SHOWN
        ]  # fmt: skip
        return Table(["", "vLLM", self.system, "times better (95 % interval)"], rows)

    def words(self) -> Iterator[str]:
        """Yield what was run, by which clock, and who pays."""
        times = profile.load(STEP_TIMES)
        yield (
            f"{len(self.base.e2e_s)} requests in bursts, {BURSTS.rate_per_s:g} a second, on both. Tokens are computed "
            f"here; a step takes what it took on {times.device} (off by {times.median_error:.0%} in the median), so "
            "that every machine shows the same seconds."
        )
        paying = [*who_pays([self.ours], [self.base], {})]
        yield f"Who pays with {self.system}: " + ("; ".join(paying) or "nobody by more than 5 %")


def duel(model: str, flags: Sequence[str], system: str, folder: Path, tell: Callable[[str], None]) -> Duel:
    """Serve the bursts twice.

    Args:
        model: Folder of the model.
        flags: Of `vllm serve`, for both.
        system: What ``--scheduler-cls`` takes.
        folder: Gets the engines' logs.
        tell: Gets a line before each.

    Raises:
        ServerError: An engine did not start, or ended.
    """
    costs = CostSpec(kind="fitted", file=str(STEP_TIMES))
    backend = Clocked(model, flags, folder, HardwareSpec(), costs, env=_ONE_THREAD)
    requests = [*build(BURSTS).start()]
    runs = []
    for row in (Row("vLLM"), Row(system, ("--scheduler-cls", system))):
        tell(f"duel: {len(requests)} requests in bursts against {row.name}")
        with backend.started(row) as server:
            runs.append(observed(server.serve(BURSTS), requests))
    base, ours = runs
    return Duel(system, ours, base)
