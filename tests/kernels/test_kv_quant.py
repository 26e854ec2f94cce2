"""8-bit KV: the format by hand, its error, and that the fast path says the same as the definition, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.kernels.kv_quant import cpu, reference
from vllm_ext.kernels.kv_quant.format import LEAST_SCALE, LEVELS, PageLayout, RecordFormat, Side

TYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = (ROWS, TRANSPOSED) = (PageLayout.rows, PageLayout.transposed_keys)
EACH_TYPE = pytest.mark.parametrize("dtype", TYPES, ids=str)
EACH_LAYOUT = pytest.mark.parametrize("make", LAYOUTS, ids=["rows", "transposed-keys"])
Make = Callable[[torch.dtype, int, int, int], PageLayout]


def one_channel(*values: float, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, RecordFormat]:
    """Pages of one head of one channel, K and V alike, a block of so many tokens."""
    fmt = RecordFormat(PageLayout.transposed_keys(dtype, 1, 1, len(values)))
    return torch.tensor([[*values, *values]], dtype=dtype), fmt


def quantised(pages: torch.Tensor, fmt: RecordFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Records of all pages by the definition, and which hold."""
    return reference.quantise(pages, torch.arange(len(pages)), fmt)


def there_and_back(pages: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    records, holds = quantised(pages, fmt)
    assert holds.all()
    back = torch.zeros_like(pages)
    reference.dequantise(records, back, torch.arange(len(pages)), fmt)
    return back


# --- the format -------------------------------------------------------------------------------------------------------


def test_worked_example() -> None:
    """From -1 to 1.55 the range is 2.55 and a step of 0.01 would do; bfloat16 has 0.010009765625 above it."""
    pages, fmt = one_channel(-1.0, -0.5, 0.0, 1.546875, dtype=torch.bfloat16)
    records, holds = quantised(pages, fmt)
    assert holds.tolist() == [True]
    record, scale = records[0], 0.010009765625
    assert (
        record[:4].tolist() == [0, round(0.5 / scale), round(1 / scale), round(2.546875 / scale)] == [0, 50, 100, 254]
    )
    assert record[fmt.minima_offset : fmt.scales_offset].view(torch.bfloat16).tolist() == [-1.0, -1.0]
    assert record[fmt.scales_offset :][:4].view(torch.bfloat16).tolist() == [scale, scale]


@pytest.mark.parametrize(("tokens", "ratio"), [(16, 1.6), (32, 1.77), (64, 1.88), (128, 1.93)])
@EACH_LAYOUT
def test_bytes_of_a_block(make: Make, tokens: int, ratio: float) -> None:
    fmt = RecordFormat(make(torch.bfloat16, 8, 128, tokens))
    assert fmt.record_bytes == 8 * 2 * 128 * (tokens + 4)
    assert fmt.ratio == pytest.approx(2 / (1 + 4 / tokens))
    assert fmt.ratio == pytest.approx(ratio, abs=0.01)


def test_where_the_parts_of_an_odd_record_lie() -> None:
    fmt = RecordFormat(PageLayout.rows(torch.float32, 1, 3, 3))
    assert (fmt.codes_bytes, fmt.minima_offset, fmt.scales_offset, fmt.record_bytes) == (18, 20, 44, 128)


@EACH_TYPE
@given(step=st.floats(0, 2.0**127, width=32))
def test_a_scale_is_the_least_number_of_its_type_that_is_enough(dtype: torch.dtype, step: float) -> None:
    high = torch.tensor([step]).clamp(max=torch.finfo(dtype).max).to(dtype).float()
    (scale,), (holds,) = reference.scales(torch.zeros(1), high, dtype)
    if not holds:
        assert float(high) + 255 * float(scale) > torch.finfo(dtype).max
        return
    if high == 0:
        assert scale == 0
        return
    needed = max(float(high / LEVELS), LEAST_SCALE)
    assert float(scale) >= needed
    assert float(torch.nextafter(scale, torch.zeros_like(scale))) < needed


def test_a_layout_found_by_probing_is_that_layout() -> None:
    for make in LAYOUTS:
        layout = make(torch.bfloat16, 3, 8, 4)
        assert PageLayout.from_index(torch.bfloat16, layout.index) == layout
    packed = layout.index.copy()
    packed[..., :2, :] = packed[..., 1::-1, :]
    with pytest.raises(ValueError, match="page"):
        PageLayout.from_index(torch.bfloat16, packed)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"v": Side(0, 16, 1)}, "each element once"),
        ({"dtype": torch.int8}, "dtype=torch.int8"),
        ({"head_dim": 4, "k": Side(0, 8, 2), "v": Side(1, 8, 2)}, "next to each other"),
    ],
)
def test_impossible_layouts_are_refused(changes: dict[str, object], says: str) -> None:
    fields = {
        "dtype": torch.bfloat16, "num_heads": 1, "head_dim": 8, "block_size": 4, "head_stride": 64,
        "k": Side(0, 16, 1), "v": Side(8, 16, 1),
    }  # fmt: skip
    assert PageLayout(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=says):
        PageLayout(**{**fields, **changes})  # type: ignore[arg-type]


