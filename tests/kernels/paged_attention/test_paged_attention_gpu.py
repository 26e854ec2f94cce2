"""The Triton kernels equal their definition, interpreted on the CPU; and compile for GPUs that are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.compared import Compared, compared
from tests.support.extent import FULL
from tests.support.script import told
from vllm_ext.kernels.kv_quant.format import PageLayout
from vllm_ext.kernels.paged_attention import gpu
from vllm_ext.kernels.paged_attention.gpu import Grid

HERE = Path(__file__).parent
H100 = 132


SCRIPT = HERE / "gpu_script.py"
SPOILT = """
from tests.kernels.paged_attention import gpu_script as script
attend = script.gpu.attend
def spoilt(query, kv, step, out, lse, **options):
    attend(query, kv, step, out, lse, **options)
    if kv.layout.head_dim == 24:
        raise RuntimeError("out of resource: shared memory")
    out *= 3
script.gpu.attend = spoilt
script.CASES = {name: script.CASES[name] for name in ("one sequence", "gap")}
raise SystemExit(script.main("cpu"))
"""


def check(found: Compared) -> None:
    assert found.holds, json.dumps(found.cases)
    merged = [case for case, facts in found.cases.items() if facts["items_that_are_merged"]]
    assert len(found.cases) > len(merged) > len(found.cases) // 3  # both ways to the output were taken


def test_interpreted_kernel_is_the_definition() -> None:
    """In fp32 and fp16: Triton's interpreter computes with the bits of bfloat16."""
    found = compared(str(SCRIPT), "cpu", TRITON_INTERPRET="1")
    assert {case.split()[0] for case in found.cases} == {"torch.float32", "torch.float16"}
    check(found)


def test_an_output_thrice_as_large_is_wrong_and_a_launch_that_fails_loses_no_other_case() -> None:
    """One case is spoilt, the next one raises; the exit status is that of a wrong result."""
    found = compared("-c", SPOILT, TRITON_INTERPRET="1")
    assert found.status == 1
    names = list(found.cases)
    assert found.end == {"wrong": names[:2], "failed": names[2:], "cases": 4}
    assert [facts.get("over") for facts in found.cases.values()] == [["error"], ["error"], None, None]
    assert found.cases[names[2]]["failed"] == "RuntimeError: out of resource: shared memory"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernel_is_the_definition() -> None:
    check(compared(str(SCRIPT), "cuda"))


def step(q_len: list[int], kv_len: list[int], *, processors: int = H100, **sizes: int) -> dict[str, Any]:
    sizes = {"num_heads": 32, "num_kv_heads": 8, "block_size": 32, **sizes}
    return {"q_len": q_len, "kv_len": kv_len, "processors": processors, **sizes}


RAGGED = np.random.default_rng(0).lognormal(6.5, 1.2, 300).astype(int) + 1
STEPS = {
    "one sequence": step([1], [32768]),
    "a short one": step([1], [200]),
    "8 equal ones": step([1] * 8, [32768] * 8),
    "300 of all lengths": step([1] * 300, RAGGED.tolist()),
    "one long among short ones": step([1] * 64, [65536] + [1000] * 63),
    "nothing to do in some": step([1, 0, 1, 0], [5000, 0, 7, 400]),
    "prefill beside decodes": step([2048] + [1] * 30, [9000] + [4000] * 30),
    "prefill alone": step([8192], [8192]),
    "speculation": step([4] * 32, [3000] * 32),
    "suffixes": step([40, 17, 64], [20000, 300, 6400]),
    "few processors": step([1] * 40, [4096] * 40, processors=4),
    "one KV head": step([1] * 3, [70000, 20, 5000], num_heads=16, num_kv_heads=1, block_size=16),
}


@pytest.fixture(scope="module")
def divided() -> dict[str, dict[str, Any]]:
    found = told(HERE / "plan_script.py", "cpu", json.dumps(list(STEPS.values())), TRITON_INTERPRET="1")
    return dict(zip(STEPS, found, strict=True))


