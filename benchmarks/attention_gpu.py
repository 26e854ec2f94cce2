"""What does attention to paged KV cost on a GPU, partly in INT8, and how far is our kernel from vLLM's and from memory?

One layer of Llama-3.1-8B in bfloat16, pages as vLLM lays them out on CUDA, in random order, every request with the same
context; queries of 1 token (decode), 8 and 64. Subjects take turns: ours over pages, ours with all KV in INT8, and
vLLM's unified attention, as its Triton backend calls it. Timed by the device's events; reported are the median, and
the median ratio of neighbouring turns with its quartiles. Memory's limit is a copy on the device, which reads and
writes every byte. First each subject is compared with the definition, on a short context.

Needs a GPU, torch, Triton and numpy; vLLM's subject is left out where vLLM is not installed:

    python benchmarks/attention_gpu.py --quick
    python benchmarks/attention_gpu.py --out benchmarks/results/attention_gpu.json
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import checkout  # noqa: F401 - before all that it makes importable
import numpy as np
import on_gpu
import torch
from turns import Seconds, check_output, ratio

from vllm_ext.kernels.kv_quant import gpu as codec
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kernels.paged_attention import PagedKV, Ranges, gpu, reference
from vllm_ext.observability.results import (
    Goal,
    Result,
    Workload,
    command,
    emit,
    format_table,
)

OWN, INT8, UNIFIED = "own", "own_int8", "vllm_unified"
QUERIES = (1, 8, 64)
_MISSED = "measured once on this device; see the quartiles"


@dataclass(frozen=True)
class Shape:
    """One step."""

    batch: int
    query: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 32
    dtype: torch.dtype = torch.bfloat16

    @property
    def blocks(self) -> int:
        """Blocks of all requests."""
        return self.batch * self.context // self.block

    @property
    def layout(self) -> PageLayout:
        """Of a page."""
        return PageLayout.tokens_first(self.dtype, self.kv_heads, self.dim, self.block)


class Step:
    """The memory of a step, and what attends to it."""

    def __init__(self, shape: Shape, device: str, seed: int) -> None:
        self.shape, self._scale = shape, shape.dim**-0.5
        generator = torch.Generator(device).manual_seed(seed)
        layout, tokens = shape.layout, shape.batch * shape.query
        pages = torch.randn(shape.blocks, layout.page_elements, device=device, generator=generator).to(shape.dtype)
        ids = torch.arange(shape.blocks, device=device)
        self.fmt = RecordFormat(layout)
        records = torch.zeros(shape.blocks, self.fmt.record_bytes, dtype=torch.uint8, device=device)
        codec.quantise(pages, ids, records, ids, self.fmt)
        self.kv = PagedKV(layout, pages, records)
        order = torch.randperm(shape.blocks, device=device, generator=generator).to(torch.int32)
        self._table = order.view(shape.batch, -1).contiguous()
        self._query = torch.randn(tokens, shape.heads, shape.dim, device=device, generator=generator).to(shape.dtype)
        self._out = torch.empty_like(self._query)
        self._start = torch.arange(0, tokens + 1, shape.query, dtype=torch.int32, device=device)
        self._lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
        self._processors = 0 if device == "cuda" else 4

    def own(self, *, int8: bool) -> Callable[[], torch.Tensor]:
        """Our kernel, over pages or over records."""
        ranges = Ranges.from_block_table(self._start, self._lens, self._table + self.shape.blocks * int8)
        kv = self.kv if int8 else PagedKV(self.kv.layout, self.kv.pages)

        def call() -> torch.Tensor:
            gpu.attend(
                self._query, kv, ranges, self._out, scale=self._scale, num_tokens=len(self._query),
                longest=self.shape.context, processors=self._processors,
            )  # fmt: skip
            return self._out

        return call

    def unified(self) -> Callable[[], torch.Tensor]:
        """vLLM's Triton kernel, with the buffers that its backend gives it."""
        from vllm.v1.attention.backends.triton_attn import MIN_LAUNCH_GRID_SIZE_2D, NUM_PAR_SOFTMAX_SEGMENTS
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        shape, most = self.shape, MIN_LAUNCH_GRID_SIZE_2D // self.shape.kv_heads
        cache = self.kv.pages.view(shape.blocks, shape.block, shape.kv_heads, 2 * shape.dim)
        sums = torch.empty(most, shape.heads, NUM_PAR_SOFTMAX_SEGMENTS, dtype=torch.float32, device=cache.device)
        outputs, maxima = sums.new_empty(*sums.shape, 1 << (shape.dim - 1).bit_length()), torch.empty_like(sums)

        def call() -> torch.Tensor:
            unified_attention(
                q=self._query, k=cache[..., : shape.dim], v=cache[..., shape.dim :], out=self._out,
                cu_seqlens_q=self._start, max_seqlen_q=shape.query, seqused_k=self._lens, max_seqlen_k=shape.context,
                softmax_scale=self._scale, causal=True, window_size=(-1, -1), block_table=self._table, softcap=0.0,
                q_descale=None, k_descale=None, v_descale=None, seq_threshold_3D=most,
                num_par_softmax_segments=NUM_PAR_SOFTMAX_SEGMENTS, softmax_segm_output=outputs,
                softmax_segm_max=maxima, softmax_segm_expsum=sums,
            )  # fmt: skip
            return self._out

        return call

    def subjects(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Return all that can run here."""
        found = {OWN: self.own(int8=False), INT8: self.own(int8=True)}
        if self.kv.pages.is_cuda and importlib.util.find_spec("vllm"):
            found[UNIFIED] = self.unified()
        return found

    def check(self) -> None:
        """Compare every subject with the definition.

        Raises:
            RuntimeError: one is off.
        """
        assert self.kv.records is not None
        kv = PagedKV(self.kv.layout, self.kv.pages.cpu(), self.kv.records.cpu())
        for name, subject in self.subjects().items():
            table = (self._table + self.shape.blocks * (name == INT8)).cpu()
            ranges = Ranges.from_block_table(self._start.cpu(), self._lens.cpu(), table)
            wanted, _ = reference.paged_attention(self._query.cpu(), kv, ranges, scale=self._scale)
            check_output(f"{name} on {self.kv.pages.device}", subject().cpu(), wanted)

    def bytes_read(self, name: str) -> int:
        """Return the bytes of KV that a subject has to read."""
        return self.shape.blocks * (self.fmt.record_bytes if name == INT8 else self.kv.layout.page_bytes)


def limit_gb_per_s(mib: int, repeats: int, device: str) -> float:
    """Return the bytes that a copy on the device reads and writes per second, in 1e9."""
    source = torch.empty(mib * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = on_gpu.measure({"copy": lambda: target.copy_(source)}, repeats, device, skipped=1)
    return 2 * source.numel() / float(min(times["copy"])) / 1e9


def goals(query: int, times: dict[str, Seconds], share: float) -> list[Goal]:
    """Return what was hoped for of the longest context."""
    made = []

    def judge(metric: str, value: float, goal: float, note: str) -> None:
        made.append(Goal(metric=f"q{query}_{metric}", value=round(value, 3), op=">=", goal=goal, note=note))

    if query == 1:
        faster, low, high = ratio(times, OWN, INT8)
        judge("bf16_over_int8_time", faster, 1.6, f"quartiles {low:.2f} to {high:.2f}; {_MISSED}")
        judge("own_share_of_memory_limit", share, 0.85, _MISSED)
    elif UNIFIED in times:
        faster, low, high = ratio(times, UNIFIED, OWN)
        judge("unified_over_own_time", faster, 1.2, f"quartiles {low:.2f} to {high:.2f}; {_MISSED}")
    return made


def main(argv: Sequence[str]) -> int:
    """Measure, print, and return the exit status."""
    args = on_gpu.parse(__doc__, argv)
    device = "cpu" if args.dry else "cuda"
    tiny: dict[str, Any] = (
        {"heads": 4, "kv_heads": 2, "dim": 16, "block": 16, "dtype": torch.float16} if args.dry else {}
    )
    contexts = (32,) if args.dry else (4096,) if args.quick else (4096, 32768)
    batch, queries, repeats = (1, (1, 8), 1) if args.dry else (8, QUERIES, 5 if args.quick else 21)
    limit = limit_gb_per_s(1 if args.dry else 2048, repeats, device)
    metrics: dict[str, float] = {}
    baselines = {"memory": {"read_and_written_gb_per_s": round(limit, 2)}}
    judged: list[Goal] = []
    lines: list[list[Any]] = []
    for query in queries:
        Step(Shape(2, query, 32 if args.dry else 512, **tiny), device, args.seed).check()
        for context in contexts:
            step = Step(Shape(batch, query, context, **tiny), device, args.seed)
            times = on_gpu.measure(step.subjects(), repeats, device, skipped=2)
            speeds = {name: step.bytes_read(name) / float(np.median(found)) / 1e9 for name, found in times.items()}
            for name, found in times.items():
                milliseconds = round(float(np.median(found)) * 1e3, 4)
                target = baselines.setdefault("vllm", {}) if name == UNIFIED else metrics
                target[f"q{query}_{context}_{name}_ms"] = milliseconds
                lines.append([query, context, name, milliseconds, *ratio(times, name, OWN), speeds[name] / limit])
            if not args.dry and context == contexts[-1]:
                judged += goals(query, times, speeds[OWN] / limit)
    config = {
        "device": "interpreter" if args.dry else torch.cuda.get_device_name(), "contexts": contexts, "batch": batch,
        "queries": queries, "repeats": repeats, "dry": args.dry, "quick": args.quick,
    }  # fmt: skip
    digest = hashlib.sha256(repr((sorted(config.items()), args.seed)).encode()).hexdigest()
    result = Result(
        name="attention_gpu",
        command=command(argv, "benchmarks/attention_gpu.py"),
        config=config,
        seed=args.seed,
        workload=Workload(name="random numbers", rows=len(lines), sha256=digest),
        metrics=metrics,
        baselines=baselines,
        goals=judged,
    )
    header = ["queries", "context", "subject", "ms", "time / own", "q1", "q3", "of memory's limit"]
    emit(result, [format_table(header, lines)], args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
