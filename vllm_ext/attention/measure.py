"""Times our kernel and vLLM's on this CPU, with the sizes of the model that is about to be served."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import vllm
from vllm import _custom_ops as ops

from vllm_ext.attention.kept_ratios import kept_or_measured
from vllm_ext.attention.plan import KernelPlan, Kind, plan_of
from vllm_ext.kernels import native
from vllm_ext.kernels.paged_attention import PagedKV, Ranges, cpu

_SHAPES = {Kind.DECODE: (4, 1, 1024), Kind.SHORT: (1, 16, 1024), Kind.PREFILL: (1, 256, 512)}
"""Requests, tokens of each query, and of each context, by kind of step."""
_REPEATS = 20
_SECONDS = 0.4
"""Of turns of one kind, beyond the second."""
_MOST_BYTES = 256 * 2**20
"""Of KV; larger models are measured on shorter contexts."""


@dataclass(frozen=True)
class Sizes:
    """What the time of attention depends on, besides the step."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    isa: str
    """Of vLLM's kernel."""


@functools.cache
def measured_plan(sizes: Sizes) -> KernelPlan:
    """Return which kernel is to serve each kind of step, as this start or an earlier one measured.

    Measuring takes less than two seconds. Who writes which pages is seen at each start: output depends on it.

    Raises:
        native.CompilerMissing, native.CompileError: there is no kernel of ours.
    """
    alike = pages_alike(sizes)
    ratios = kept_or_measured(_key(sizes), lambda: _ratios(sizes))
    plan = plan_of(ratios.by_kind, pages_alike=alike)
    return plan if ratios.kept_from is None else replace(plan, why=f"kept from {ratios.kept_from}: {plan.why}")


def _ratios(sizes: Sizes) -> dict[Kind, float]:
    ratios = {}
    for kind, (requests, query, context) in _SHAPES.items():
        stock, own = _calls(sizes, requests, query, _context(sizes, requests, context))
        ratios[kind] = _ratio(own, stock)
    return ratios


def _key(sizes: Sizes) -> dict[str, str]:
    """Return what the ratios depend on; the kernel's fingerprint stands for source, compiler and machine."""
    return {
        "sizes": repr(sizes),
        "steps": repr(_SHAPES),
        "threads": str(torch.get_num_threads()),
        "kernel": native.fingerprint(cpu.SOURCE, flags=cpu.FLAGS),
        "vllm": vllm.__version__,
    }


def pages_alike(sizes: Sizes) -> bool:
    """Whether vLLM's kernel writes the pages that ours reads; with AMX it packs them in its own way."""
    slots = torch.arange(sizes.block_size)
    key, value = (torch.randn(sizes.block_size, sizes.num_kv_heads, sizes.head_dim).to(sizes.dtype) for _ in range(2))
    stock, own = (torch.zeros(1, *_page_shape(sizes), dtype=sizes.dtype) for _ in range(2))
    ops.cpu_attn_reshape_and_cache(key, value, *halves(stock), slots, sizes.isa)
    cpu.write(key, value, paged(own), slots)
    return bool(torch.equal(stock, own))


def halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache of vLLM's shape [blocks, heads, tokens, 2 D] as its CPU operations want it."""
    blocks, heads, tokens, width = kv_cache.shape
    key, value = kv_cache.view(blocks, heads, 2 * tokens, width // 2).chunk(2, dim=2)
    return key, value


def paged(kv_cache: torch.Tensor, records: torch.Tensor | None = None) -> PagedKV:
    """Return the same cache as our kernel wants it.

    Raises:
        ValueError: a page is not contiguous, or the kernel has no code for its sizes.
    """
    blocks, heads, tokens, width = kv_cache.shape
    layout = cpu.layout_for(kv_cache.dtype, heads, width // 2, tokens)
    if kv_cache[0].is_contiguous():
        return PagedKV(layout, kv_cache.as_strided((blocks, layout.page_elements), (kv_cache.stride(0), 1)), records)
    raise ValueError(f"kv_cache: strides {kv_cache.stride()}: a page must be contiguous")


def _page_shape(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.num_kv_heads, sizes.block_size, 2 * sizes.head_dim


def _context(sizes: Sizes, requests: int, context: int) -> int:
    """Return how long a context may be for its KV to stay within bounds."""
    token_bytes: int = 2 * sizes.num_kv_heads * sizes.head_dim * sizes.dtype.itemsize * requests
    return max(2 * sizes.block_size, min(context, _MOST_BYTES // token_bytes))


def _calls(sizes: Sizes, requests: int, query: int, context: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a call of vLLM's kernel and one of ours for the same step."""
    blocks = -(-context // sizes.block_size)
    query = min(query, context)
    cache = torch.randn(requests * blocks, *_page_shape(sizes)).to(sizes.dtype)
    table = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
    queries = torch.randn(requests * query, sizes.num_heads, sizes.head_dim).to(sizes.dtype)
    start = torch.arange(0, requests * query + 1, query, dtype=torch.int32)
    seq_lens = torch.full((requests,), context, dtype=torch.int32)
    out, scale = torch.empty_like(queries), sizes.head_dim**-0.5
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=requests, num_heads=sizes.num_heads, num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim,
        seq_lens=seq_lens, dtype=sizes.dtype, query_start_loc=start, causal=True, sliding_window_size=-1,
        isa=sizes.isa, enable_kv_split=True,
    )  # fmt: skip

    def stock() -> None:
        ops.cpu_attention_with_kv_cache(
            queries, *halves(cache), out, start, seq_lens, scale, True, None, -1, table, 0.0, metadata, None
        )

    attend = cpu.CpuAttention(paged(cache), sizes.num_heads, scale=scale)
    ranges = Ranges.from_block_table(start, seq_lens, table)
    return stock, lambda: attend(queries, ranges, out)


def _ratio(one: Callable[[], None], other: Callable[[], None]) -> float:
    """Return the time of one call over that of the other, taken by turns.

    The least of each, since whatever else the machine does only adds; in wall time, which is what a step takes.
    """
    least = [math.inf, math.inf]
    end = time.perf_counter() + _SECONDS
    for turn in range(_REPEATS):
        for which, call in enumerate((one, other)):
            start = time.perf_counter()
            call()
            least[which] = min(least[which], time.perf_counter() - start)
        if turn and time.perf_counter() > end:
            break
    return least[0] / least[1]
