"""Compiles the Triton kernels for GPUs that need not be there; prints what became of them as JSON.

Arguments: ``few`` or ``all`` sizes, and compute capabilities, by default all that are known. Its own process, because
Triton decides at import whether it interprets kernels.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from vllm_ext.kernels.kv_quant.format import PageLayout
from vllm_ext.kernels.paged_attention import gpu, gpu_kernel

ARCHITECTURES = {80: "sm_80", 89: "sm_89", 90: "sm_90a", 100: "sm_100a"}
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
POINTERS = {
    "query": "*bf16", "pages": "*bf16", "int8_blocks": "*u8", "channels": "*bf16", "out": "*bf16", "lse": "*fp32",
    "partial": "*fp32", "first_block": "*i64", "scale": "fp32", "softcap": "fp32",
    **dict.fromkeys(("block_ids", "q_start", "q_len", "q_position", "kv_len", "first_item", "splits", "first_partial",
                     "item_range", "merge_item"), "*i32"),
}  # fmt: skip
UNALIGNED = ("num_ranges", "most_items", "most_partials", "most_merges", "num_blocks", "window", "scale", "softcap")
HEADS, KV_HEADS = 32, 8
"""Of Llama-3.1-8B."""


def attend(
    *, rows: int, block: int, int8: bool, dim: int = 128, kv_heads: int = KV_HEADS, **options: bool
) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """Return kernel, constants and options of a step's attention, as `gpu.attend` launches it."""
    layout = PageLayout.tokens_first(torch.bfloat16, kv_heads, dim, block)
    flags = {"HAS_WINDOW": False, "HAS_SOFTCAP": False, "HAS_LSE": False, **options}
    constants = {
        "HEADS": HEADS, "KV_HEADS": kv_heads, "DIM": dim, "WIDTH": triton.next_power_of_2(dim), "ROWS": rows,
        "BLOCK": block, "HAS_INT8": int8, **gpu.tokens_of_turns(layout), **flags,
    }  # fmt: skip
    return gpu_kernel.attend, constants, {"rows": rows, "has_int8": int8}


def variants(*, few: bool) -> dict[str, tuple[Any, dict[str, Any], dict[str, int]]]:
    """Return every kernel with sizes that models have: rows of decode and of prefill, blocks and heads of any width."""
    every = (16, 32, 64, 128)
    blocks = {64: (32,), 80: (32,), 128: (16, 64) if few else every, 192: (32,), 256: (32,) if few else every}
    found = {}
    for int8, (dim, sizes) in itertools.product((False, True), blocks.items()):
        most = gpu.most_rows(PageLayout.tokens_first(torch.bfloat16, KV_HEADS, dim, 32))
        for block, rows in itertools.product(sizes, (16, most)):
            name = f"attend {'int8' if int8 else 'bf16'} rows {rows} head {dim} block {block}"
            found[name] = attend(rows=rows, block=block, int8=int8, dim=dim)
    found["attend int8 rows 64 head 128 block 32 with window and softcap"] = attend(
        rows=64, block=32, int8=True, HAS_WINDOW=True, HAS_SOFTCAP=True
    )
    model = {"HEADS": HEADS, "KV_HEADS": KV_HEADS, "DIM": 128, "WIDTH": 128}
    found["merge"] = (gpu_kernel.merge, {**model, "ROWS": 16, "CHUNK": 16, "HAS_LSE": True}, {"num_warps": 2})
    found["plan"] = (gpu_kernel.plan, {"TOKENS": 4, "BLOCK": 32, "LEAST": 4, "LANES": 256}, {"num_warps": 4})
    return found


def facts(kernel: Any, constants: dict[str, Any], options: dict[str, int], capability: int) -> dict[str, int]:
    """Return registers of a thread, bytes that it spills, and counts of instructions."""
    limits = gpu.DeviceLimits(processors=1, shared_bytes=SHARED_BYTES[capability])
    if "rows" in options:
        options = gpu.launch_options(limits, **options)
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    aligned = [name for name in names if name not in constants and name not in UNALIGNED]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    text = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(text)
        command = [get_ptxas(capability).path, "-v", f"-arch={ARCHITECTURES[capability]}", str(ptx)]
        told = subprocess.run([*command, "-o", f"{folder}/cubin"], capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", told)[1]),  # type: ignore[index]
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", told))),
        "shared_bytes": compiled.metadata.shared,
        "shared_bytes_over": max(0, compiled.metadata.shared - limits.shared_bytes),
        "mma": len(re.findall(r"\bmma\.sync\.", text)),
        "wgmma": len(re.findall(r"\bwgmma\.mma_async\.", text)),
        "prefetched": len(re.findall(r"\bcp\.async\.c[ag]\.", text)),
        "wide_loads": len(re.findall(r"\bld\.global[.\w:]*\.v[248]\.", text)),
    }


def main(extent: str, *capabilities: str) -> None:
    """Compile every variant for some architectures."""
    found = {
        f"{name} {ARCHITECTURES[capability]}": facts(*variant, capability)
        for name, variant in variants(few=extent == "few").items()
        for capability in (map(int, capabilities) if capabilities else ARCHITECTURES)
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
