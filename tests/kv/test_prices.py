"""What copies take, from what they took."""

from __future__ import annotations

import pytest

from vllm_ext.kv.connector.prices import Bandwidth, TransferPrices


def test_a_bandwidth_starts_as_told_and_is_then_what_was_measured() -> None:
    bandwidth = Bandwidth()
    assert not bandwidth.known
    bandwidth.observe(100, 2.0)
    assert bandwidth.bytes_per_s == pytest.approx(50.0)
    bandwidth.observe(300, 2.0)
    assert bandwidth.bytes_per_s == pytest.approx(100.0)


def test_old_copies_count_less() -> None:
    bandwidth = Bandwidth()
    bandwidth.observe(2**30, 1.0)
    for _ in range(20):
        bandwidth.observe(2**30, 10.0)
    assert bandwidth.bytes_per_s == pytest.approx(2**30 / 10, rel=1e-3)


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 1.0), (10, 0.0), (-1, 1.0), (10, float("nan"))])
def test_copies_of_nothing_say_nothing(num_bytes: int, seconds: float) -> None:
    bandwidth = Bandwidth()
    begins = bandwidth.bytes_per_s
    bandwidth.observe(num_bytes, seconds)
    assert bandwidth.bytes_per_s == begins


def test_only_whole_chunks_are_copied() -> None:
    prices = TransferPrices(1000, 32)
    prices.out.observe(2000, 1.0)
    prices.back.observe(4000, 1.0)
    assert prices.store_s(31) == prices.load_s(31) == 0.0
    assert prices.store_s(64) == prices.store_s(95) == pytest.approx(1.0)
    assert prices.load_s(64) == pytest.approx(0.5)
    assert prices.kept_tokens(95) == 64
