"""Compiles the Triton kernels of KV for a GPU that need not be there; prints what their PTX holds as JSON.

Its own process, because Triton decides at import whether it interprets kernels.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_ext.kernels.kv_copy import gpu as copy
from vllm_ext.kernels.kv_quant import gpu as quant

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    "addresses": "*i64", "layers": "*i64", "block_ids": "*i64", "slots": "*i64", "sizes": "*i64", "offsets": "*i64",
    "chunks": "*i64", "records": "*u8", "items": "*bf16", "holds": "*i32",
}  # fmt: skip
HEAD_DIM, BLOCK_SIZE = 128, 64
QUANT = {
    "HEAD_DIM": HEAD_DIM, "BLOCK_SIZE": BLOCK_SIZE, "TOKENS": BLOCK_SIZE, "CHANNELS": HEAD_DIM, "ALIGNMENT": 16,
    "k_channel": 1, "v_channel": 1,
}  # fmt: skip
COPY = {"WIDTH": 1024, "VECTOR": 2, "ALIGNMENT": 16}


def instructions(kernel: Any, constants: dict[str, Any], **options: Any) -> dict[str, int]:
    """Count instructions that touch memory, and fused multiplications, as with bf16 pages whose sizes are even."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    even = [name for name in names if name not in constants and name != "blocks"]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    ptx = triton.compile(source, target=TARGET, options={"num_warps": 4, **options}).asm["ptx"]
    found = Counter(re.findall(r"\b(?:ld|st)\.global[.a-z0-9:_]*|\bfma\.[a-z0-9.]*", ptx))
    return dict(found)


def main() -> None:
    """Compile what serves blocks of 64 tokens."""
    exact = {"enable_fp_fusion": False}
    found = {
        "quantise": instructions(quant._quantise, {**QUANT, "MOST": torch.finfo(torch.bfloat16).max}, **exact),
        "dequantise": instructions(quant._dequantise, QUANT, **exact),
        "gather": instructions(copy._copy_pages, {**COPY, "GATHER": True}),
        "scatter": instructions(copy._copy_pages, {**COPY, "GATHER": False}),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
