"""The kernel in C++ equals its definition, whatever lies where nobody may read."""

from __future__ import annotations

import math
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.kernels.paged_attention.batches import Batch, Range, budget, int32, make_batch
from tests.support.extent import HANG_S
from vllm_ext.kernels import native
from vllm_ext.kernels.kv_quant.format import PageLayout
from vllm_ext.kernels.paged_attention import PagedKV, Ranges, cpu, paged_attention, reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DECODE = [Range(1, 1), Range(1, 31), Range(1, 32), Range(1, 33), Range(1, 300), Range(1, 64)]
PREFILL = [Range(1, 1), Range(7, 7), Range(33, 33), Range(65, 65), Range(100, 257)]
SUFFIXES = [Range(8, 300), Range(2, 97), Range(5, 64), Range(17, 600)]
GAP = [Range(40, 40), Range(23, 163), Range(9, 40, position=10)]
EACH = ("q_start", "q_len", "q_position", "kv_len", "first_block")
"""What `Ranges` has of each range, in its order."""
ODD = [Range(0, 40), Range(3, 0), Range(4, 2), Range(2, 64, position=1000), Range(3, 64, position=-1)]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def attended(batch: Batch, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernel writes into poisoned tensors."""
    out, lse = torch.full_like(batch.query, math.nan), torch.full(batch.query.shape[:2], math.nan)
    paged_attention(batch.query, batch.kv, batch.ranges, out=out, lse=lse, **options)
    return out, lse


def assert_right(batch: Batch, **options) -> torch.Tensor:
    """Check the kernel against its definition, and that it wrote nothing else; return the output."""
    out, lse = attended(batch, **options)
    expected, expected_lse = reference.paged_attention(batch.query, batch.plain, batch.plain_ranges, **options)
    inside = torch.zeros(len(out), dtype=torch.bool)
    for start, length in zip(batch.ranges.q_start.tolist(), batch.ranges.q_len.tolist(), strict=True):
        inside[start : start + length] = True
    assert out[~inside].isnan().all()
    allowed = budget(batch, expected, **options)
    assert float((out[inside].double() - expected[inside]).abs().max()) <= allowed
    same_lse = torch.isclose(
        lse[inside].double(), expected_lse[inside], rtol=1e-2, atol=1e-2 if out.itemsize < 4 else 1e-5
    )
    assert same_lse.all()
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (14, 2), (8, 8), (64, 1)], ids=lambda h: f"{h[0]}q{h[1]}kv")
@pytest.mark.parametrize(
    "wanted", [DECODE, PREFILL, SUFFIXES, GAP, ODD], ids=["decode", "prefill", "suffix", "gap", "odd"]
)
def test_kernel_equals_its_definition(dtype, heads, wanted):
    num_heads, num_kv_heads = heads
    layout = cpu.layout_for(dtype, num_kv_heads, 64, 32)
    assert_right(make_batch(layout, num_heads, wanted), scale=64**-0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "block_size"), [(32, 32), (96, 64), (128, 128), (256, 32), (512, 96)])
def test_sizes_of_heads_and_blocks(dtype, dim, block_size):
    wanted = [Range(1, 150), Range(9, 130, int8="x."), Range(1, 257, int8=".x")]
    assert_right(make_batch(cpu.layout_for(dtype, 2, dim, block_size), 4, wanted), scale=dim**-0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("int8", ["x", "x.", ".xx"])
@pytest.mark.parametrize("num_heads", [2, 8, 32])
def test_records_are_attended_as_if_they_were_dequantised(dtype, int8, num_heads):
    """Whatever the number of rows: decode multiplies codes as they are, more rows unpack them into the L1 cache."""
    wanted = [Range(r.q_len, r.kv_len, int8=int8) for r in [*DECODE, *SUFFIXES, Range(70, 70)]]
    batch = make_batch(cpu.layout_for(dtype, 2, 64, 32), num_heads, wanted)
    out = assert_right(batch, scale=0.125)
    dequantised, _ = attended(
        Batch(batch.query, batch.plain, batch.plain_ranges, batch.plain, batch.plain_ranges), scale=0.125
    )
    if dtype is torch.float32:  # where minimum + code * scale is rounded once or twice
        torch.testing.assert_close(out, dequantised, rtol=1e-5, atol=1e-6, equal_nan=True)
        return
    expected, _ = reference.paged_attention(batch.query, batch.plain, batch.plain_ranges, scale=0.125)
    allowed = 2 * budget(batch, expected, scale=0.125)  # each is that far from the definition
    torch.testing.assert_close(out, dequantised, rtol=0.0, atol=allowed, equal_nan=True)
    if (
        dtype is torch.bfloat16 and cpu.arithmetic() == "AVX512-BF16"
    ):  # where more than 8 rows multiply what was rounded
        many = unpacked_tokens(batch, 64 // (num_heads // 2), least=8 // (num_heads // 2) + 1)
        assert many.any()
        assert torch.equal(out[many], dequantised[many])


def unpacked_tokens(batch: Batch, tile: int, *, least: int) -> torch.Tensor:
    """Return which tokens of the query are in a tile of at least so many; ``tile`` is the most there are."""
    found = torch.zeros(len(batch.query), dtype=torch.bool)
    for start, length in zip(batch.ranges.q_start.tolist(), batch.ranges.q_len.tolist(), strict=True):
        for first in range(0, length, tile):
            count = min(tile, length - first)
            found[start + first : start + first + count] = count >= least
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 2, 40])
def test_channels_of_very_different_size(dtype, q_len):
    """Keys of trained models have them: what multiplies the codes must not be rounded to the largest channel's size."""
    wanted = [Range(q_len, kv_len, int8="x") for kv_len in (40, 300, 64)]
    assert_right(make_batch(cpu.layout_for(dtype, 1, 128, 32), 4, wanted, key_sizes=1000.0), scale=128**-0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 31, 32, 100, 10_000])
