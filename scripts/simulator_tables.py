"""Print a page of the simulator's devices, models and presets, with the numbers that it computes with. `make docs`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.devices import DEVICES, Device
from vllm_ext.simulation.cost.model_shape import ModelShape
from vllm_ext.simulation.cost.models import MODELS
from vllm_ext.simulation.workloads.synthetic import CONVERSATIONS, PRESETS

_DRAWS = 200_000
_HEAD = f"""# The simulator's devices, models and presets

<!-- Written by scripts/simulator_tables.py. -->

[Inputs](simulator-inputs.md) says how they are used, and how to describe others.

## Devices

Peaks are the datasheets', dense. The shares of them that are reached are defaults for large kernels; those of `a10`,
`l4`, `l40s`, `b200` and `mi300x` are assumed, not measured.

{{devices}}
## Models

`active` are the parameters that one token uses, embedding table and output layer included. Experts: per token, per
layer, and the inner width of one.

{{models}}
## Presets

Prompt and output lengths are drawn independently of each other. Statistics of {_DRAWS:,} draws, in tokens.

{{presets}}"""


def devices(rows: Iterable[Device] = DEVICES.values()) -> Table:
    """Return what is known of devices."""
    header = [
        "device", "peak TFLOP/s", "memory GiB", "memory GB/s", "host link GB/s", "device link GB/s",
        "reached: GEMM / attention / memory / weights / link", "source",
    ]  # fmt: skip
    return Table(header, [
        [
            f"`{one.name}`", f"{one.peak_flops / 1e12:.4g}", f"{one.memory_bytes / 2**30:.1f}",
            f"{one.memory_bytes_per_s / 1e9:.0f}", f"{one.pcie_bytes_per_s / 1e9:.0f}",
            f"{one.link_bytes_per_s / 1e9:.4g}",
            f"{one.gemm_efficiency} / {one.attention_efficiency} / {one.memory_efficiency} / {one.weight_efficiency} / "
            f"{one.link_efficiency}",
            one.source,
        ]
        for one in rows
    ])  # fmt: skip


def models(rows: Iterable[ModelShape] = MODELS.values()) -> Table:
    """Return what is known of models."""
    header = [
        "model", "layers", "hidden", "heads / KV heads x width", "FFN", "experts", "vocabulary", "parameters (1e9)",
        "active", "KV KiB per token (fp16)", "source",
    ]  # fmt: skip
    return Table(header, [list(_model(one)) for one in rows])


def _model(one: ModelShape) -> Iterator[str]:
    experts = one.experts
    yield f"`{one.name}`"
    yield str(one.layers)
    yield str(one.hidden)
    yield f"{one.heads} / {one.kv_heads} x {one.head_dim}"
    width = experts.ffn if experts is not None and not one.dense_layers else one.ffn
    yield f"{width}{' gated' if one.gated else ''}"
    yield f"{experts.per_token} of {experts.routed} x {experts.ffn}" if experts else ""
    yield str(one.vocab)
    yield f"{one.parameters / 1e9:.2f}"
    yield f"{one.active_parameters / 1e9:.2f}" if experts else ""
    yield f"{one.kv_bytes_per_token() / 1024:.0f}"
    yield one.source


def presets(draws: int = _DRAWS) -> Table:
    """Return the presets with the statistics of their lengths."""
    shown = "mean / median / P90 / std"
    rows = [
        [f"`{name}`", *map(_statistics, one.draw(np.random.default_rng(7), draws)), one.source]
        for name, one in {**PRESETS, **CONVERSATIONS}.items()
    ]
    return Table(["preset", f"prompt: {shown}", f"output: {shown}", "fitted to"], rows)


def _statistics(lengths: list[int]) -> str:
    found = np.array(lengths)
    return f"{found.mean():.1f} / {np.median(found):.0f} / {np.percentile(found, 90):.0f} / {found.std():.0f}"


def page() -> str:
    """Return the page."""
    return _HEAD.format(devices=devices().markdown(), models=models().markdown(), presets=presets().markdown())


if __name__ == "__main__":
    print(page(), end="")
