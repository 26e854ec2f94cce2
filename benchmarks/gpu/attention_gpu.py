"""What does attention to paged KV cost on a GPU, partly in INT8, and how far is our kernel from vLLM's and from memory?

One layer of Llama-3.1-8B in bfloat16, pages as vLLM lays them out on CUDA, in random order. Cells are written as
64q1s4k: 64 sequences, each with 1 query token and 4k of KV; an "r" behind it means log-normal lengths with that mean.
Subjects: ours over pages, ours with all KV in INT8, the same with fewer warps, FlashAttention 3, which vLLM takes on
Hopper, vLLM's Triton kernel, and xformers' split-K operator over paged masks, which wants blocks of 64 tokens (a cell
with "b64") and short queries.
Calls are captured in a CUDA graph, as a server's decode steps are, over KV that no cache holds; they are timed
by the device's events, by turns, and the median ratio of neighbouring turns is given with its quartiles. Memory's limit
is a copy on the device, which reads and writes every byte. First each subject is compared with the definition. The
result is written after every cell. One of the others that fails is named with its error, and left out of the rest.

Needs a GPU, torch, Triton and numpy; what vLLM and xformers bring is left out where they are not installed:

    python benchmarks/gpu/attention_gpu.py --quick
    python benchmarks/gpu/attention_gpu.py --out benchmarks/results/attention_gpu.json
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import checkout  # noqa: F401 - before all that it makes importable
import numpy as np
import on_gpu
import torch
from findings import Findings

from vllm_ext.kernels.kv_quant import gpu as codec
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kernels.paged_attention import PagedKV, Ranges, gpu, reference
from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Workload, command
from vllm_ext.report.table import Table
from vllm_ext.report.timing import Seconds, captured, check_output, measure, ratio

OWN, INT8, FLASH, UNIFIED, XFORMERS = "own", "own_int8", "flash_attn_3", "triton_unified", "xformers_split_k"
RIVALS = (FLASH, UNIFIED, XFORMERS)
WARPS = {f"{INT8}_{warps}_warps": warps for warps in (1, 2)}
"""Subjects with other launch options than ours, which are not claimed of: with four warps a turn of the loop over INT8
waits at 22 barriers (sm_90), with one at two."""
Calls = list[Callable[[], torch.Tensor]]
"""Of one subject, for every copy of the KV."""
_UNCACHED_BYTES = 512 * 2**20
"""KV that one replay reads at least: ten times what an H100's cache holds."""
_BLOCK = 32
_XFORMERS_BLOCK, _XFORMERS_QUERY = 64, 16
_MAX_SPLITS = 32
"""Of FlashAttention 3 in a captured graph: vLLM's default."""
_MISSED = "see the quartiles"
_LAUNCH_OPTIONS = gpu.launch_options
_SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": 16, "block": 16, "dtype": torch.float16}


@dataclass(frozen=True)
class Cell:
    """One step."""

    batch: int
    query: int
    context: int
    ragged: bool = False
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = _BLOCK
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """Short, for tables and metrics."""
        length = f"{self.context // 1024}k" if self.context >= 1024 else str(self.context)
        block = "" if self.block in (_BLOCK, _SMALL["block"]) else f"b{self.block}"
        return f"{self.batch}q{self.query}s{length}{'r' if self.ragged else ''}{block}"

    @property
    def layout(self) -> PageLayout:
        """Of a page."""
        return PageLayout.tokens_first(self.dtype, self.kv_heads, self.dim, self.block)

    def lengths(self, seed: int) -> list[int]:
        """Return the tokens of each sequence."""
        if not self.ragged:
            return [self.context] * self.batch
        found = np.random.default_rng(seed).lognormal(0.0, 1.0, self.batch)
        return [max(self.query, int(length)) for length in found * self.context / found.mean()]


CELLS = (
    *(Cell(batch, 1, context) for batch in (1, 8, 64) for context in (4096, 32768)),
    Cell(64, 1, 4096, ragged=True),
    Cell(64, 1, 4096, block=_XFORMERS_BLOCK),
    Cell(8, 8, 32768),
    Cell(1, 4096, 4096),
)
CHECKED = (
    Cell(3, 1, 700, ragged=True), Cell(2, 8, 500), Cell(1, 100, 300), Cell(2, 1, 700, block=_XFORMERS_BLOCK)
)  # fmt: skip
TINY = (Cell(1, 1, 32, **_SMALL), Cell(2, 8, 64, **_SMALL))
"""For a try without a GPU."""


