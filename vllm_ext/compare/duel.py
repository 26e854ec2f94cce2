"""A duel: the same bursts against stock vLLM and against a system of ours, by a clock that every machine has.

Two runs on a small or busy machine differ by more than two schedulers do. So vLLM's engine computes the tokens of a
tiny model here, while each step takes what the cost model says of a model that people serve; see `clocked`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

HARDWARE = HardwareSpec(model="opt-13b", device="a100-40")
SCALE, CONTEXT, BLOCK, SEATS, BUDGET = 0.25, 512, 32, 256, 2048
"""Of lengths and of KV memory, so that it takes seconds; seats and token budget are vLLM's defaults on that device."""
BURSTS = WorkloadSpec(
    source="sharegpt-like", scale_prompt=SCALE, scale_output=SCALE, max_model_len=CONTEXT, over_context="cut",
    max_tokens=CONTEXT // 2, arrivals="gamma", cv=2.0, rate_per_s=25.0, num_requests=400,
)  # fmt: skip
"""As many a second as stock vLLM carries (docs/results/engine-clock.md): below that hardly anybody would wait."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
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
        yield (
            f"The same {len(self.base.e2e_s)} requests in bursts on both, {BURSTS.rate_per_s:g} a second, about what "
            "stock vLLM carries. Tokens are computed here, by a tiny model; a step takes what the cost model says of "
            f"{HARDWARE.model} on an {HARDWARE.device}, with a quarter of its KV memory and of the lengths. So every "
            "machine shows the same seconds."
        )
        paying = [*who_pays([self.ours], [self.base], {})]
        yield f"Who pays with {self.system}: " + ("; ".join(paying) or "nobody by more than 5 %")


def num_blocks() -> int:
    """Return the KV blocks of the engine."""
    whole = HARDWARE.resolve().num_kv_blocks(BLOCK, max_num_batched_tokens=BUDGET, max_num_seqs=SEATS)
    return int(SCALE * whole)


def engine_flags(budget: int = BUDGET) -> list[str]:
    """Return the flags of an engine that serves the bursts, with so many tokens a step."""
    return (
        f"--dtype float32 --enforce-eager --max-model-len {CONTEXT} --max-num-seqs {SEATS} --block-size {BLOCK} "
        f"--max-num-batched-tokens {budget} --num-gpu-blocks-override {num_blocks()} --kv-cache-memory-bytes 536870912"
    ).split()


def duel(model: str, system: str, folder: Path, tell: Callable[[str], None]) -> Duel:
    """Serve the bursts twice.

    Args:
        model: Folder of the tiny model.
        system: What ``--scheduler-cls`` takes.
        folder: Gets the engines' logs.
        tell: Gets a line before each.

    Raises:
        ServerError: An engine did not start, or ended.
    """
    backend = Clocked(model, engine_flags(), folder, HARDWARE, CostSpec(), env=ONE_THREAD)
    requests, runs = [*build(BURSTS).start()], []
    for row in (Row("vLLM"), Row(system, ("--scheduler-cls", system))):
        tell(f"duel: {len(requests)} requests in bursts against {row.name}")
        with backend.started(row) as server:
            runs.append(observed(server.serve(BURSTS), requests))
    base, ours = runs
    return Duel(system, ours, base)
