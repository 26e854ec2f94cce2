"""Ways to attend from several query tokens of each request to its paged history. See `attention.py`.

All of them compute the same step: of each request the last tokens are queries, and K and V of everything lie in pages,
in random order. A share of the blocks may be in INT8, every so many blocks one.

- `own`: our kernel, which reads pages and records where they are.
- `stock`: vLLM's ``CPU_ATTN``. It reads no records.
- `unpacked`: records are dequantised into pages first, then `stock`; as without a kernel of ours.
- `two_passes`: our kernel over the blocks as they are, then over the records, merged by log-sum-exp.
- `copied_out`: pages are copied into contiguous memory, then torch's SDPA. Pensieve's first straw man.
- `single_tokens`: one row of vLLM's kernel for each query token. Pensieve's second straw man.
- `contiguous`: torch's SDPA on K and V that lie in contiguous memory already. Pensieve's ideal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_ext.attention.measure import halves, paged
from vllm_ext.kernels.kv_quant import cpu as codec
from vllm_ext.kernels.kv_quant.format import RecordFormat
from vllm_ext.kernels.paged_attention import Ranges, cpu

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 32
"""Of one layer of Llama-3.1-8B, and the tokens of a block."""
SCALE = HEAD_DIM**-0.5
STRAW_MEN = ("copied_out", "single_tokens")


@dataclass(frozen=True)
class Shape:
    """One step."""

    batch: int
    query: int
    """Tokens of each request."""
    context: int
    """Tokens of each history, with those of the query."""

    @property
    def blocks(self) -> int:
        """Blocks of all requests."""
        return self.batch * self.context // BLOCK


class Step:
    """The memory of a step, and what attends to it.

    Args:
        shape: Of the step.
        seed: Of its numbers and of the order of blocks.
        contiguous: Whether K and V lie in contiguous memory as well.
    """

    def __init__(self, shape: Shape, seed: int, *, contiguous: bool) -> None:
        self.shape = shape
        self._generator = torch.Generator().manual_seed(seed)
        self.isa = _get_attn_isa(torch.bfloat16, BLOCK, HEAD_DIM)
        self.cache = torch.zeros(2 * shape.blocks, KV_HEADS, BLOCK, 2 * HEAD_DIM, dtype=torch.bfloat16)
        order = torch.randperm(shape.blocks, generator=self._generator).to(torch.int32)
        self.table = order.view(shape.batch, -1).contiguous()
        self.fmt = RecordFormat(paged(self.cache).layout)
        self.records = torch.zeros(shape.blocks, self.fmt.record_bytes, dtype=torch.uint8)
        self.contiguous = torch.empty(0)
        if contiguous:
            self.contiguous = torch.empty(2, shape.batch, KV_HEADS, shape.context, HEAD_DIM, dtype=torch.bfloat16)
        self._fill()
        tokens = shape.batch * shape.query
        self.query = self._numbers(tokens, HEADS, HEAD_DIM)
        self.out = torch.empty_like(self.query)
        self.start = torch.arange(0, tokens + 1, shape.query, dtype=torch.int32)
        self.seq_lens = torch.full((shape.batch,), shape.context, dtype=torch.int32)
        self.kv = paged(self.cache, self.records)

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).bfloat16()

    def _fill(self) -> None:
        pages = np.arange(self.shape.blocks)
        for row, ids in enumerate(self.table.long()):
            key, value = (self._numbers(self.shape.context, KV_HEADS, HEAD_DIM) for _ in range(2))
            slots = (ids[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
            cpu.write(key, value, paged(self.cache), slots)
            if len(self.contiguous):
                self.contiguous[0, row], self.contiguous[1, row] = key.transpose(0, 1), value.transpose(0, 1)
        holds = codec.quantise(paged(self.cache).pages, pages, self.records, pages, self.fmt)
        if not holds.all():
            raise RuntimeError("a block of finite numbers has no record")

    def is_int8(self, share: float) -> torch.Tensor:
        """Return which blocks of the table are in INT8, spread evenly, [batch, blocks]."""
        at = torch.arange(self.table.shape[1])
        return ((at + 1) * share).floor().gt((at * share).floor()).expand_as(self.table)

    def table_with(self, share: float) -> torch.Tensor:
        """Return the block table in which a share of the blocks are records."""
        return torch.where(self.is_int8(share), self.table + len(self.cache), self.table).contiguous()

    def bytes_read(self, share: float = 0.0) -> float:
        """Return bytes of KV that a step reads at least, as they are kept."""
        int8 = int(self.is_int8(share).sum())
        return float(int8 * self.fmt.record_bytes + (self.shape.blocks - int8) * self.fmt.layout.page_bytes)

    # --- what is measured -----------------------------------------------------------------------------------------

    def own(self, share: float = 0.0) -> Callable[[], torch.Tensor]:
        """Our kernel."""
        attend = cpu.CpuAttention(self.kv, HEADS, scale=SCALE)
        ranges = Ranges.from_block_table(self.start, self.seq_lens, self.table_with(share))

        def call() -> torch.Tensor:
            attend(self.query, ranges, self.out)
            return self.out

        return call

    def stock(self, table: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
        """vLLM's kernel; by default over pages as they are."""
        return self._stock(self.start, self.seq_lens, self.table if table is None else table)

    def _stock(self, start: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor) -> Callable[[], torch.Tensor]:
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(seq_lens), num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, seq_lens=seq_lens,
            dtype=torch.bfloat16, query_start_loc=start, causal=True, sliding_window_size=-1, isa=self.isa,
            enable_kv_split=True,
        )  # fmt: skip

        def call() -> torch.Tensor:
            ops.cpu_attention_with_kv_cache(
                self.query, *halves(self.cache), self.out, start, seq_lens, SCALE, True, None, -1, table, 0.0,
                metadata, None,
            )  # fmt: skip
            return self.out

        return call

    def single_tokens(self) -> Callable[[], torch.Tensor]:
        """A row of vLLM's kernel for each query token."""
        query = self.shape.query
        behind = torch.arange(query - 1, -1, -1, dtype=torch.int32)
        seq_lens = (self.seq_lens[:, None] - behind).flatten()
        start = torch.arange(len(seq_lens) + 1, dtype=torch.int32)
        return self._stock(start, seq_lens, self.table.repeat_interleave(query, 0))

    def unpacked(self, share: float) -> Callable[[], torch.Tensor]:
        """Records are dequantised into the pages of the cache's second half, which vLLM's kernel then reads."""
        chosen, first = self.is_int8(share), self.shape.blocks
        records = self.table[chosen].long().numpy()
        scratch = np.arange(first, first + len(records))
        table = self.table.clone()
        table[chosen] = torch.from_numpy(scratch).to(torch.int32)
        stock, pages = self.stock(table), paged(self.cache).pages

        def call() -> torch.Tensor:
            codec.dequantise(self.records, records, pages, scratch, self.fmt)
            return stock()

        return call

    def two_passes(self, share: float) -> Callable[[], torch.Tensor]:
        """Our kernel over pages, then over records, whose last block the pages keep; merged by log-sum-exp."""
        chosen = self.is_int8(share).clone()
        chosen[:, -1] = False  # a pass sees all of its KV but for the newest, which is causal
        outs, lses = torch.empty(2, *self.query.shape, dtype=torch.bfloat16), torch.empty(2, *self.query.shape[:2])
        passes = [self._part(~chosen, 0), self._part(chosen, len(self.cache))]
        attend = cpu.CpuAttention(self.kv, HEADS, scale=SCALE)

        def call() -> torch.Tensor:
            for ranges, out, lse in zip(passes, outs, lses, strict=True):
                attend(self.query, ranges, out, lse)
            weight = torch.sigmoid(lses[0] - lses[1])[..., None]
            self.out.copy_(weight * outs[0] + (1 - weight) * outs[1])
            return self.out

        return call

    def _part(self, chosen: torch.Tensor, first_id: int) -> Ranges:
        """Return ranges over the chosen blocks; the queries see all of them, up to their own positions in the last."""
        ids = (self.table[chosen] + first_id).view(self.shape.batch, -1).contiguous()
        kv_len = torch.full_like(self.seq_lens, ids.shape[1] * BLOCK)
        ranges = Ranges.from_block_table(self.start, kv_len, ids)
        if first_id:  # records: history only
            ranges.q_position.fill_(self.shape.context)
        return ranges

    def copied_out(self) -> Callable[[], torch.Tensor]:
        """Pages are copied into contiguous memory, request by request, then torch attends."""
        shape = (-1, KV_HEADS, HEAD_DIM, BLOCK)

        def call() -> torch.Tensor:
            for row, ids in enumerate(self.table):
                key, value = (half[ids] for half in halves(self.cache))
                keys = key.reshape(shape).permute(1, 0, 3, 2).reshape(KV_HEADS, -1, HEAD_DIM)
                self._sdpa(row, keys, value.transpose(0, 1).reshape(KV_HEADS, -1, HEAD_DIM))
            return self.out

        return call

    def contiguous_kv(self) -> Callable[[], torch.Tensor]:
        """Torch attends to what lies in contiguous memory."""

        def call() -> torch.Tensor:
            for row in range(self.shape.batch):
                self._sdpa(row, self.contiguous[0, row], self.contiguous[1, row])
            return self.out

        return call

    def _sdpa(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        tokens = slice(row * self.shape.query, (row + 1) * self.shape.query)
        position = torch.arange(self.shape.context - self.shape.query, self.shape.context)
        mask = torch.arange(self.shape.context) <= position[:, None]
        queries = self.query[tokens].transpose(0, 1)
        found = scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, scale=SCALE, enable_gqa=True
        )
        self.out[tokens] = found[0].transpose(0, 1)