class Step:
    """The memory of a step, as often as it takes for no cache to hold it, and what attends to it."""

    def __init__(self, cell: Cell, device: str, seed: int, uncached_bytes: int = 0) -> None:
        self.cell, self._scale = cell, cell.dim**-0.5
        generator, layout = torch.Generator(device).manual_seed(seed), cell.layout
        self.lengths = cell.lengths(seed)
        counts = [-(-length // cell.block) for length in self.lengths]
        self.blocks, width = sum(counts), max(counts)
        self.copies = max(1, -(-uncached_bytes // (self.blocks * layout.page_bytes)))
        total = self.blocks * self.copies
        pages = torch.empty(total, layout.page_elements, dtype=cell.dtype, device=device).normal_(generator=generator)
        ids = torch.arange(total, device=device)
        self.fmt = RecordFormat(layout)
        int8_blocks = torch.zeros(total, self.fmt.record_bytes, dtype=torch.uint8, device=device)
        codec.quantise(pages, ids, int8_blocks, ids, self.fmt)
        self.kv = PagedKV(layout, pages, int8_blocks)
        order = torch.randperm(total, device=device, generator=generator).to(torch.int32).view(self.copies, -1)
        self._tables = torch.zeros(self.copies, cell.batch, width, dtype=torch.int32, device=device)
        ends = np.cumsum(counts)
        for row, (count, end) in enumerate(zip(counts, ends.tolist(), strict=True)):
            self._tables[:, row, :count] = order[:, end - count : end]
        tokens = cell.batch * cell.query
        query = torch.empty(tokens, cell.heads, cell.dim, dtype=cell.dtype, device=device)
        self._query, self._out = query.normal_(generator=generator), torch.empty_like(query)
        self._start = torch.arange(0, tokens + 1, cell.query, dtype=torch.int32, device=device)
        self._lens = torch.tensor(self.lengths, dtype=torch.int32, device=device)

    def own(self, *, int8: bool, warps: int = 0) -> Calls:
        """Our kernel, over pages or over blocks in INT8; a step is divided once for all layers, so not in a call.

        Args:
            int8: Over blocks in INT8.
            warps: Of a program; 0: as many as it has in a server.
        """
        kv = self.kv if int8 else PagedKV(self.kv.layout, self.kv.pages)
        sizes = {"num_heads": self.cell.heads, "num_tokens": len(self._query), "max_query_len": self.cell.query}

        def calls() -> Iterator[Callable[[], torch.Tensor]]:
            for table in self._tables + self.kv.num_blocks * int8:
                step = gpu.divide(Ranges.from_block_table(self._start, self._lens, table), kv.layout, **sizes)
                yield lambda step=step: self._attended(kv, step, warps)

        return list(calls())

    def _attended(self, kv: PagedKV, step: gpu.Step, warps: int) -> torch.Tensor:
        def options(*args: Any, **kwargs: Any) -> dict[str, int]:
            return {**_LAUNCH_OPTIONS(*args, **kwargs), **({"num_warps": warps} if warps else {})}

        with mock.patch.object(gpu, "launch_options", options):
            gpu.attend(self._query, kv, step, self._out, scale=self._scale)
        return self._out

    def _vllms_cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        cell = self.cell
        cache = self.kv.pages.view(-1, cell.block, cell.kv_heads, 2 * cell.dim)
        return cache[..., : cell.dim], cache[..., cell.dim :]

    def flash(self) -> Calls:
        """FlashAttention 3 as vLLM's backend calls it, with its schedule made once for all layers."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        cell, (key, value), longest = self.cell, self._vllms_cache(), max(self.lengths)
        schedule = get_scheduler_metadata(
            batch_size=cell.batch, max_seqlen_q=cell.query, max_seqlen_k=longest, num_heads_q=cell.heads,
            num_heads_kv=cell.kv_heads, headdim=cell.dim, cache_seqlens=self._lens, qkv_dtype=cell.dtype,
            cu_seqlens_q=self._start, page_size=cell.block, causal=True, num_splits=_MAX_SPLITS,
        )  # fmt: skip

        def attended(table: torch.Tensor) -> torch.Tensor:
            flash_attn_varlen_func(
                q=self._query, k=key, v=value, out=self._out, cu_seqlens_q=self._start, max_seqlen_q=cell.query,
                seqused_k=self._lens, max_seqlen_k=longest, softmax_scale=self._scale, causal=True, block_table=table,
                scheduler_metadata=schedule, fa_version=3, num_splits=_MAX_SPLITS,
            )  # fmt: skip
            return self._out

        return [lambda table=table: attended(table) for table in self._tables]

    def unified(self) -> Calls:
        """vLLM's Triton kernel, with the buffers that its backend gives it."""
        from vllm.v1.attention.backends.triton_attn import MIN_LAUNCH_GRID_SIZE_2D, NUM_PAR_SOFTMAX_SEGMENTS
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        cell, (key, value), most = self.cell, self._vllms_cache(), MIN_LAUNCH_GRID_SIZE_2D // self.cell.kv_heads
        sums = torch.empty(most, cell.heads, NUM_PAR_SOFTMAX_SEGMENTS, dtype=torch.float32, device=key.device)
        outputs, maxima = sums.new_empty(*sums.shape, 1 << (cell.dim - 1).bit_length()), torch.empty_like(sums)

        def attended(table: torch.Tensor) -> torch.Tensor:
            unified_attention(
                q=self._query, k=key, v=value, out=self._out, cu_seqlens_q=self._start, max_seqlen_q=cell.query,
                seqused_k=self._lens, max_seqlen_k=max(self.lengths), softmax_scale=self._scale, causal=True,
                window_size=(-1, -1), block_table=table, softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
                seq_threshold_3D=most, num_par_softmax_segments=NUM_PAR_SOFTMAX_SEGMENTS,
                softmax_segm_output=outputs, softmax_segm_max=maxima, softmax_segm_expsum=sums,
            )  # fmt: skip
            return self._out

        return [lambda table=table: attended(table) for table in self._tables]

    def xformers(self) -> Calls:
        """xformers' Triton operator, which has KV heads apart from the query heads that share them."""
        from xformers.ops import fmha

        cell, heads, group = self.cell, self.cell.kv_heads, self.cell.heads // self.cell.kv_heads
        key, value = (
            half.reshape(1, -1, heads, 1, cell.dim).expand(-1, -1, -1, group, -1) for half in self._vllms_cache()
        )
        query = self._query.view(1, -1, heads, group, cell.dim)

        def attended(mask: Any) -> torch.Tensor:
            found: torch.Tensor = fmha.memory_efficient_attention_forward(
                query, key, value, attn_bias=mask, scale=self._scale, op=fmha.triton_splitk.FwOp
            )
            return found.view_as(self._query)

        kind = fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        masks = [kind.from_seqlens([cell.query] * cell.batch, self.lengths, t, cell.block) for t in self._tables]
        return [lambda mask=mask: attended(mask) for mask in masks]

    def subjects(self) -> dict[str, Callable[[], Calls]]:
        """Return what makes the calls of all that can run here."""
        found = {OWN: functools.partial(self.own, int8=False), INT8: functools.partial(self.own, int8=True)}
        return {**found, **self._rivals()}

    def _rivals(self) -> dict[str, Callable[[], Calls]]:
        cell, found = self.cell, dict[str, Callable[[], Calls]]()
        if not self.kv.pages.is_cuda:
            return {}
        found |= {name: functools.partial(self.own, int8=True, warps=warps) for name, warps in WARPS.items()}
        if importlib.util.find_spec("vllm"):
            found[UNIFIED] = self.unified
            if torch.cuda.get_device_capability() == (9, 0):
                found[FLASH] = self.flash
        fits = cell.block % _XFORMERS_BLOCK == 0 and cell.query <= _XFORMERS_QUERY and not cell.ragged
        if fits and importlib.util.find_spec("xformers"):
            found[XFORMERS] = self.xformers
        return found

    def outputs(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a subject computes, over memory that was NaN, and what the definition does."""
        assert self.kv.records is not None
        kv = PagedKV(self.kv.layout, self.kv.pages.cpu(), self.kv.records.cpu())
        table = (self._tables[0] + self.kv.num_blocks * name.startswith(INT8)).cpu()
        ranges = Ranges.from_block_table(self._start.cpu(), self._lens.cpu(), table)
        wanted, _ = reference.paged_attention(self._query.cpu(), kv, ranges, scale=self._scale)
        self._out.fill_(torch.nan)
        return self.subjects()[name]()[0]().cpu(), wanted

    def bytes_read(self, name: str) -> int:
        """Return the bytes of KV that a call of a subject has to read."""
        return self.blocks * (self.fmt.record_bytes if name.startswith(INT8) else self.kv.layout.page_bytes)


def limit_gb_per_s(mib: int, repeats: int, device: str) -> float:
    """Return the bytes that a copy on the device reads and writes per second, in 1e9."""
    source = torch.empty(mib * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = measure({"copy": lambda: target.copy_(source)}, repeats, device=device, skipped=1)
    return 2 * source.numel() / float(min(times["copy"])) / 1e9


def check(cell: Cell, device: str, found: Findings) -> None:
    """Compare every subject with the definition: ours that is off is wrong, one of the others has failed."""
    step = Step(cell, device, found.seed)
    for name in step.subjects():
        outputs = None if name in found.failed else found.attempt(name, functools.partial(step.outputs, name))
        if outputs is None:
            continue
        try:
            check_output(f"{name} of {cell.name}", *outputs)
        except RuntimeError as error:
            if name in RIVALS:
                found.failed[name] = str(error)
            else:
                found.wrong.append(str(error))


def measured(cell: Cell, repeats: int, device: str, found: Findings) -> tuple[Step, dict[str, Seconds]]:
    """Return the seconds of a call of each subject that has not failed, by turns."""
    step = Step(cell, device, found.seed, _UNCACHED_BYTES if device == "cuda" else 0)
    replayed = {}
    for name, calls in step.subjects().items():
        if name not in found.failed:
            replay = found.attempt(name, lambda calls=calls: captured(calls(), device))
            replayed |= {name: replay} if replay else {}
    times = measure(replayed, repeats, device=device, skipped=2)
    return step, {name: taken / step.copies for name, taken in times.items()}


def claims(cell: Cell, times: dict[str, Seconds], share: float) -> list[Claim]:
    """Return what was hoped for of one cell."""
    made = []

    def judge(one: str, other: str, op: str, goal: float) -> None:
        if one in times:
            found, low, high = ratio(times, one, other)
            note = f"quartiles {low:.2f} to {high:.2f}; {_MISSED}"
            made.append(
                Claim(name=f"{cell.name}_{one}_over_{other}_time", value=round(found, 3), op=op, goal=goal, facts=note)
            )

    if cell.query == 1 and cell.batch * cell.context >= 64 * 4096:
        judge(OWN, INT8, ">=", 1.6)
        judge(FLASH, OWN, ">=", 0.85)
        metric = f"{cell.name}_own_share_of_memory_limit"
        made.append(Claim(name=metric, value=round(share, 3), op=">=", goal=0.7, facts=_MISSED))
    if cell.query == 8:
        judge(UNIFIED, OWN, ">=", 1.2)
    return made


class Lines:
    """Of cells, and what becomes of them in a result."""

    header = ("cell", "subject", "us", "time / own", "q1", "q3", "of memory's limit")

    def __init__(self, found: Findings, limit_gb_per_s: float) -> None:
        self._found, self._limit = found, limit_gb_per_s
        self.rows: list[list[Any]] = []

    def add(self, step: Step, times: dict[str, Seconds], *, is_judged: bool) -> None:
        """Take in the times of a cell."""
        cell, found = step.cell, self._found
        shares = {name: step.bytes_read(name) / float(np.median(t)) / 1e9 / self._limit for name, t in times.items()}
        for name, taken in times.items():
            microseconds = round(float(np.median(taken)) * 1e6, 2)
            target = found.baselines.setdefault(name, {}) if name in RIVALS else found.metrics
            target[f"{cell.name}_{name}_us"] = microseconds
            over_own = ratio(times, name, OWN) if OWN in times else (None, None, None)
            self.rows.append([cell.name, name, microseconds, *over_own, shares[name]])
        if is_judged and {OWN, INT8} <= times.keys():
            found.claims += claims(cell, times, shares[OWN])
        found.write()


def main(argv: Sequence[str]) -> int:
    """Measure, print, and return the exit status: 1 if our kernel is wrong, 3 if a subject failed."""
    args = on_gpu.parsed(on_gpu.argument_parser(__doc__), argv)
    device = "cpu" if args.dry else "cuda"
    checked, cells, repeats = (TINY, TINY, 1) if args.dry else (CHECKED, CELLS, 7 if args.quick else 31)
    config = {
        "device": "interpreter" if args.dry else torch.cuda.get_device_name(), "repeats": repeats, "dry": args.dry,
        "quick": args.quick, "cells": [cell.name for cell in cells],
    }  # fmt: skip
    digest = hashlib.sha256(repr((sorted(config.items()), args.seed)).encode()).hexdigest()
    found = Findings(
        name="attention_gpu", command=command(argv, __file__), config=config, seed=args.seed,
        workload=Workload(name="random numbers", rows=len(cells), sha256=digest), out=args.out,
    )  # fmt: skip
    for cell in checked:
        found.attempt(f"check of {cell.name}", functools.partial(check, cell, device, found))
    if found.wrong:
        return found.end(found.wrong)
    limit = limit_gb_per_s(1 if args.dry else 2048, repeats, device)
    found.baselines["memory"] = {"read_and_written_gb_per_s": round(limit, 2)}
    lines = Lines(found, limit)
    for cell in cells:
        if made := found.attempt(cell.name, functools.partial(measured, cell, repeats, device, found)):
            lines.add(*made, is_judged=not args.dry)
        del made
    return found.end([Table(lines.header, lines.rows)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
