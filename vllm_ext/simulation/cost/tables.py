"""The device and model tables as Markdown, for the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ext.simulation.cost.devices import DEVICES
from vllm_ext.simulation.cost.models import MODELS

_GIB = 1 << 30


def devices_markdown() -> str:
    """Return one row per device: peaks, the shares of them that are assumed to be reached, and the source."""
    rows = [
        (
            f"`{d.name}`",
            f"{d.peak_flops / 1e12:.4g}",
            f"{d.memory_bytes / _GIB:.1f}",
            f"{d.memory_bytes_per_s / 1e9:.0f}",
            f"{d.pcie_bytes_per_s / 1e9:.0f}",
            f"{d.link_bytes_per_s / 1e9:.4g}",
            f"{d.gemm_efficiency} / {d.attention_efficiency} / {d.memory_efficiency} / {d.link_efficiency}",
            d.source,
        )
        for d in DEVICES.values()
    ]
    head = (
        "device", "peak TFLOP/s", "memory GiB", "memory GB/s", "host link GB/s", "device link GB/s",
        "reached: GEMM / attention / memory / link", "source",
    )  # fmt: skip
    return _markdown(head, rows)


def models_markdown() -> str:
    """Return one row per model: its shape, parameters, KV bytes and source."""
    rows = [
        (
            f"`{m.name}`",
            str(m.layers),
            str(m.hidden),
            f"{m.heads} / {m.kv_heads} x {m.head_dim}",
            f"{m.ffn}{' gated' if m.gated else ''}",
            str(m.vocab),
            f"{m.parameters / 1e9:.2f}",
            f"{m.kv_bytes_per_token() / 1024:.0f}",
            m.source,
        )
        for m in MODELS.values()
    ]
    head = (
        "model", "layers", "hidden", "heads / KV heads x width", "FFN", "vocabulary", "parameters (1e9)",
        "KV KiB per token (fp16)", "source",
    )  # fmt: skip
    return _markdown(head, rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