# --- the error --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-6e4, 6e4, width=16), min_size=2, max_size=12), st.sampled_from(TYPES))
def test_no_error_exceeds_half_a_scale_and_the_rounding_of_the_type(values: list[float], dtype: torch.dtype) -> None:
    pages, fmt = one_channel(*values, dtype=dtype)
    back = there_and_back(pages, fmt).double()
    kind = torch.finfo(dtype)
    span = float(pages.double().max() - pages.double().min())
    scale = max(span / 255 * (1 + kind.eps), kind.smallest_normal * kind.eps) if span else 0.0
    rounding = kind.eps * float(pages.double().abs().max() + scale)
    assert float((back - pages.double()).abs().max()) <= 0.5 * scale * (1 + 1e-4) + rounding


@EACH_TYPE
@pytest.mark.parametrize("value", [0.0, 1.0, -3.14, 6e4, 1e-7])
def test_constant_channels_and_minima_are_exact(dtype: torch.dtype, value: float) -> None:
    pages, fmt = one_channel(*[value] * 5, dtype=dtype)
    assert torch.equal(there_and_back(pages, fmt), pages)
    pages, fmt = one_channel(value, value + 1, value + 7, dtype=dtype)
    assert there_and_back(pages, fmt)[0, 0] == pages[0, 0]


@EACH_LAYOUT
@EACH_TYPE
@pytest.mark.parametrize("strange", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_reported_by_block(make: Make, dtype: torch.dtype, strange: float) -> None:
    fmt = RecordFormat(make(dtype, 2, 24, 4))
    pages = torch.randn(4, fmt.layout.page_elements).to(dtype)
    pages[2, 17] = strange
    assert quantised(pages, fmt)[1].tolist() == [True, True, False, True]
    records = torch.zeros(3, fmt.record_bytes, dtype=torch.uint8)
    assert cpu.quantise(pages, np.array([1, 2, 0]), records, np.arange(3), fmt).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("dtype", "values", "holds"),
    [
        (torch.float32, (-3e38, 3e38), False), (torch.bfloat16, (-3e38, 3e38), False), (torch.float32, (0, 3e38), True),
        (torch.float16, (-65504.0, 65504.0), False), (torch.float16, (-6e4, 6e4), True),
    ],
)  # fmt: skip
def test_a_channel_that_would_come_back_as_infinite_is_reported(
    dtype: torch.dtype, values: tuple[float, float], holds: bool
) -> None:
    """From -65504 to 65504 the scale is 514 of fp16: code 255 would be 65566, which rounds to infinity."""
    pages, fmt = one_channel(*values, dtype=dtype)
    assert quantised(pages, fmt)[1].tolist() == [holds]
    records = torch.zeros(1, fmt.record_bytes, dtype=torch.uint8)
    assert cpu.quantise(pages, np.array([0]), records, np.array([0]), fmt).tolist() == [holds]


# --- the fast path ----------------------------------------------------------------------------------------------------