def test_sliding_window(dtype, window):
    batch = make_batch(cpu.layout_for(dtype, 2, 64, 32), 8, [*DECODE, *SUFFIXES, Range(70, 200, int8="x.")])
    assert_right(batch, scale=0.125, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap(dtype):
    batch = make_batch(cpu.layout_for(dtype, 2, 64, 32), 8, [*DECODE, *SUFFIXES])
    assert_right(batch, scale=2.0, softcap=3.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 8, 64])
def test_splits_of_long_kv_are_merged(dtype, q_len, threads):
    """Two threads split the KV of the only request, and the long request beside a short one."""
    wanted = [Range(q_len, 5000, int8=".x"), Range(1, 40)]
    batch = make_batch(cpu.layout_for(dtype, 1, 32, 32), 4, wanted)
    threads(2)
    assert_right(batch, scale=0.2)
    threads(1)
    assert_right(batch, scale=0.2)


def test_parts_of_the_kv_are_merged_by_their_log_sum_exp():
    """A range that sees all of its KV is a pass over a part of a request's."""
    layout = cpu.layout_for(torch.float32, 1, 32, 32)
    whole = make_batch(layout, 2, [Range(3, 96)], gap=0)
    ids, r = whole.ranges.block_ids, whole.ranges

    def part(block_ids: torch.Tensor, kv_len: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        ranges = Ranges(r.q_start, r.q_len, int32([position]), int32([kv_len]), r.first_block, block_ids.contiguous())
        out, lse = torch.empty_like(whole.query), torch.empty(whole.query.shape[:2])
        return paged_attention(whole.query, whole.kv, ranges, scale=0.2, out=out, lse=lse), lse

    (old, old_lse), (new, new_lse) = part(ids[:1], 32, 93), part(ids[1:], 64, 61)
    weight = torch.sigmoid(old_lse - new_lse)[..., None]
    torch.testing.assert_close(weight * old + (1 - weight) * new, attended(whole, scale=0.2)[0])


def test_rows_of_a_block_table_are_not_copied():
    table = torch.arange(40, dtype=torch.int32).view(4, 10)[:, 1:6]
    ranges = Ranges.from_block_table(int32([0, 1, 3, 3, 9]), int32([5, 40, 0, 33]), table)
    assert ranges.block_ids.data_ptr() == table.data_ptr()
    assert ranges.first_block.tolist() == [0, 10, 20, 30]
    assert ranges.q_position.tolist() == [4, 38, 0, 27]
    assert ranges.num_tokens == 9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_written_tokens_are_where_the_layout_says(dtype, threads):
    threads(2)
    layout = cpu.layout_for(dtype, 2, 32, 32)
    kv = PagedKV(layout, torch.full((4, layout.page_elements), 99.0, dtype=dtype))
    slots = torch.tensor([*range(20, 70), -1, 5, 100, 101, 7])  # over two blocks, padding, single ones
    fused = torch.randn(len(slots), 2 * 2 * 32 + 10).to(dtype)  # K and V lie side by side, as a projection leaves them
    key, value = (fused[:, i * 64 : i * 64 + 64].view(-1, 2, 32) for i in range(2))
    cpu.write(key, value, kv, slots)
    index = torch.from_numpy(layout.index.copy())
    expected = torch.full((4, 2, 2, 32, 32), 99.0, dtype=dtype)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 32, :, 0, slot % 32], expected[slot // 32, :, 1, slot % 32] = key[t], value[t]
    assert torch.equal(kv.pages[:, index], expected)


def test_slot_behind_the_pages_is_refused_before_anything_is_written():
    layout = cpu.layout_for(torch.float32, 1, 32, 32)
    kv = PagedKV(layout, torch.zeros(2, layout.page_elements))
    token = torch.ones(2, 1, 32)
    with pytest.raises(IndexError, match="slot 64: must be less than 64"):
        cpu.write(token, token, kv, torch.tensor([3, 64]))
    assert not kv.pages.any()


@pytest.mark.parametrize("bad", [-1, 12])
def test_block_that_does_not_exist_is_refused_before_anything_is_written(bad):
    layout = cpu.layout_for(torch.float32, 1, 32, 32)
    batch = make_batch(layout, 2, [Range(1, 20), Range(1, 70)])
    batch.ranges.block_ids[2] = bad
    out = torch.zeros_like(batch.query)
    assert batch.kv.num_blocks + batch.kv.num_records <= 12
    with pytest.raises(IndexError, match="range 1 reads a block that does not exist: there are 6 pages and 4 records"):
        paged_attention(batch.query, batch.kv, batch.ranges, scale=1.0, out=out)
    assert not out.any()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"kv_len": 100_000},
            r"kv_len=100000, first_block=1: the ids of 3125 blocks must lie within the 4 of block_ids",
        ),
        ({"kv_len": 97}, "the ids of 4 blocks must lie within the 4"),
        ({"first_block": -1}, "first_block=-1: the ids of 3 blocks must"),
        ({"first_block": 2**62}, f"first_block={2**62}: the ids of 3 blocks must"),
        ({"q_start": -1}, "q_start=-1, q_len=1: must lie within the 6 query tokens"),
        ({"q_len": 2**31 - 2}, r"q_start=5, q_len=2147483646: must lie within the 6 query tokens"),
    ],
    ids=["far behind the list", "one behind the list", "before the list", "overflow", "before the query", "wraps"],
)
def test_range_beyond_its_tensors_is_refused_before_anything_is_written(changes: dict[str, int], reason: str) -> None:
    """What lies behind a list would be read as ids; and a sum of 32 bits may wrap."""
    batch = make_batch(cpu.layout_for(torch.float32, 1, 32, 32), 2, [Range(1, 20), Range(1, 70)])
    for name, value in changes.items():
        getattr(batch.ranges, name)[1] = value
    out = torch.zeros_like(batch.query)
    with pytest.raises(IndexError, match=f"^range 1: .*{reason}"):
        cpu.CpuAttention(batch.kv, 2, scale=1.0)(batch.query, batch.ranges, out)
    assert not out.any()