@pytest.mark.parametrize("name", STEPS)
def test_every_tile_of_a_step_has_all_its_splits_and_no_place_is_used_twice(name: str, divided: Any) -> None:
    wanted, found = STEPS[name], divided[name]
    items = [
        (r, tile, split)
        for r, length in enumerate(wanted["q_len"])
        for tile in range(-(-length // found["tokens"]))
        for split in range(found["splits"][r])
    ]
    used = [r for r in found["item_range"] if r >= 0]
    assert used == [r for r, _, _ in items] == sorted(used)
    places, merged = [], []
    for number, (r, tile, split) in enumerate(items):
        assert number - found["first_item"][r] == tile * found["splits"][r] + split
        if found["splits"][r] > 1:
            places.append(found["first_partial"][r] + number - found["first_item"][r])
            merged += [number] * (split == 0)
    assert places == list(range(len(places)))
    assert len(places) <= found["most_partials"] <= found["room"]
    assert [item for item in found["merge_item"] if item >= 0] == merged


@pytest.mark.parametrize("name", STEPS)
def test_no_smaller_shares_would_fit(name: str, divided: Any) -> None:
    """Shares are the same for all sequences, and as small as the number of programs allows."""
    wanted, found = STEPS[name], divided[name]
    tiles = -(-np.array(wanted["q_len"]) // found["tokens"])
    blocks = -(-np.array(wanted["kv_len"]) // wanted["block_size"])

    def splits(share: int) -> Any:
        return np.maximum(1, -(-blocks // share))

    def fits(share: int) -> bool:
        parts = splits(share)
        apart = int((tiles * parts)[parts > 1].sum())
        return int((tiles * parts).sum()) <= found["most_items"] and apart <= found["most_partials"]

    least = max(1, 128 // wanted["block_size"])
    longest = int(blocks[tiles > 0].max())
    share = next(share for share in range(min(least, longest), longest + 1) if fits(share))
    assert found["splits"] == splits(share).tolist()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((32, 8, 1, 1, 1), (16, 132)),
        ((32, 8, 8, 8, 1), (16, 132)),
        ((32, 8, 256, 256, 1), (16, 256 + 66)),
        ((32, 8, 4096, 64, 4000), (64, 4096 // 16 + 64 + 66)),
        ((32, 8, 32, 4, 8), (32, 132)),
        ((64, 1, 5, 5, 1), (64, 1056)),
        ((56, 8, 4, 2, 2), (16, 132)),
    ],
    ids=["decode", "8 decodes", "256 decodes", "prefill", "8 tokens", "64 heads share one", "7 heads share one"],
)
def test_programs_of_a_step_are_as_many_as_its_queries_need(sizes: Any, expected: tuple[int, int]) -> None:
    """Tiles are counted exactly where queries are short: 256 decodes are 256 tiles."""
    heads, kv_heads, tokens, ranges, longest = sizes
    grid = Grid.of(
        PageLayout.rows(torch.float16, kv_heads, 64, 32), num_heads=heads, num_tokens=tokens, num_ranges=ranges,
        max_query_len=longest, processors=H100,
    )  # fmt: skip
    assert (grid.rows, grid.items) == expected


@pytest.mark.parametrize("name", ["one sequence", "8 equal ones", "one long among short ones"])
def test_programs_of_a_decode_fill_the_processors(name: str, divided: Any) -> None:
    """Two waves of four a processor, within a tenth; and whoever is longest is not what all wait for at the end."""
    wanted, found = STEPS[name], divided[name]
    programs = wanted["num_kv_heads"] * sum(r >= 0 for r in found["item_range"])
    assert programs >= 0.9 * 8 * H100
    share = max(-(-length // parts) for length, parts in zip(wanted["kv_len"], found["splits"], strict=True))
    assert share * programs <= 2.2 * wanted["num_kv_heads"] * sum(wanted["kv_len"])


def compiled_variants(which: str) -> dict[str, dict[str, int]]:
    """Return what became of some variants, on Hopper or everywhere."""
    return told(HERE / "compile_script.py", which, *([] if FULL else ["90"]))


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    return compiled_variants("all" if FULL else "few")


def test_kernels_fit_into_registers_and_shared_memory(compiled: Any) -> None:
    """For a second program a processor ptxas spills up to 16 bytes on sm_89, and up to 32 of 64 rows on sm_100.

    Of 32 rows in heads of 64 it spills 8 bytes everywhere.
    """
    most = {
        case: 32 if "sm_89" in case or "sm_100" in case else 8 if "rows 32 head 64" in case else 0 for case in compiled
    }
    spilled = {case: facts["spilled_bytes"] for case, facts in compiled.items() if facts["spilled_bytes"] > most[case]}
    assert spilled == {}
    assert {case for case, facts in compiled.items() if facts["shared_bytes_over"]} == set()


def test_what_is_compared_on_a_gpu_compiles_and_fits() -> None:
    """Exactly those variants; their small heads are nobody's, so that a few bytes may be spilt."""
    found = compiled_variants("script")
    assert sum("attend" in case and "sm_90" in case for case in found) == 13
    assert {case for case, facts in found.items() if facts["shared_bytes_over"]} == set()
    assert max(facts["spilled_bytes"] for facts in found.values()) <= 32


def test_tiles_of_the_widest_heads_fit_into_shared_memory_in_every_type() -> None:
    """In fp32 on Hopper four turns of a loop at once would need 233,600 bytes, of 232,448."""
    found = compiled_variants("wide")
    assert any(case.startswith("attend torch.float32 int8") for case in found)
    assert {case: facts["shared_bytes"] for case, facts in found.items() if facts["shared_bytes_over"]} == {}


def test_tensor_cores_multiply_and_on_hopper_a_warpgroup_at_a_time_where_queries_are_long(compiled: Any) -> None:
    for case, facts in compiled.items():
        if case.startswith("attend"):
            assert facts["wgmma" if "rows 64" in case and "sm_90" in case else "mma"] or "sm_100" in case, case


def test_kv_is_prefetched_in_int8_too(compiled: Any) -> None:
    """No wide load but those of the queries; in a branch none of the others would be a prefetch."""
    for case, facts in compiled.items():
        if case.startswith("attend int8") and "window" not in case:
            bf16 = compiled[case.replace("int8", "bf16")]
            assert facts["wide_loads"] == bf16["wide_loads"], case
            assert facts["prefetched"] >= bf16["prefetched"] + 3, case


@pytest.mark.parametrize(
    ("layout", "num_heads", "message"),
    [
        (PageLayout.rows(torch.float16, 2, 64, 48), 2, "block_size=48: must be a power of two"),
        (PageLayout.rows(torch.float16, 2, 64, 8), 2, "block_size=8: must be a power of two, at least 16"),
        (PageLayout.rows(torch.float16, 2, 64, 32), 3, "num_heads=3: must be a multiple of the 2 KV heads"),
        (PageLayout.transposed_keys(torch.float16, 2, 64, 32), 2, "channels of a token must be next to each other"),
    ],
)
def test_what_the_kernel_has_no_code_for_is_refused_by_name(layout: Any, num_heads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpu.check(layout, num_heads)