def strange_pages(dtype: torch.dtype, layout: PageLayout, seed: int) -> torch.Tensor:
    """Pages with channels of very different ranges, constants, zeros of both signs, and denormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(12, layout.page_elements, generator=generator)
    index = torch.from_numpy(layout.index)
    sizes = torch.tensor([0.0, 1e-40, 1e-9, 1e-5, 0.1, 1.0, 30.0, 1000.0, 6000.0])
    scale = sizes[torch.randint(len(sizes), (layout.num_heads, 2, 1, layout.head_dim), generator=generator)]
    offset = 100 * torch.randn(layout.num_heads, 2, 1, layout.head_dim, generator=generator).round()
    values = wide[:, index] * scale + torch.where(scale < 100, offset, 0)
    values[values == 0] = -0.0
    pages = torch.empty_like(wide)
    pages[:, index.flatten()] = values.reshape(12, -1)
    return pages.to(dtype)


SHAPES = {"as in models": (2, 64, 32), "tall": (1, 128, 64), "odd": (3, 24, 4), "tails": (2, 17, 33), "one": (1, 1, 5)}
"""KV heads, channels and tokens of a block."""


@EACH_LAYOUT
@EACH_TYPE
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_cpu_path_is_the_definition_bit_for_bit(
    make: Make, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    layout = make(dtype, *shape)
    fmt = RecordFormat(layout)
    pages = strange_pages(dtype, layout, sum(shape))
    ids = np.array([7, 0, 11])
    expected, holds = reference.quantise(pages, torch.from_numpy(ids), fmt)
    assert holds.all()
    records = torch.full((5, fmt.record_bytes), 0xAB, dtype=torch.uint8)
    slots = np.array([4, 0, 2])
    assert cpu.quantise(pages, ids, records, slots, fmt).all()
    ends = fmt.scales_offset + fmt.scales_offset - fmt.minima_offset
    parts = [slice(fmt.codes_bytes), slice(fmt.minima_offset, ends)]
    assert all(torch.equal(records[slots][:, part], expected[:, part]) for part in parts)
    assert (records[[1, 3]] == 0xAB).all(), "nobody else's place is written"
    assert (records[:, ends:] == 0xAB).all(), "nor what fills a record up"

    wanted = np.array([1, 9, 10])
    back, same = torch.full_like(pages, 7.0), torch.full_like(pages, 7.0)
    reference.dequantise(expected, back, torch.from_numpy(wanted), fmt)
    cpu.dequantise(records, slots, same, wanted, fmt)
    assert torch.equal(back, same)
    assert (same[[block for block in range(12) if block not in wanted]] == 7).all()
    largest = pages[7].float().abs().max()
    assert (same[1].float() - pages[7].float()).abs().max() <= 0.01 * largest, "the first block, where it was wanted"


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@EACH_LAYOUT
def test_channels_of_one_sign_have_their_own_extremes(make: Make, sign: float) -> None:
    """The bits of negative numbers are in the opposite order, so that all of one sign is a case of its own."""
    layout = make(torch.bfloat16, 1, 32, 16)
    fmt = RecordFormat(layout)
    pages = sign * (1 + torch.rand(1, layout.page_elements, generator=torch.Generator().manual_seed(1))).bfloat16()
    pages[0, 3] = sign * 0.0
    records = torch.zeros(1, fmt.record_bytes, dtype=torch.uint8)
    assert cpu.quantise(pages, np.array([0]), records, np.array([0]), fmt).all()
    assert torch.equal(records, quantised(pages, fmt)[0])


def test_pages_of_layers_that_lie_between_each_other_are_found() -> None:
    """Another layer's pages may lie between a layer's own."""
    layout = PageLayout.transposed_keys(torch.bfloat16, 2, 32, 16)
    fmt = RecordFormat(layout)
    both = torch.randn(6, 2, layout.page_elements, generator=torch.Generator().manual_seed(2)).bfloat16()
    pages = both[:, 1]
    records = torch.zeros(2, fmt.record_bytes, dtype=torch.uint8)
    assert cpu.quantise(pages, np.array([5, 1]), records, np.array([0, 1]), fmt).all()
    assert torch.equal(records, reference.quantise(pages.contiguous(), torch.tensor([5, 1]), fmt)[0])
    other = both[:, 0].clone()
    cpu.dequantise(records, np.array([0]), pages, np.array([2]), fmt)
    assert torch.equal(both[:, 0], other)
    assert (both[2, 1].float() - both[5, 1].float()).abs().max() < 0.05


def test_a_block_without_a_slot_is_refused() -> None:
    pages, fmt = one_channel(1.0, 2.0)
    with pytest.raises(ValueError, match=r"slots: must be of shape \(1,\)"):
        cpu.quantise(pages, np.array([0]), torch.zeros(1, fmt.record_bytes, dtype=torch.uint8), np.array([0, 0]), fmt)