def test_block_table_narrower_than_a_sequence_is_refused() -> None:
    layout = cpu.layout_for(torch.float32, 1, 32, 32)
    kv = PagedKV(layout, torch.zeros(4, layout.page_elements))
    ranges = Ranges.from_block_table(int32([0, 1]), int32([100]), torch.zeros(1, 3, dtype=torch.int32))
    with pytest.raises(IndexError, match=r"range 0: kv_len=100.* ids of 4 blocks must lie within the 3"):
        paged_attention(torch.zeros(1, 1, 32), kv, ranges, scale=1.0)


class BothAtOnce:
    """In place of the library: no call of the kernel begins before there are two."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._two = threading.Barrier(2)

    def attend(self, call: Any) -> int:
        self._two.wait(HANG_S)
        return int(self._library.attend(call))


def test_threads_attend_at_once_with_the_same_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs without the GIL, so that another call may begin before it has read what it was told."""
    layout = cpu.layout_for(torch.float32, 2, 64, 32)
    batch = make_batch(layout, 4, [Range(1, 300), Range(70, 200)], gap=0)
    ranges = batch.ranges
    one, other = (
        Ranges(*(getattr(ranges, name)[part].contiguous() for name in EACH), ranges.block_ids)
        for part in (slice(0, 1), slice(1, 2))
    )
    attend = cpu.CpuAttention(batch.kv, 4, scale=0.125)
    alone = [torch.zeros_like(batch.query) for _ in range(2)]
    for part, out in zip((one, other), alone, strict=True):
        attend(batch.query, part, out)

    monkeypatch.setattr(attend, "_library", BothAtOnce(attend._library))
    together = [torch.zeros_like(batch.query) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(attend, [batch.query] * 2, (one, other), together))
    assert all(map(torch.equal, together, alone))


