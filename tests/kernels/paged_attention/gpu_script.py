"""Compares the Triton kernel with the definition; prints the errors, and those allowed, as JSON. Argument: the device.

Its own process, because Triton decides at import whether it interprets kernels (TRITON_INTERPRET=1, on the CPU).
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[3]))

from tests.kernels.paged_attention.batches import Batch, Range, budget, make_batch
from vllm_ext.kernels.kv_quant.format import PageLayout
from vllm_ext.kernels.paged_attention import PagedKV, Ranges, gpu, reference

SCALE = 0.25
MANY_PROCESSORS, ONE_PROCESSOR = 64, 1


RANGES = {
    "decode": [Range(1, 1), Range(1, 16), Range(1, 17), Range(1, 70, int8="x."), Range(2, 200, int8=".x")],
    "prefill": [Range(5, 5), Range(17, 33), Range(3, 40, int8="x")],
    "gap": [Range(6, 6), Range(4, 38, int8=".x"), Range(0, 20), Range(2, 0), Range(2, 20, position=5)],
}
LAYOUTS = {"rows": PageLayout.rows, "tokens first": PageLayout.tokens_first}
OPTIONS = {"plain": {}, "window": {"window": 9}, "softcap": {"softcap": 2.0}}


def errors(batch: Batch, device: str, processors: int, **options: float) -> dict[str, float]:
    """Attend to poisoned memory, and compare."""

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    query, kv = there(batch.query), PagedKV(batch.kv.layout, there(batch.kv.pages), there(batch.kv.records))
    ranges = Ranges(**{name: there(getattr(batch.ranges, name)) for name in Ranges.__dataclass_fields__})
    out, lse = torch.full_like(query, math.nan), torch.full(query.shape[:2], math.nan, device=device)
    gpu.attend(
        query, kv, ranges, out, lse, scale=SCALE, num_tokens=int(ranges.q_len.sum()),
        longest=int(ranges.kv_len.max()), processors=processors, **options,
    )  # fmt: skip
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
    }


def main(device: str) -> None:
    """Compare every kind of ranges, layout and option, with and without splits."""
    dtypes = [torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]
    found = {}
    for dtype in dtypes:
        for name, wanted in RANGES.items():
            for layout, make in LAYOUTS.items():
                batch = make_batch(make(dtype, 2, 24 if name == "gap" else 16, 16), 6, wanted)
                for processors in (ONE_PROCESSOR, MANY_PROCESSORS):
                    case = f"{dtype} {name} {layout} {processors}"
                    found[case] = errors(batch, device, processors)
        for option, values in OPTIONS.items():
            batch = make_batch(PageLayout.rows(dtype, 1, 16, 16), 4, RANGES["prefill"])
            found[f"{dtype} {option}"] = errors(batch, device, ONE_PROCESSOR, **values)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
