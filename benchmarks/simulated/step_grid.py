"""How far is the cost model from steps that were timed on a GPU?

Question: what the simulator says of a device that it only knows from the table decides what `plan` recommends. How far
are whole steps of an 8B model, decodes and prompts together, from what vLLM took on an H200?

Method: `benchmarks/results/device/token_budget.json` has the grid that `benchmarks/gpu/gpu_budget.py` timed, compiled
and with CUDA graphs. Beside it what the roofline says: with the constants of the H100, of which other models' layers
were published, and with five constants fitted to four fifths of the cells and judged on the others (least mean of the
absolute logarithms). The table's constants of the H200 are a fit to all cells, so its error is no prediction's.

    python benchmarks/simulated/step_grid.py
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import device_fit

from vllm_ext.report.claim import Claim
from vllm_ext.report.provenance import RESULTS
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.devices import Device, find_device
from vllm_ext.simulation.cost.models import find_model
from vllm_ext.simulation.cost.roofline import Roofline
from vllm_ext.simulation.cost.step_shape import StepShape

MEASURED = Path(__file__).resolve().parents[2] / RESULTS / "device" / "token_budget.json"
MODEL = find_model("llama-3.1-8b")
FITTED = ("gemm_efficiency", "weight_efficiency", "unhidden", "memory_efficiency", "attention_efficiency")
OTHERS, CROSSED, TABLE = "the H100's constants", "fitted to other cells", "device table"
GOAL = 0.05
_FOLDS = 5
_KINDS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "decodes alone": lambda cell: not cell["prompt_tokens"],
    "prompts of at most 512 tokens": lambda cell: 0 < cell["prompt_tokens"] <= 512,
    "prompts of more": lambda cell: cell["prompt_tokens"] > 512,
}


class Step(NamedTuple):
    """What was timed, of one shape."""

    kind: str
    shape: StepShape
    seconds: float


def read(path: Path) -> list[Step]:
    """Return the cells of a grid, each with its median."""
    found = json.loads(path.read_text(encoding="utf-8"))["runs"]["measured"]["result"]["grid"]
    return [
        Step(next(kind for kind, holds in _KINDS.items() if holds(cell)), _shape(cell), median(cell["seconds"]))
        for cell in found
    ]


def _shape(cell: Mapping[str, Any]) -> StepShape:
    decodes = StepShape.of_decodes(cell["decodes"], cell["context"] + cell["steps"] // 2)
    return decodes.plus(StepShape.of_chunk(cell["prompt_tokens"])) if cell["prompt_tokens"] else decodes


def errors(steps: Iterable[Step], device: Device) -> list[float]:
    """Return the absolute logarithm of simulated over measured of each."""
    cost = Roofline(MODEL, device)
    return [abs(math.log(cost.device_s(step.shape) / step.seconds)) for step in steps]


def fitted(steps: Sequence[Step], device: Device) -> Device:
    """Return the device with those constants with which its steps are nearest to what was measured."""

    return device_fit.fitted(device, FITTED, lambda one: errors(steps, one))


def crossed(steps: Sequence[Step], device: Device) -> list[float]:
    """Return the errors of each fifth by constants of the others."""
    found = [0.0] * len(steps)
    for first in range(_FOLDS):
        others = [step for at, step in enumerate(steps) if at % _FOLDS != first]
        found[first::_FOLDS] = errors(steps[first::_FOLDS], fitted(others, device))
    return found


def main(argv: Sequence[str]) -> None:
    """Compare, print, write."""
    args = argument_parser(__doc__).parse_args(argv)
    steps, device, other = read(MEASURED), find_device("h200"), find_device("h100")
    borrowed = replace(device, **{name: getattr(other, name) for name in FITTED})
    best = fitted(steps, borrowed)
    found = {OTHERS: errors(steps, borrowed), CROSSED: crossed(steps, borrowed), TABLE: errors(steps, device)}
    rows, metrics = [], {}
    for kind in ("all", *_KINDS):
        chosen = [at for at, step in enumerate(steps) if kind in ("all", step.kind)]
        told = {name: [values[at] for at in chosen] for name, values in found.items()}
        rows.append([kind, len(chosen), *(f"{math.expm1(median(values)):.1%} ({math.expm1(max(values)):.0%})"
                                          for values in told.values())])  # fmt: skip
        metrics |= {f"{kind}.{name}_median_error": math.expm1(median(values)) for name, values in told.items()}
    header = ["steps", "cells", *(f"median error (largest), {name}" for name in found)]
    emit(
        Result(
            name="step_grid",
            command=command(argv, __file__),
            config={"columns": header, "rows": rows, "model": MODEL.name,
                    "constants": {name: getattr(best, name) for name in FITTED}},
            seed=args.seed,
            workload=Workload(name="steps of a GPU", rows=len(steps),
                              sha256=hashlib.sha256(MEASURED.read_bytes()).hexdigest()),
            metrics=metrics,
            claims=[
                Claim(name=f"median error, {name}", value=metrics[f"all.{name}_median_error"], op="<=", goal=GOAL,
                      why="by the row of kinds: prompts beside decodes, for which no CUDA graph was captured")
                for name in (OTHERS, CROSSED)
            ],
        ),
        [Table(header, rows)],
        args.out,
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
