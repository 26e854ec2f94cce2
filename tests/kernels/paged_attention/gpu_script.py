"""Compares the Triton kernels with the definition; prints the errors, and those allowed, as JSON. Argument: the device.

Its own process, because Triton decides at import whether it interprets kernels (TRITON_INTERPRET=1, on the CPU).
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[3]))

from tests.kernels.paged_attention.batches import Batch, Range, budget, make_batch
from vllm_ext.kernels.kv_quant.format import PageLayout
from vllm_ext.kernels.paged_attention import PagedKV, Ranges, gpu, reference

SCALE = 0.25
FEW = gpu.DeviceLimits(processors=1, shared_bytes=gpu._ROOMY_BYTES)
MANY = gpu.DeviceLimits(processors=12, shared_bytes=0)
LAYOUTS = (PageLayout.rows, PageLayout.tokens_first)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of some shape."""

    ranges: list[Range]
    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    block: int = 16
    options: dict[str, float] = field(default_factory=dict)


DECODE = [Range(1, 1), Range(1, 16), Range(1, 17), Range(1, 70, int8="x."), Range(2, 200, int8=".x")]
LONG = [Range(1, 700, int8="xxxxxxxxxxxxxxxxxxxx.............."), Range(1, 31), Range(1, 520, int8="..x"), Range(0, 9)]
PREFILL = [Range(5, 5), Range(17, 33), Range(3, 40, int8="x"), Range(40, 300, int8="x.")]
GAP = [
    Range(6, 6),
    Range(4, 38, int8=".x"),
    Range(0, 20),
    Range(2, 0),
    Range(2, 20, position=5),
    Range(2, 9, position=-1),
]
CASES = {
    "decode": Case(ranges=DECODE),
    "decode of long sequences": Case(ranges=LONG),
    "one sequence": Case(ranges=[Range(1, 900)], heads=1, kv_heads=1),
    "prefill": Case(ranges=PREFILL),
    "gap": Case(ranges=GAP, dim=24),
    "all in INT8": Case(ranges=[Range(r.q_len, r.kv_len, int8="x") for r in LONG], block=32),
    "blocks of 128": Case(ranges=[Range(1, 300, int8="x."), Range(9, 130)], block=128, dim=32),
    "heads of 192": Case(
        ranges=[Range(1, 90, int8="x."), Range(9, 70, int8=".x")], heads=3, kv_heads=1, dim=192, block=64
    ),
    "heads of 256": Case(ranges=[Range(1, 90, int8="x."), Range(9, 70)], heads=2, kv_heads=1, dim=256, block=32),
    "17 heads share one": Case(ranges=DECODE, heads=17, kv_heads=1),
    "64 heads share one": Case(ranges=[Range(1, 300, int8="x."), Range(3, 40)], heads=64, kv_heads=1),
    "window": Case(ranges=[*PREFILL, *LONG], options={"window": 9}),
    "wide window": Case(ranges=LONG, options={"window": 300}),
    "softcap": Case(ranges=PREFILL, options={"softcap": 2.0}),
}


def errors(batch: Batch, device: str, limits: gpu.DeviceLimits | None, **options: float) -> dict[str, float]:
    """Attend to poisoned memory, and compare."""

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    query, kv = there(batch.query), PagedKV(batch.kv.layout, there(batch.kv.pages), there(batch.kv.records))
    ranges = Ranges(**{name: there(getattr(batch.ranges, name)) for name in Ranges.__dataclass_fields__})
    out, lse = torch.full_like(query, math.nan), torch.full(query.shape[:2], math.nan, device=device)
    sizes = {"num_heads": query.shape[1], "num_tokens": int(ranges.q_len.sum())}
    workspace = None
    if limits is not None:
        workspace = gpu.Workspace.for_steps(
            kv.layout, num_heads=query.shape[1], max_tokens=int(ranges.q_len.sum()), max_ranges=ranges.num_ranges,
            limits=limits, device=query.device,
        )  # fmt: skip
        workspace.partial.fill_(math.nan)
    step = gpu.divide(ranges, kv.layout, max_query_len=int(ranges.q_len.max()), workspace=workspace, **sizes)
    gpu.attend(query, kv, step, out, lse, scale=SCALE, **options)
    plain, expected = batch.plain, batch.plain_ranges
    wanted, wanted_lse = reference.paged_attention(batch.query, plain, expected, scale=SCALE, **options)
    inside = torch.zeros(len(query), dtype=torch.bool)
    for start, length in zip(expected.q_start.tolist(), expected.q_len.tolist(), strict=True):
        inside[start : start + length] = True
    found, found_lse = out.cpu().double(), lse.cpu().double()
    sees = inside[:, None] & wanted_lse.isfinite()
    return {
        "error": float((found[inside] - wanted[inside]).abs().max()),
        "allowed": budget(batch, wanted, scale=SCALE, **options),
        "lse_error": float((found_lse[sees] - wanted_lse[sees]).abs().max()),
        "written_besides": float((~found[~inside].isnan()).sum()),
        "infinite_lse_differs": float((found_lse[inside].isinf() != wanted_lse[inside].isinf()).sum()),
        "items_that_are_merged": float((step.workspace.merge_item[: step.grid.partials // 2] >= 0).sum()),
    }


def main(device: str) -> None:
    """Compare every case with few splits and with many; on a GPU in every type, else in fp32 and fp16 by turns."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    found = {}
    for turn, (name, case) in enumerate(CASES.items()):
        for split, limits in (("few", FEW), ("many", MANY), *([("the device's", None)] if device == "cuda" else [])):
            for dtype in dtypes if device == "cuda" else [dtypes[(turn + (limits is MANY)) % 2]]:
                layout = LAYOUTS[turn // 2 % 2](dtype, case.kv_heads, case.dim, case.block)
                batch = make_batch(layout, case.heads, case.ranges, seed=turn)
                found[f"{dtype} {name}, {split} splits"] = errors(batch, device, limits, **case.options)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
