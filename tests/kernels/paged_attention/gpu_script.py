"""Compares the Triton kernels with the definition, case by case (`comparison`). Argument: the device.

Its own process, because Triton decides at import whether it interprets kernels (TRITON_INTERPRET=1, on the CPU).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[3]))

from tests.kernels.paged_attention.batches import Batch, Range, budget, make_batch
from tests.support.comparison import Facts, compare
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


@dataclass(frozen=True, kw_only=True)
class Run:
    """A case in one type and layout, on a device of some size."""

    name: str
    case: Case
    layout: PageLayout
    limits: gpu.DeviceLimits
    seed: int

    @classmethod
    def of(cls, case_name: str, dtype: torch.dtype, splits: str, limits: gpu.DeviceLimits) -> Run:
        """Return a run; cases take layouts by turns.

        Args:
            case_name: One of `CASES`.
            dtype: Of the KV.
            splits: What the limits make of long sequences, for the name.
            limits: Of the device.
        """
        case, turn = CASES[case_name], list(CASES).index(case_name)
        layout = LAYOUTS[turn // 2 % 2](dtype, case.kv_heads, case.dim, case.block)
        return cls(name=f"{dtype} {case_name}, {splits} splits", case=case, layout=layout, limits=limits, seed=turn)

    def batch(self) -> Batch:
        """Return its queries and KV."""
        return make_batch(self.layout, self.case.heads, self.case.ranges, seed=self.seed)


def compiled_runs(limits: gpu.DeviceLimits) -> Iterator[Run]:
    """Yield what a GPU compares: every case as a server would have it, since each other variant takes its seconds."""
    for name in CASES:
        yield Run.of(name, torch.bfloat16, "the device's", limits)


def interpreted_runs() -> Iterator[Run]:
    """Yield what the CPU compares: every case with few splits and with many, in fp32 and fp16 by turns."""
    for turn, name in enumerate(CASES):
        yield Run.of(name, (torch.float32, torch.float16)[turn % 2], "few", FEW)
        yield Run.of(name, (torch.float32, torch.float16)[(turn + 1) % 2], "many", MANY)


def attended(run: Run, batch: Batch, device: str) -> tuple[torch.Tensor, torch.Tensor, gpu.Step]:
    """Attend on a device, to poisoned memory; return outputs, their log-sum-exp, and how the step was divided."""

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    query, kv = there(batch.query), PagedKV(batch.kv.layout, there(batch.kv.pages), there(batch.kv.records))
    ranges = Ranges(**{name: there(getattr(batch.ranges, name)) for name in Ranges.__dataclass_fields__})
    out, lse = torch.full_like(query, math.nan), torch.full(query.shape[:2], math.nan, device=device)
    tokens, num_heads = sum(r.q_len for r in run.case.ranges), run.case.heads
    workspace = gpu.Workspace.for_steps(
        kv.layout, num_heads=num_heads, max_tokens=tokens, max_ranges=ranges.num_ranges, limits=run.limits,
        device=query.device,
    )  # fmt: skip
    workspace.partial.fill_(math.nan)
    step = gpu.divide(
        ranges, kv.layout, num_heads=num_heads, num_tokens=tokens, max_query_len=max(r.q_len for r in run.case.ranges),
        workspace=workspace,
    )  # fmt: skip
    gpu.attend(query, kv, step, out, lse, scale=SCALE, **run.case.options)  # type: ignore[arg-type]
    return out, lse, step


def errors(run: Run, device: str) -> Facts:
    """Attend, and compare with the definition."""
    batch, options = run.batch(), run.case.options
    out, lse, step = attended(run, batch, device)
    plain, expected = batch.plain, batch.plain_ranges
    wanted, wanted_lse = reference.paged_attention(batch.query, plain, expected, scale=SCALE, **options)
    inside = torch.zeros(len(out), dtype=torch.bool)
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


def over(name: str, facts: Facts) -> list[str]:
    """Return which errors are larger than allowed; NaN is."""
    allowed = {
        "error": facts["allowed"],
        "lse_error": 1e-5 if "float32" in name else 1e-2,
        "written_besides": 0.0,
        "infinite_lse_differs": 0.0,
    }
    return [fact for fact, most in allowed.items() if not facts[fact] <= most]


def main(device: str) -> int:
    """Compare, and return the exit status."""
    is_gpu = device == "cuda"
    runs = compiled_runs(gpu.DeviceLimits.of(torch.device(device))) if is_gpu else interpreted_runs()
    return compare(((run.name, functools.partial(errors, run, device)) for run in runs), over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
