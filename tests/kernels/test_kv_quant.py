"""8-bit KV: the format by hand, its error, and that the fast path says the same as the definition, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.extent import with_full
from vllm_ext.kernels.kv_quant import cpu, reference, vectors
from vllm_ext.kernels.kv_quant.format import INVERSES, SCALES, PageLayout, RecordFormat, Side

TYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = (ROWS, TRANSPOSED) = (PageLayout.rows, PageLayout.transposed_keys)
EACH_TYPE = pytest.mark.parametrize("dtype", TYPES, ids=str)
EACH_LAYOUT = pytest.mark.parametrize("make", LAYOUTS, ids=["rows", "transposed-keys"])
Make = Callable[[torch.dtype, int, int, int], PageLayout]


def _name(value: object) -> str:
    return getattr(value, "__name__", str(value))


# To compile takes seconds. By default each type meets single values and wide vectors, and so does each layout.
SCALAR = pytest.mark.parametrize(
    ("make", "dtype"),
    with_full(
        [(TRANSPOSED, torch.bfloat16), (ROWS, torch.float16), (TRANSPOSED, torch.float32)],
        itertools.product(LAYOUTS, TYPES),
    ),
    ids=_name,
)


def one_channel(*values: float, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, RecordFormat]:
    """Pages of one head of one channel, K and V alike, a block of so many tokens."""
    fmt = RecordFormat(PageLayout.transposed_keys(dtype, 1, 1, len(values)), 1)
    return torch.tensor([[*values, *values]], dtype=dtype), fmt


def there_and_back(pages: torch.Tensor, ids: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    records, holds = reference.quantise(pages, ids, fmt)
    assert holds.all()
    back = torch.zeros_like(pages)
    reference.dequantise(records, ids, back, fmt)
    return back


# --- the format -------------------------------------------------------------------------------------------------------


def test_worked_example() -> None:
    """From -1 to 1.55 the range is 2.55: a scale of 0.01 would do, the next step above is 2**-6.625 = 0.010131."""
    pages, fmt = one_channel(-1.0, -0.5, 0.0, 1.55)
    records, holds = reference.quantise(pages, torch.tensor([[0]]), fmt)
    assert holds.tolist() == [True]
    record = records[0]
    scale = 2**-6.625
    assert record[:4].tolist() == [0, round(0.5 / scale), round(1 / scale), round(2.55 / scale)] == [0, 49, 99, 252]
    assert record[fmt.minima_at : fmt.scales_at].view(torch.float32).tolist() == [-1.0, -1.0]
    code = int(record[fmt.scales_at])
    assert code == 1 + 8 * (22 - 7) + 3, "three eighths of an octave above 2**-7"
    assert SCALES[code] == pytest.approx(scale, rel=1e-6)


def test_scales_are_steps_of_an_eighth_of_an_octave() -> None:
    assert SCALES[0] == INVERSES[0] == 0
    assert SCALES[1] == 2.0**-22
    assert SCALES[255] * 255 > 2 * 65504, "every range of fp16"
    np.testing.assert_allclose(SCALES[2:] / SCALES[1:-1], 2**0.125, rtol=1e-6)


@pytest.mark.parametrize(("tokens", "least"), [(16, 1.68), (32, 1.82), (64, 1.9), (128, 1.95)])
@EACH_LAYOUT
def test_bytes_of_a_group(make: Make, tokens: int, least: float) -> None:
    fmt = RecordFormat(make(torch.bfloat16, 8, 128, 16), tokens // 16)
    assert fmt.record_bytes == 8 * 2 * 128 * (tokens + 3)
    assert fmt.ratio == pytest.approx(2 / (1 + 3 / tokens))
    assert fmt.ratio >= least


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
    with pytest.raises(ValueError, match="blocks=0"):
        RecordFormat(PageLayout.rows(torch.bfloat16, 1, 8, 4), 0)


# --- the error --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e4, 1e4, width=16), min_size=2, max_size=12), st.sampled_from(TYPES))
def test_no_error_exceeds_half_a_scale_and_the_rounding_of_the_type(values: list[float], dtype: torch.dtype) -> None:
    pages, fmt = one_channel(*values, dtype=dtype)
    back = there_and_back(pages, torch.tensor([[0]]), fmt).double()
    span = float(pages.double().max() - pages.double().min())
    scale = max(span / 255 * 2**0.125, 2.0**-22) if span else 0.0
    rounding = torch.finfo(dtype).eps * float(pages.double().abs().max())
    assert float((back - pages.double()).abs().max()) <= 0.5 * scale * (1 + 1e-4) + rounding


@EACH_TYPE
@pytest.mark.parametrize("value", [0.0, 1.0, -3.14, 6e4, 1e-7])
def test_constant_channels_and_minima_are_exact(dtype: torch.dtype, value: float) -> None:
    pages, fmt = one_channel(*[value] * 5, dtype=dtype)
    assert torch.equal(there_and_back(pages, torch.tensor([[0]]), fmt), pages)
    pages, fmt = one_channel(value, value + 1, value + 7, dtype=dtype)
    assert there_and_back(pages, torch.tensor([[0]]), fmt)[0, 0] == pages[0, 0]


@SCALAR
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_reported_by_group(make: Make, dtype: torch.dtype, strange: float) -> None:
    fmt = RecordFormat(make(dtype, 2, 24, 4), 2)
    pages = torch.randn(6, fmt.layout.page_elements).to(dtype)
    pages[3, 17] = strange
    ids = torch.tensor([[0, 1], [2, 3], [5, 4]])
    assert reference.quantise(pages, ids, fmt)[1].tolist() == [True, False, True]
    records = torch.zeros(3, fmt.record_bytes, dtype=torch.uint8)
    assert cpu.quantise(pages, ids.numpy(), records, np.arange(3), fmt).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_range_that_no_scale_can_say_is_reported(dtype: torch.dtype) -> None:
    for most in (3e5, 3e38):
        pages, fmt = one_channel(-most, 0.0, most, dtype=dtype)
        assert not reference.quantise(pages, torch.tensor([[0]]), fmt)[1].any()
        records = torch.zeros(1, fmt.record_bytes, dtype=torch.uint8)
        assert not cpu.quantise(pages, np.array([[0]]), records, np.array([0]), fmt).any()


# --- the fast path ----------------------------------------------------------------------------------------------------


def strange_pages(dtype: torch.dtype, layout: PageLayout, seed: int) -> torch.Tensor:
    """Pages with channels of very different ranges, constants, zeros of both signs, and denormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(12, layout.page_elements, generator=generator)
    index = torch.from_numpy(layout.index)
    sizes = torch.tensor([0.0, 1e-9, 1e-5, 0.1, 1.0, 30.0, 1000.0, 6000.0])
    scale = sizes[torch.randint(len(sizes), (layout.num_heads, 2, 1, layout.head_dim), generator=generator)]
    offset = 100 * torch.randn(layout.num_heads, 2, 1, layout.head_dim, generator=generator).round()
    values = wide[:, index] * scale + torch.where(scale < 100, offset, 0)
    values[values == 0] = -0.0
    pages = torch.empty_like(wide)
    pages[:, index.flatten()] = values.reshape(12, -1)
    return pages.to(dtype)


