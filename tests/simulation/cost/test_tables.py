"""The documentation's tables of devices and models are those of the package, and a wrong row is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.simulation.cost.devices import DEVICES
from vllm_ext.simulation.cost.models import MODELS

DOCS = Path(__file__).parents[3] / "docs" / "simulator-inputs.md"
DEVICE_COLUMNS: Mapping[str, Callable[[Any], str]] = {
    "device": lambda d: f"`{d.name}`",
    "peak TFLOP/s": lambda d: f"{d.peak_flops / 1e12:.4g}",
    "memory GiB": lambda d: f"{d.memory_bytes / 2**30:.1f}",
    "memory GB/s": lambda d: f"{d.memory_bytes_per_s / 1e9:.0f}",
    "host link GB/s": lambda d: f"{d.pcie_bytes_per_s / 1e9:.0f}",
    "device link GB/s": lambda d: f"{d.link_bytes_per_s / 1e9:.4g}",
    "reached: GEMM / attention / memory / weights / link": lambda d: (
        f"{d.gemm_efficiency} / {d.attention_efficiency} / {d.memory_efficiency} / {d.weight_efficiency} / "
        f"{d.link_efficiency}"
    ),
    "source": lambda d: d.source,
}
MODEL_COLUMNS: Mapping[str, Callable[[Any], str]] = {
    "model": lambda m: f"`{m.name}`",
    "layers": lambda m: str(m.layers),
    "hidden": lambda m: str(m.hidden),
    "heads / KV heads x width": lambda m: f"{m.heads} / {m.kv_heads} x {m.head_dim}",
    "FFN": lambda m: f"{m.ffn if m.dense_layers else m.experts.ffn}{' gated' if m.gated else ''}",
    "experts": lambda m: f"{m.experts.per_token} of {m.experts.routed} x {m.experts.ffn}" if m.experts else "",
    "vocabulary": lambda m: str(m.vocab),
    "parameters (1e9)": lambda m: f"{m.parameters / 1e9:.2f}",
    "active": lambda m: f"{m.active_parameters / 1e9:.2f}" if m.experts else "",
    "KV KiB per token (fp16)": lambda m: f"{m.kv_bytes_per_token() / 1024:.0f}",
    "source": lambda m: m.source,
}


@pytest.mark.parametrize(
    ("columns", "rows"),
    [(DEVICE_COLUMNS, DEVICES.values()), (MODEL_COLUMNS, MODELS.values())],
    ids=["devices", "models"],
)
def test_the_documentation_holds_the_table_as_it_is(
    columns: Mapping[str, Callable[[Any], str]], rows: Iterable[Any]
) -> None:
    lines = [columns, ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    assert table in DOCS.read_text(encoding="utf-8"), f"the table is now:\n{table}"


@pytest.mark.parametrize(
    "field",
    [
        "gemm_efficiency",
        "memory_efficiency",
        "weight_efficiency",
        "attention_efficiency",
        "link_efficiency",
        "peak_flops",
        "tile_tokens",
    ],
)
def test_a_device_out_of_range_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}\n.*should be greater than .*input_value=0"):
        replace(DEVICES["h100"], **{field: 0})
