"""Compiles the Triton kernels for GPUs that need not be there; prints what became of them as JSON.

Arguments: which variants (`SETS`), and compute capabilities, by default all that are known. Its own process, because
Triton decides at import whether it interprets kernels.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

sys.path.append(str(Path(__file__).parents[3]))

from tests.kernels.paged_attention import gpu_script
from tests.support.launches import ALIGNMENT, Launch, recorded
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kernels.paged_attention import PagedKV, Ranges, gpu, gpu_kernel

ARCHITECTURES = {80: "sm_80", 89: "sm_89", 90: "sm_90a", 100: "sm_100a"}
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
PROCESSORS = 132
HEADS, KV_HEADS = 32, 8
"""Of Llama-3.1-8B."""
Variants = dict[str, Launch]


def launched(
    limits: gpu.DeviceLimits, *, rows: int, block: int, int8: bool, dim: int = 128, heads: int = HEADS,
    dtype: torch.dtype = torch.bfloat16, with_lse: bool = False, **options: float,
) -> Variants:  # fmt: skip
    """Return what a step of one query launches, by kernel."""
    layout = PageLayout.tokens_first(dtype, KV_HEADS, dim, block)
    length = rows * KV_HEADS // heads
    records = torch.zeros(1, RecordFormat(layout).record_bytes, dtype=torch.uint8) if int8 else None
    kv = PagedKV(layout, torch.zeros(1, layout.page_elements, dtype=dtype), records)
    start, seq_len = (torch.tensor(values, dtype=torch.int32) for values in ([0, length], [1]))
    ranges = Ranges.from_block_table(start, seq_len, torch.zeros(1, 1, dtype=torch.int32))
    sizes = {"num_heads": heads, "max_tokens": length, "max_ranges": 1}
    workspace = gpu.Workspace.for_steps(layout, limits=limits, device=start.device, **sizes)
    query, lse = torch.zeros(length, heads, dim, dtype=dtype), torch.zeros(length, heads) if with_lse else None
    with recorded() as found:
        step = gpu.divide(ranges, layout, num_heads=heads, num_tokens=length, max_query_len=length, workspace=workspace)
        gpu.attend(query, kv, step, torch.empty_like(query), lse, scale=0.1, **options)  # type: ignore[arg-type]
    assert step.grid.rows == rows
    return {launch.kernel: launch for launch in found}


def of_models(limits: gpu.DeviceLimits, *, few: bool) -> Variants:
    """Return every kernel with sizes that models have: rows of decode and of prefill, blocks and heads of any width."""
    every = (16, 32, 64, 128)
    blocks = {64: (32,), 80: (32,), 128: (16, 64) if few else every, 192: (32,), 256: (32,) if few else every}
    found = {}
    for int8, (dim, sizes) in itertools.product((False, True), blocks.items()):
        most = gpu.most_rows(PageLayout.tokens_first(torch.bfloat16, KV_HEADS, dim, 32))
        for block, rows in itertools.product(sizes, sorted({16, most} if few and dim > 64 else {16, 32, most})):
            name = f"attend {'int8' if int8 else 'bf16'} rows {rows} head {dim} block {block}"
            found[name] = launched(limits, rows=rows, block=block, int8=int8, dim=dim)["attend"]
    for int8, block in itertools.product((False, True), (32, 256)):
        name = f"attend {'int8' if int8 else 'bf16'} rows 32 head 64 block {block}, a KV head each"
        found[name] = launched(limits, rows=32, block=block, int8=int8, dim=64, heads=KV_HEADS)["attend"]
    found["attend int8 rows 64 head 128 block 32 with window and softcap"] = launched(
        limits, rows=64, block=32, int8=True, window=9, softcap=2.0
    )["attend"]
    decode = launched(limits, rows=16, block=32, int8=True, with_lse=True)
    return found | {name: decode[name] for name in ("merge", "plan")}


def of_wide_heads(limits: gpu.DeviceLimits) -> Variants:
    """Return attention of the widest heads in every type: their tiles need the most shared memory."""
    return {
        f"attend {dtype}{' int8' if int8 else ''}": launched(
            limits, rows=32, block=32, int8=int8, dim=256, dtype=dtype
        )["attend"]
        for dtype, int8 in itertools.product((torch.float32, torch.float16, torch.bfloat16), (False, True))
    }


def of_script(limits: gpu.DeviceLimits) -> Variants:
    """Return exactly what ``gpu_script.py`` launches on a GPU."""
    found = {}
    for run in gpu_script.compiled_runs(limits):
        with recorded() as launches:
            gpu_script.attended(run, run.batch(), "cpu")
        found.update({launch: f"{launch.kernel} {run.name}" for launch in launches if launch not in found})
    return {name: launch for launch, name in found.items()}


def facts(launch: Launch, capability: int) -> dict[str, int]:
    """Return registers of a thread, bytes that it spills, and counts of instructions."""
    kernel = getattr(gpu_kernel, launch.kernel)
    names, constants = kernel.arg_names, dict(launch.constants)
    source = ASTSource(
        fn=kernel,
        signature=dict.fromkeys(constants, "constexpr") | dict(launch.types),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in launch.aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
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
        "shared_bytes_over": max(0, compiled.metadata.shared - SHARED_BYTES[capability]),
        "mma": len(re.findall(r"\bmma\.sync\.", text)),
        "wgmma": len(re.findall(r"\bwgmma\.mma_async\.", text)),
        "prefetched": len(re.findall(r"\bcp\.async\.c[ag]\.", text)),
        "wide_loads": len(re.findall(r"\bld\.global[.\w:]*\.v[248]\.", text)),
    }


SETS: dict[str, Callable[[gpu.DeviceLimits], Variants]] = {
    "few": lambda limits: of_models(limits, few=True),
    "all": lambda limits: of_models(limits, few=False),
    "wide": of_wide_heads,
    "script": of_script,
}


def main(which: str, *capabilities: str) -> None:
    """Compile every variant for some architectures."""
    found = {}
    for capability in map(int, capabilities) if capabilities else ARCHITECTURES:
        limits = gpu.DeviceLimits(processors=PROCESSORS, shared_bytes=SHARED_BYTES[capability])
        for name, launch in SETS[which](limits).items():
            found[f"{name} {ARCHITECTURES[capability]}"] = facts(launch, capability)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