@SCALAR
@pytest.mark.parametrize("seed", range(3))
def test_the_cpu_path_is_the_definition_bit_for_bit(make: Make, dtype: torch.dtype, seed: int) -> None:
    layout = make(dtype, 3, 24, (4, 6, 16)[seed])
    fmt = RecordFormat(layout, 3)
    pages = strange_pages(dtype, layout, seed)
    ids = torch.tensor([[7, 0, 3], [2, 11, -1], [5, -1, -1]])
    expected, holds = reference.quantise(pages, ids, fmt)
    assert holds.all()
    records = torch.zeros(5, fmt.record_bytes, dtype=torch.uint8)
    slots = np.array([4, 0, 2])
    assert cpu.quantise(pages, ids.numpy(), records, slots, fmt).all()
    assert torch.equal(records[slots], expected)
    assert not records[[1, 3]].any(), "nobody else's place is written"

    wanted = torch.tensor([[1, -1, 9], [10, 4, -1], [-1, -1, -1]])
    back, same = torch.full_like(pages, 7.0), torch.full_like(pages, 7.0)
    reference.dequantise(expected, wanted, back, fmt)
    cpu.dequantise(records, slots, same, wanted.numpy(), fmt)
    assert torch.equal(back, same)
    untouched = [block for block in range(12) if block not in (1, 9, 10, 4)]
    assert (same[untouched] == 7).all()
    largest = pages[7].float().abs().max()
    assert (same[1].float() - pages[7].float()).abs().max() <= 0.01 * largest, "the first block of the first group"