def kv_of(layout: PageLayout) -> PagedKV:
    return PagedKV(layout, torch.zeros(2, layout.page_elements, dtype=layout.dtype))


def test_what_the_kernel_has_no_code_for_is_refused_by_name():
    layout = cpu.layout_for(torch.float32, 2, 32, 32)
    with pytest.raises(ValueError, match="head_dim=80: must be a multiple of 32"):
        cpu.layout_for(torch.float32, 2, 80, 32)
    with pytest.raises(ValueError, match=r"dtype=torch\.float64"):
        cpu.layout_for(torch.float64, 2, 64, 32)
    with pytest.raises(ValueError, match="block_size=48: must be a multiple of 32"):
        kv_of(cpu.layout_for(torch.float32, 2, 32, 48))
    with pytest.raises(ValueError, match="layout="):
        cpu.CpuAttention(kv_of(PageLayout.rows(torch.float32, 2, 32, 32)), 2, scale=1.0)
    with pytest.raises(ValueError, match="num_heads=3: must be a multiple of the 2 KV heads"):
        cpu.CpuAttention(kv_of(layout), 3, scale=1.0)
    with pytest.raises(ValueError, match=r"num_heads=130: .* at most 64 for each"):
        cpu.CpuAttention(kv_of(layout), 130, scale=1.0)
    with pytest.raises(ValueError, match="window=-1"):
        cpu.CpuAttention(kv_of(layout), 2, scale=1.0, window=-1)


@pytest.mark.parametrize("name", ["query", "out", "lse"])
def test_tensor_of_another_shape_is_refused_by_name(name):
    batch = make_batch(cpu.layout_for(torch.float32, 1, 32, 32), 2, [Range(1, 20)])
    given = {"query": batch.query, "out": torch.zeros_like(batch.query), "lse": torch.zeros(batch.query.shape[:2])}
    given[name] = given[name][:1]
    attend = cpu.CpuAttention(batch.kv, 2, scale=1.0)
    with pytest.raises(ValueError, match=f"^{name}: torch.float32, shape"):
        attend(given["query"], batch.ranges, given["out"], given["lse"])


def test_records_of_another_shape_are_refused():
    layout = cpu.layout_for(torch.bfloat16, 1, 32, 32)
    with pytest.raises(ValueError, match=r"records: torch\.uint8, shape \(3, 2048\).*at least 2304"):
        PagedKV(
            layout, torch.zeros(2, layout.page_elements, dtype=torch.bfloat16), torch.zeros(3, 2048, dtype=torch.uint8)
        )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize(
    ("flag", "found"), [("-mno-avx512bf16", "AVX512"), ("-mno-avx512f", "AVX2"), ("-mno-avx", "scalar")]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_machines_with_fewer_instructions(dtype, flag, found, monkeypatch):
    monkeypatch.setattr(cpu, "FLAGS", ("-fopenmp", flag))
    monkeypatch.setattr(cpu, "library", cpu.library.__wrapped__)
    if "avx2" not in native.machine():
        pytest.skip("this machine itself has fewer")
    if "avx512f" in native.machine() or found == "scalar":
        assert cpu.arithmetic() == found
    wanted = [Range(r.q_len, r.kv_len, int8=".x") for r in [*DECODE, *SUFFIXES, Range(70, 70)]]
    assert_right(make_batch(cpu.layout_for(dtype, 2, 64, 32), 8, wanted), scale=0.125)


def test_instructions_have_a_name():
    assert cpu.arithmetic() in ("AVX512-BF16", "AVX512", "AVX2", "NEON", "scalar")
