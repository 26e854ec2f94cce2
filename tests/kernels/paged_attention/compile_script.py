"""Compiles the Triton kernel for GPUs that need not be there; prints registers and spilled bytes as JSON.

Its own process, because Triton decides at import whether it interprets kernels.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from vllm_ext.kernels.paged_attention import gpu

ARCHITECTURES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
POINTERS = {
    "query": "*bf16", "pages": "*bf16", "records": "*u8", "channels": "*bf16", "out": "*bf16", "lse": "*fp32",
    "partial": "*fp32", "block_ids": "*i32", "first_block": "*i64", "q_start": "*i32", "q_len": "*i32",
    "q_position": "*i32", "kv_len": "*i32", "tile_end": "*i32", "scale": "fp32", "softcap": "fp32",
}  # fmt: skip
UNALIGNED = ("num_ranges", "num_blocks", "window", "scale", "softcap")
MODEL = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "WIDTH": 128, "ROWS": gpu.BLOCK_M}
"""Of Llama-3.1-8B."""
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        f"attend block {block} splits {splits} {'int8' if records else 'bf16'}": (
            gpu._attend,
            {**MODEL, "BLOCK": block, "SPLITS": splits, "HAS_RECORDS": records, "HAS_LSE": False},
        )
        for block in (32, 64)
        for splits in (1, 8)
        for records in (False, True)
    },
    "merge": (gpu._merge, {**MODEL, "SPLITS": 8, "HAS_LSE": True}),
}


def resources(kernel: Any, constants: dict[str, Any], capability: int) -> dict[str, int]:
    """Return registers of a thread, and bytes that it spills, as ptxas tells."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    aligned = [name for name in names if name not in constants and name not in UNALIGNED]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 2}
    )
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        command = [get_ptxas(capability).path, "-v", f"-arch={ARCHITECTURES[capability]}", str(ptx)]
        told = subprocess.run([*command, "-o", f"{folder}/cubin"], capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", told)[1]),  # type: ignore[index]
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", told))),
        "tensor_cores": len(re.findall(r"\b(?:mma|wgmma)\.", compiled.asm["ptx"])),
    }


def main() -> None:
    """Compile every variant for every architecture."""
    print(
        json.dumps(
            {
                f"{name} {ARCHITECTURES[capability]}": resources(kernel, constants, capability)
                for name, (kernel, constants) in VARIANTS.items()
                for capability in ARCHITECTURES
            }
        )
    )


if __name__ == "__main__":
    main()