WIDE = (2, 64, 32)
"""KV heads, channels and tokens of a block whose vectors are as wide as they get, as in real models."""
HALF = [(make, torch.bfloat16, shape) for make in LAYOUTS for shape in ((1, 64, 64), (2, 32, 16))]


@pytest.mark.parametrize(
    ("make", "dtype", "shape"),
    with_full(
        [(ROWS, torch.bfloat16, WIDE), (TRANSPOSED, torch.float16, WIDE), (ROWS, torch.float32, WIDE), *HALF],
        [(make, dtype, WIDE) for make in LAYOUTS for dtype in TYPES],
    ),
    ids=_name,
)
def test_whole_vectors_are_the_definition_bit_for_bit(
    make: Make, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    layout = make(dtype, *shape)
    fmt = RecordFormat(layout, 2)
    pages = strange_pages(dtype, layout, 5)
    ids = torch.tensor([[7, 0], [11, -1], [-1, 3]])
    expected, holds = reference.quantise(pages, ids, fmt)
    assert holds.all()
    records = torch.zeros(3, fmt.record_bytes, dtype=torch.uint8)
    assert cpu.quantise(pages, ids.numpy(), records, np.arange(3), fmt).all()
    assert torch.equal(records, expected)
    back, same = torch.full_like(pages, 7.0), torch.full_like(pages, 7.0)
    reference.dequantise(expected, ids, back, fmt)
    cpu.dequantise(records, np.arange(3), same, ids.numpy(), fmt)
    assert torch.equal(back, same)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@EACH_LAYOUT
def test_channels_of_one_sign_have_their_own_extremes(make: Make, sign: float) -> None:
    """The bits of negative numbers are in the opposite order, so that all of one sign is a case of its own."""
    layout = make(torch.bfloat16, 1, 32, 16)
    fmt = RecordFormat(layout, 1)
    pages = sign * (1 + torch.rand(1, layout.page_elements, generator=torch.Generator().manual_seed(1))).bfloat16()
    pages[0, 3] = sign * 0.0
    expected, _ = reference.quantise(pages, torch.tensor([[0]]), fmt)
    records = torch.zeros(1, fmt.record_bytes, dtype=torch.uint8)
    assert cpu.quantise(pages, np.array([[0]]), records, np.array([0]), fmt).all()
    assert torch.equal(records, expected)


def test_pages_of_layers_that_lie_between_each_other_are_found() -> None:
    """Another layer's pages may lie between a layer's own."""
    layout = PageLayout.transposed_keys(torch.bfloat16, 2, 32, 16)
    fmt = RecordFormat(layout, 2)
    both = torch.randn(6, 2, layout.page_elements, generator=torch.Generator().manual_seed(2)).bfloat16()
    pages, ids = both[:, 1], torch.tensor([[5, 1]])
    records = torch.zeros(1, fmt.record_bytes, dtype=torch.uint8)
    assert cpu.quantise(pages, ids.numpy(), records, np.array([0]), fmt).all()
    assert torch.equal(records, reference.quantise(pages.contiguous(), ids, fmt)[0])
    other = both[:, 0].clone()
    cpu.dequantise(records, np.array([0]), pages, np.array([[0, 2]]), fmt)
    assert torch.equal(both[:, 0], other)
    assert (both[0, 1].float() - both[5, 1].float()).abs().max() < 0.05


# --- the vectors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 2, 16, 32])
def test_extremes_of_each_of_several_vectors(lanes: int) -> None:
    of = vectors.operations(torch.bfloat16, lanes)
    least, most, unsigned, store = of.least_of_each, of.most_of_each, of.most_unsigned_of_each, of.store

    @numba.njit
    def reduce(bits: np.ndarray, found: np.ndarray) -> None:
        store(found, 0, least(bits, 0))
        store(found, lanes, most(bits, 0))
        store(found, 2 * lanes, unsigned(bits, 0))

    bits = np.random.default_rng(lanes).integers(-(2**15), 2**15, (lanes, lanes)).astype(np.int16)
    found = np.zeros((3, lanes), np.int16)
    reduce(bits.reshape(-1), found.reshape(-1))
    expected = [bits.min(1), bits.max(1), bits.view(np.uint16).max(1).view(np.int16)]
    np.testing.assert_array_equal(found, expected)
