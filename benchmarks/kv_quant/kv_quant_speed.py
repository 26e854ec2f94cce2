"""How fast KV goes into host memory and back in 8 bits, against a plain copy of its bytes. See `kv_quant.py`.

The subjects are those of the KV tier: `RawCodec`, one copy for each block, and
`QuantisedCodec`. Blocks are paged: they, and the chunks, are in random order. ``cold``: the cache and the
pool are far larger than the processor's caches, as when a server moves KV. ``warm``: both stay within the second-level
cache, where a copy costs next to nothing; nobody stores the same KV again and again, so it shows what arithmetic costs,
not what users pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.host.codec import Codec, QuantisedCodec, RawCodec
from vllm_ext.kv.host.geometry import TierGeometry

LAYOUTS = {"cpu": PageLayout.transposed_keys, "rows": PageLayout.rows}
"""``cpu``: vLLM's CPU backend, K transposed within a block; ``rows``: its CUDA backends."""
MIB = {"cold": 1024.0, "warm": 0.5}
QUICK_MIB = {"cold": 160.0, "warm": 0.5}
"""Of KV; a pool as large comes beside it."""
HEADS, HEAD_DIM = 8, 128
"""Of one layer of Llama-3.1-8B."""
BLOCK_SIZES = (16, 32, 64)
_LEAST_BYTES = 64 * 2**20
"""Moved by one measurement, by as many passes as it takes."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layout, block size, state of the caches and direction."""

    layout: str
    block_size: int
    state: str
    direction: str
    """``store``: into the pool; ``load``: back."""
    bytes: int
    """Of bfloat16 in a pass."""
    raw_s: NDArray[np.float64]
    """Seconds of a pass of copies, one by one."""
    quantised_s: NDArray[np.float64]
    """The same in 8 bits, each measured right after the copy at its place."""

    @property
    def key(self) -> str:
        """Prefix of the metrics."""
        return f"{self.layout}_block{self.block_size}_{self.state}_{self.direction}"

    @property
    def ratios(self) -> tuple[float, float, float]:
        """Median of time in 8 bits over time of a copy, and its quartiles."""
        found = np.percentile(self.quantised_s / self.raw_s, [50, 25, 75])
        return float(found[0]), float(found[1]), float(found[2])

    def metrics(self) -> dict[str, float]:
        """Return what 8 bits reach, and how that compares."""
        middle, low, high = self.ratios
        return {
            f"{self.key}_gb_per_s": self._speed(self.quantised_s),
            f"{self.key}_time_over_copy": round(middle, 3),
            f"{self.key}_time_over_copy_q1": round(low, 3),
            f"{self.key}_time_over_copy_q3": round(high, 3),
        }

    def baseline(self) -> dict[str, float]:
        """Return what copies reach."""
        return {f"{self.key}_gb_per_s": self._speed(self.raw_s)}

    def _speed(self, seconds: NDArray[np.float64]) -> float:
        return round(float(self.bytes / np.median(seconds) / 1e9), 3)


def measure(
    layout: str, block_size: int, state: str, mib: float, repeats: int, seed: int, timer: Callable[[], float]
) -> list[Cell]:
    """Measure both directions, copy and 8 bits in turns, one thread.

    Raises:
        RuntimeError: what comes back from 8 bits is not near what went in, or what was copied is not the same.
    """
    kind = LAYOUTS[layout](torch.bfloat16, HEADS, HEAD_DIM, block_size)
    num_blocks = max(1, int(mib * 2**20) // kind.page_bytes)
    rng = np.random.default_rng(seed)
    blocks, chunks = rng.permutation(num_blocks), rng.permutation(num_blocks)
    page = torch.randn(16, kind.page_elements, generator=torch.Generator().manual_seed(seed)).bfloat16()
    kv = page.repeat(-(-num_blocks // 16), 1)[:num_blocks].contiguous()
    raw, quantised = _codecs(kv, kind)
    num_bytes = kv.numel() * kv.element_size()
    passes = max(1, _LEAST_BYTES // num_bytes)
    subjects: dict[tuple[str, str], Callable[[], object]] = {
        ("store", "raw"): lambda: raw.store(0, blocks, chunks),
        ("store", "quantised"): lambda: quantised.store(0, blocks, chunks),
        ("load", "raw"): lambda: raw.load(0, chunks, blocks),
        ("load", "quantised"): lambda: quantised.load(0, chunks, blocks),
    }
    _check(kv, subjects)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in subjects}
    for _ in range(repeats):
        for name, subject in subjects.items():
            started = timer()
            for _ in range(passes):
                subject()
            times[name].append((timer() - started) / passes)
    return [
        Cell(
            layout=layout, block_size=block_size, state=state, direction=direction, bytes=num_bytes,
            raw_s=np.array(times[direction, "raw"]), quantised_s=np.array(times[direction, "quantised"]),
        )
        for direction in ("store", "load")
    ]  # fmt: skip


def rows_of(cells: Sequence[Cell]) -> list[list[object]]:
    """Return the lines of the table."""
    return [
        [c.layout, c.block_size, c.state, c.direction, c.baseline()[f"{c.key}_gb_per_s"],
         c.metrics()[f"{c.key}_gb_per_s"], *c.ratios]
        for c in cells
    ]  # fmt: skip


def _codecs(kv: torch.Tensor, kind: PageLayout) -> tuple[Codec, Codec]:
    tensors = [kv.view(torch.int8)]
    record = RecordFormat(kind).record_bytes
    raw = TierGeometry(bits=16, chunk_bytes=kind.page_bytes, record_bytes=0)
    quantised = TierGeometry(bits=8, chunk_bytes=record, record_bytes=record)
    pools = [torch.zeros(len(kv) * one.chunk_bytes, dtype=torch.uint8) for one in (raw, quantised)]
    return RawCodec(tensors, pools[0], raw), QuantisedCodec(tensors, pools[1], quantised, kind)


def _check(kv: torch.Tensor, subjects: dict[tuple[str, str], Callable[[], object]]) -> None:
    """Also touches all memory before the clock starts."""
    before = kv.clone()
    for name in ("raw", "quantised"):
        subjects["store", name]()
    kv.zero_()
    subjects["load", "quantised"]()
    if (kv.float() - before.float()).abs().max() > 0.05:
        raise RuntimeError("8-bit KV that comes back is not what was stored")
    kv.zero_()
    subjects["load", "raw"]()
    if not torch.equal(kv, before):
        raise RuntimeError("copied KV that comes back is not what was stored")
