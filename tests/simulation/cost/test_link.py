"""The host link: each direction in order, both together slower, and every byte accounted for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.simulation.cost.link import Direction, TransferLink

OUT, IN = Direction.TO_HOST, Direction.TO_DEVICE


def drain(link: TransferLink) -> list[tuple[float, int]]:
    """Follow the link's own ends until it is idle."""
    ends = []
    while (end := link.next_end_s()) is not None:
        finished = link.advance(end)
        assert finished, "an end was announced and nothing was through"
        ends.extend((end, transfer_id) for transfer_id in finished)
    return ends


def test_a_transfer_alone_has_the_whole_rate() -> None:
    link = TransferLink(1e9)
    assert link.submit(2.0, OUT, 3e9) == 0
    assert link.next_end_s() == 5.0
    assert link.advance(4.999) == []
    assert link.advance(5.0) == [0]
    assert link.next_end_s() is None


def test_one_direction_works_in_order() -> None:
    link = TransferLink(1e9)
    for size in (3e9, 1e9, 0.0, 2e9):
        link.submit(0.0, IN, size)
    assert drain(link) == [(3.0, 0), (4.0, 1), (4.0, 2), (6.0, 3)]


def test_every_copy_costs_its_overhead_in_which_nothing_moves() -> None:
    """Set-up of 4 x 0.5 s: the other direction has the full rate until then."""
    link = TransferLink(1e9, copy_overhead_s=0.5)
    link.submit(0.0, OUT, 1e9, num_copies=4)
    link.submit(0.0, IN, 1.5e9)
    assert drain(link) == [(pytest.approx(2.0), 1), (pytest.approx(3.0), 0)]


def test_a_transfer_of_no_bytes_is_through_at_once_after_its_overhead() -> None:
    link = TransferLink(1e9)
    link.submit(1.0, OUT, 0)
    assert link.next_end_s() == 1.0
    assert link.advance(1.0) == [0]
    slow = TransferLink(1e9, copy_overhead_s=0.25)
    slow.submit(1.0, OUT, 0)
    assert drain(slow) == [(1.25, 0)]


def test_a_transfer_does_not_begin_before_its_time_and_is_no_burden_until_then() -> None:
    """Both directions have 0.81 GB/s until 1 / 0.81 s, and again for 1 / 0.81 s from 3 s on."""
    link = TransferLink(1e9)
    link.submit(0.0, OUT, 1e9)
    link.submit(3.0, OUT, 1e9)
    link.submit(0.0, IN, 4e9)
    both = 1 / 0.81
    assert drain(link) == [(pytest.approx(both), 0), (pytest.approx(3 + both), 1), (pytest.approx(2 + 2 * both), 2)]


def test_looking_does_not_move_an_end() -> None:
    link = TransferLink(7e8)
    link.submit(0.1, OUT, 1e9 / 3)
    link.submit(0.2, IN, 1e9 / 7)
    end = link.next_end_s()
    for now in (0.2, 0.21, 0.23):
        assert link.advance(now) == []
        link.busy_s(OUT)
        assert link.next_end_s() == end


def test_busy_time_counts_set_up_as_it_passes() -> None:
    link = TransferLink(1e9, copy_overhead_s=0.5)
    link.submit(1.0, OUT, 2e9, num_copies=2)
    for now, busy_s in ((0.5, 0.0), (3.0, 2.0), (10.0, 3.0)):
        link.advance(now)
        assert link.busy_s(OUT) == pytest.approx(busy_s)
    assert link.busy_s(IN) == 0


@pytest.mark.parametrize("now", [0.5, -1.0, math.nan, math.inf])
def test_the_clock_never_goes_back(now: float) -> None:
    link = TransferLink(1e9)
    link.advance(1.0)
    with pytest.raises(ValueError, match="now="):
        link.advance(now)
    with pytest.raises(ValueError, match="start_s="):
        link.submit(now, OUT, 1)
    assert link.next_end_s() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bytes_per_s": 0.0}, "bytes_per_s=0.0"),
        ({"bytes_per_s": 1.0, "contention_loss": 1.0}, "contention_loss=1.0"),
        ({"bytes_per_s": 1.0, "copy_overhead_s": -1.0}, "copy_overhead_s=-1.0"),
    ],
)
def test_a_link_out_of_range_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransferLink(**arguments)


@pytest.mark.parametrize(("num_bytes", "num_copies"), [(-1, 1), (math.nan, 1), (1, 0)])
def test_a_transfer_out_of_range_is_refused(num_bytes: float, num_copies: int) -> None:
    link = TransferLink(1e9)
    with pytest.raises(ValueError, match=r"num_bytes=|num_copies="):
        link.submit(0.0, OUT, num_bytes, num_copies)
    assert link.next_end_s() is None


TRANSFERS = st.lists(
    st.tuples(st.floats(0, 5), st.sampled_from([OUT, IN]), st.integers(0, 4000), st.integers(1, 3)), max_size=12
)


@given(TRANSFERS, st.sampled_from([0.0, 0.19, 0.5]), st.sampled_from([0.0, 0.01]))
def test_work_is_conserved_and_each_direction_keeps_its_order(
    transfers: list[tuple[float, Direction, int, int]], loss: float, overhead: float
) -> None:
    link = TransferLink(1000.0, loss, overhead)
    start = 0.0
    for gap, direction, size, copies in transfers:
        start += gap
        link.submit(start, direction, size, copies)
    ends = {number: end for end, number in drain(link)}
    assert sorted(ends) == list(range(len(transfers)))
    for direction in Direction:
        mine = [(number, *rest) for number, (_, way, *rest) in enumerate(transfers) if way is direction]
        order = [ends[number] for number, *_ in mine]
        assert order == sorted(order)
        moved, setup = sum(size for _, size, _ in mine), overhead * sum(copies for *_, copies in mine)
        # Busy exactly as long as the work takes, somewhere between alone and shared throughout.
        assert moved / 1000 + setup - 1e-9 <= link.busy_s(direction) <= moved / 1000 / (1 - loss) + setup + 1e-9


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6), st.lists(st.integers(1, 5000), min_size=1, max_size=6))
def test_two_full_queues_share_until_the_shorter_is_empty(outs: list[int], ins: list[int]) -> None:
    """In closed form: the smaller sum S at 0.81 of the rate, what is left of the larger L at the whole."""
    link = TransferLink(1000.0)
    for size in outs:
        link.submit(0.0, OUT, size)
    for size in ins:
        link.submit(0.0, IN, size)
    small, large = sorted((sum(outs), sum(ins)))
    assert drain(link)[-1][0] == pytest.approx((small / 0.81 + large - small) / 1000)
