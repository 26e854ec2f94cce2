"""How far is the cost model from published times of a layer?

Question: rates and latencies of the simulator are those of its cost model. How far are its layers from measured ones,
as the device table has them, and after constants of the device have been fitted?

Method: `layer_times.csv` has medians that Vidur published (https://github.com/microsoft/vidur, data/profiling/compute,
at the commit that the file names): all operators of a layer but attention, on one device, without the gaps between
kernels, over the tokens of a step. Beside it what the roofline says of the same layer. `gemm_efficiency` of a device is
fitted alone, then `weight_efficiency` and `unhidden` with it, each time to all models but the one that is judged (least
mean of the absolute logarithms).

    python benchmarks/simulated/layer_times.py
"""

from __future__ import annotations

import csv
import hashlib
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import device_fit

from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.devices import Device, find_device
from vllm_ext.simulation.cost.model_shape import ModelShape
from vllm_ext.simulation.cost.roofline import Roofline
from vllm_ext.simulation.cost.step_shape import StepShape

MEASURED = Path(__file__).with_suffix(".csv")
GOAL = 0.05
DEVICES = {"a100": "a100-80", "h100": "h100", "a40": "a40"}
"""Vidur's names -> ours."""
TABLE, ONE, ALL = "device table", "one constant", "three constants"
FITS = {TABLE: (), ONE: ("gemm_efficiency",), ALL: ("gemm_efficiency", "weight_efficiency", "unhidden")}
"""What is fitted."""


@dataclass(frozen=True)
class Layer:
    """What was measured of a layer."""

    device: str
    model: str
    shape: ModelShape
    tokens: int
    seconds: float


def read(path: Path) -> list[Layer]:
    """Return the published medians."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [
        Layer(row["device"], row["model"], _shape(row), int(row["tokens"]), float(row["ms"]) / 1000) for row in rows
    ]


def _shape(row: dict[str, str]) -> ModelShape:
    heads, hidden = int(row["heads"]), int(row["hidden"])
    return ModelShape(
        name=row["model"], layers=1, hidden=hidden, heads=heads, kv_heads=int(row["kv_heads"]),
        head_dim=hidden // heads, ffn=int(row["ffn"]), gated=row["gated"] == "True", vocab=int(row["vocab"]),
        tied_embeddings=False, max_positions=65_536, source="Vidur",
    )  # fmt: skip


def simulated_s(layer: Layer, device: Device) -> float:
    """Return what the cost model says of a layer without attention, in seconds."""
    bare = replace(device, graph_max_requests=layer.tokens, layer_gap_s=0.0, step_launch_s=0.0)
    return Roofline(layer.shape, bare).device_s(StepShape(1, layer.tokens, layer.tokens, 0, 0, 0, 0.0))


def errors(layers: Iterable[Layer], device: Device) -> list[float]:
    """Return the absolute logarithm of simulated over published of each."""
    return [abs(math.log(simulated_s(layer, device) / layer.seconds)) for layer in layers]


def fitted(layers: Sequence[Layer], device: Device, constants: Sequence[str]) -> Device:
    """Return the device with those constants with which its layers are nearest to what was published."""

    return device_fit.fitted(device, constants, lambda one: errors(layers, one))


def main(argv: Sequence[str]) -> None:
    """Compare, print, write."""
    args = argument_parser(__doc__).parse_args(argv)
    layers, rows, metrics = read(MEASURED), [], {}
    told: dict[str, list[float]] = {kind: [] for kind in FITS}
    for name in sorted({layer.device for layer in layers}):
        device, here = find_device(DEVICES[name]), [layer for layer in layers if layer.device == name]
        for model in sorted({layer.model for layer in here}):
            own, others = ([one for one in here if (one.model == model) is wanted] for wanted in (True, False))
            better = {kind: fitted(others, device, names) if names else device for kind, names in FITS.items()}
            found = {kind: errors(own, one) for kind, one in better.items()}
            for kind, values in found.items():
                told[kind] += values
                metrics[f"{name}.{model}.{kind}_median_error"] = math.expm1(median(values))
            constants = (f"{getattr(better[ALL], constant):.2f}" for constant in FITS[ALL])
            rows.append([name, model, *(f"{math.expm1(median(values)):.1%} ({math.expm1(max(values)):.0%})"
                                        for values in found.values()), ", ".join(constants)])  # fmt: skip
    overall = {kind: math.expm1(median(values)) for kind, values in told.items()}
    header = ["device", "model", *(f"median error (largest), {kind}" for kind in FITS), f"constants of {ALL}"]
    claims = [
        Claim(name=f"median error, {kind}", value=overall[kind], op="<=", goal=GOAL,
              why="memory is slower for matrix products than the table's share, which the other fit has")
        for kind in FITS if kind != TABLE
    ]  # fmt: skip
    digest = hashlib.sha256(MEASURED.read_bytes()).hexdigest()
    emit(
        Result(
            name="layer_times",
            command=command(argv, __file__),
            config={"columns": header, "rows": rows, "constants": FITS},
            seed=args.seed,
            workload=Workload(name="Vidur's layers", rows=len(layers), sha256=digest),
            metrics={**metrics, **{f"{kind}_median_error": value for kind, value in overall.items()}},
            claims=claims,
        ),
        [Table(header, rows)],
        args.out,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
