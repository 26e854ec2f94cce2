"""KV into chunks and back: what comes back, and that nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_ext.config.kv_tier import LOSSLESS, QUANTISED
from vllm_ext.kernels.kv_quant.format import PageLayout
from vllm_ext.kv.host.codec import QuantisedCodec, RawCodec
from vllm_ext.kv.host.layout import PackedPages

from .tier_worker_parts import LAYOUT, codec, geometry, random_kv

BITS = pytest.mark.parametrize("bits", [LOSSLESS, QUANTISED])


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@BITS
def test_blocks_come_back_where_they_are_wanted_and_nowhere_else(bits: int) -> None:
    kv = random_kv()
    before = [tensor.clone() for tensor in kv]
    tier = codec(bits, kv)
    for tensor in range(len(kv)):
        assert tier.store(tensor, ids(3, 5, 7), ids(4, 0, 1)).all()
        tier.load(tensor, ids(1, 4, 0), ids(9, 10, 11))
    for tensor, original in zip(kv, before, strict=True):
        values, was = tensor.view(LAYOUT.dtype).float(), original.view(LAYOUT.dtype).float()
        untouched = [0, 1, 2, 3, 4, 5, 6, 7, 8]
        assert torch.equal(values[untouched], was[untouched])
        exact = bits == LOSSLESS
        torch.testing.assert_close(values[[9, 10, 11]], was[[7, 3, 5]], rtol=0, atol=0 if exact else 0.03)


@BITS
def test_chunks_do_not_overlap(bits: int) -> None:
    """All chunks of all tensors are written, each with a block of its own, and each is read back."""
    kv = random_kv(num_tensors=3)
    tier, reference = codec(bits, kv, num_chunks=4), codec(bits, [tensor.clone() for tensor in kv], num_chunks=4)
    for tensor in range(3):
        tier.store(tensor, ids(0, 1, 2, 3), ids(0, 1, 2, 3))
    for chunk in range(4):
        for tensor in range(3):
            reference.store(tensor, ids(chunk), ids(0))
            reference.load(tensor, ids(0), ids(8))
            tier.load(tensor, ids(chunk), ids(10))
    for tensor in range(3):
        expected = reference._pages[tensor][8]  # type: ignore[attr-defined]
        assert torch.equal(torch.as_tensor(tier._pages[tensor][10]), torch.as_tensor(expected))  # type: ignore[attr-defined]


def test_what_is_not_finite_is_kept_only_as_it_is() -> None:
    kv = random_kv()
    kv[0].view(LAYOUT.dtype)[3, 5] = float("inf")
    assert codec(QUANTISED, kv).store(0, ids(3, 4), ids(0, 1)).tolist() == [False, True]
    lossless = codec(LOSSLESS, kv)
    assert lossless.store(0, ids(3), ids(0)).tolist() == [True]
    lossless.load(0, ids(0), ids(9))
    assert torch.equal(kv[0][9], kv[0][3])


def test_a_chunk_smaller_than_the_workers_blocks_is_refused() -> None:
    kv = random_kv(num_tensors=3)
    pool, too_small = torch.zeros(1000, dtype=torch.uint8), geometry(LOSSLESS)
    with pytest.raises(ValueError, match="this worker's blocks take"):
        RawCodec(kv, pool, too_small)


def test_records_of_another_size_and_lists_of_unlike_length_are_refused() -> None:
    kv = random_kv()
    with pytest.raises(ValueError, match="record_bytes="):
        QuantisedCodec(kv, torch.zeros(1000, dtype=torch.uint8), geometry(LOSSLESS), LAYOUT)
    with pytest.raises(ValueError, match=r"blocks: must be one for each of 2 chunks, not of shape \(1,\)"):
        codec(LOSSLESS, kv).store(0, ids(3), ids(0, 1))


def test_packed_pages_are_put_in_order_first_and_back() -> None:
    """Pages whose values lie anywhere: records are those of ordered pages, and come back where they were."""
    ordered = random_kv()
    order = np.random.default_rng(3).permutation(LAYOUT.page_elements)
    rows = PageLayout.rows(LAYOUT.dtype, LAYOUT.num_heads, LAYOUT.head_dim, LAYOUT.block_size)
    packed = PackedPages(rows, order.astype(np.int64).tobytes())
    scrambled = [torch.empty_like(tensor) for tensor in ordered]
    for tensor, other in zip(ordered, scrambled, strict=True):
        other.view(LAYOUT.dtype)[:, torch.from_numpy(order)] = tensor.view(LAYOUT.dtype)
    before = [tensor.clone() for tensor in scrambled]
    blocks, chunks = ids(*range(9)), ids(4, 1, 0, 2, 3, 8, 7, 6, 5)  # more than are put in order at a time
    kinds = {"layout": rows}, {"layout": packed}
    plain, tier = (
        codec(QUANTISED, kv, num_chunks=9, **kind) for kv, kind in zip((ordered, scrambled), kinds, strict=True)
    )
    for tensor in range(len(ordered)):
        for one in (plain, tier):
            assert one.store(tensor, blocks, chunks).all()
            one.load(tensor, ids(4, 2), ids(9, 11))
    assert torch.equal(tier._records, plain._records)  # type: ignore[attr-defined]
    for tensor, expected, was in zip(scrambled, ordered, before, strict=True):
        assert torch.equal(tensor.view(LAYOUT.dtype)[:, torch.from_numpy(order)], expected.view(LAYOUT.dtype))
        assert torch.equal(tensor[:9], was[:9])


@BITS
@pytest.mark.parametrize(
    ("block", "chunk", "said"),
    [(12, 0, "blocks: 3 to 12, must be 0 to 11"), (-1, 0, "blocks: -1 to 3"),
     (0, 6, "chunks: 0 to 6, must be 0 to 5"), (0, -1, "chunks: -1 to 0")],
    ids=["no-such-block", "a-negative-block", "no-such-chunk", "a-negative-chunk"],
)  # fmt: skip
def test_what_does_not_exist_is_refused_before_anything_is_written(
    bits: int, block: int, chunk: int, said: str
) -> None:
    """The copy took any number for an address: it read or wrote somebody else's memory."""
    kv = random_kv(num_blocks=12)
    tier = codec(bits, kv, num_chunks=6)
    pool, before = tier._pool if bits == LOSSLESS else tier._records, [tensor.clone() for tensor in kv]  # type: ignore[attr-defined]
    was = pool.copy() if bits == LOSSLESS else pool.clone()
    with pytest.raises(ValueError, match=said):
        tier.store(0, ids(3, block), ids(0, chunk))
    with pytest.raises(ValueError, match=said):
        tier.load(0, ids(0, chunk), ids(3, block))
    assert (pool == was).all()
    assert all(torch.equal(tensor, original) for tensor, original in zip(kv, before, strict=True))
