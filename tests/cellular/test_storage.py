"""Rows of storage: none is given twice, and what has come and gone leaves no trace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.cellular.test_engine import held, nothing_is_left
from tests.support.extent import HANG_S, quick
from vllm_ext.cellular.arena import Arena, ArenaFull
from vllm_ext.cellular.cells import Kind
from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.graphs import Ints
from vllm_ext.cellular.layout import Region
from vllm_ext.cellular.models import build
from vllm_ext.cellular.options import EngineOptions
from vllm_ext.cellular.requests import EngineError, Request
from vllm_ext.cellular.tables import Ranges

KINDS = (Kind("int64", ()), Kind("float32", (4,)), Kind("float32", (16,)))
MAX_BYTES = 400_000
regions = st.lists(st.integers(0, 9000), min_size=3, max_size=3).map(
    lambda rows: [Region(kind, count) for kind, count in enumerate(rows) if count]
)


@given(st.lists(st.one_of(st.integers(1, 50), st.none()), max_size=80), st.randoms())
def test_ranges_do_not_overlap_and_become_one_when_all_are_given_back(counts: list[int | None], random: object) -> None:
    ranges, known = Ranges(3), []
    for count in counts:
        if count is None and known:
            ranges.give(*known.pop(random.randrange(len(known))))  # type: ignore[attr-defined]
        elif count is not None:
            end = ranges.end_with(count)
            known.append((ranges.take(count), count))
            assert ranges.end == end
        used = [number for first, size in known for number in range(first, first + size)]
        assert len({*used}) == len(used) == ranges.taken
        assert ranges.end == max(used, default=2) + 1, "what lies free at the end is not counted"
    for one in known:
        ranges.give(*one)
    assert (ranges.taken, ranges.end) == (0, 3)
    assert ranges.take(1000) == 3


class Storing(RuleBasedStateMachine):
    """Graphs come and go; each finds the values that it stored."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(KINDS, max_bytes=MAX_BYTES)
        self.kept: list[tuple[list[Region], Ints, int]] = []
        self.number = 0

    def values(self, region: Region, base: int) -> torch.Tensor:
        return self.arena.gather(region.kind, torch.arange(base, base + region.rows).numpy())

    @rule(wanted=regions)
    def take(self, wanted: list[Region]) -> None:
        try:
            bases = self.arena.take(wanted)
        except ArenaFull:
            assert self.kept or not self.arena.fits(wanted), "an empty arena has no room for what fits alone"
            return
        assert self.arena.fits(wanted)
        self.number += 1
        for kind, rows in wanted:
            like = self.values(Region(kind, rows), int(bases[kind]))
            place = torch.arange(bases[kind], bases[kind] + rows).numpy()
            self.arena.scatter(kind, place, torch.full_like(like, self.number))
        self.kept.append((wanted, bases, self.number))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        wanted, bases, number = self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1)))
        for region in wanted:
            assert (self.values(region, int(bases[region.kind])) == number).all()
        self.arena.give(wanted, bases)

    @invariant()
    def no_more_is_used_than_allowed(self) -> None:
        assert self.arena.bytes <= MAX_BYTES
        assert 0 <= self.arena.share_taken <= 1
        assert (self.arena.share_taken == 0) is not any(wanted for wanted, *_ in self.kept)


TestStoring = Storing.TestCase
TestStoring.settings = settings(max_examples=quick(20, full=100), stateful_step_count=30)


def test_the_share_taken_is_one_when_a_kind_has_no_room_left_though_others_took_most() -> None:
    arena = Arena(KINDS[:2], max_bytes=100_000)
    arena.take([Region(0, 8_000)])
    most = (100_000 - 8_002 * 8) // 16 - 2
    assert arena.share_taken == pytest.approx(8_000 / ((100_000 - 1024 * 16) // 8 - 2))
    arena.take([Region(1, most)])
    assert arena.share_taken == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(ArenaFull):
        arena.take([Region(1, 1)])


def full_tree(leaves: int) -> object:
    return 1 if leaves == 1 else [full_tree(leaves // 2), full_tree(leaves - leaves // 2)]


def test_trees_of_all_sizes_are_served_one_after_another_whatever_came_before() -> None:
    """Ranges that were never merged left room for trees of 256 leaves only."""
    with CellularEngine(build("treelstm"), EngineOptions(state_bytes=1 << 20)) as engine:
        handles = [engine.submit({"tree": full_tree(256)}) for _ in range(12)]
        assert all("label" in handle.result(HANG_S) for handle in handles)
        for leaves in (100, 2, 3, 40, 300, 256, 17):
            assert "label" in engine.submit({"tree": full_tree(leaves)}).result(HANG_S)
        nothing_is_left(engine)


def translation(half: int) -> dict[str, object]:
    """A request that takes twice so many rows of tokens, and one more."""
    return {"tokens": [1] * half, "max_steps": half}


def test_a_request_that_never_fits_fails_at_once_and_one_that_waits_lets_a_bounded_number_pass() -> None:
    """There is room for 1,500 tokens beside the smallest that is kept of other values."""
    with held(build("seq2seq"), state_bytes=1024 * (64 * 4 + 1) + 1500 * 8) as (engine, compute):
        running = [engine.submit(translation(500))]
        assert compute.reached.wait(HANG_S)
        waiting, never = engine.submit(translation(700)), engine.submit(translation(1000))
        short: list[Request] = [engine.submit(translation(1)) for _ in range(200)]
        with engine._lock:
            engine._enter()
            began = [one.number is not None for one in short]
        with pytest.raises(EngineError, match="needs more room than there is"):
            never.result(0)
        assert waiting.number is None
        assert began == [True] * 64 + [False] * 136
        compute.go.set()
        assert all(handle.result(HANG_S)["tokens"] for handle in [*running, waiting, *short])
        assert waiting.started_s <= min(one.started_s for one in short[64:])  # type: ignore[type-var]
        nothing_is_left(engine)


def test_a_kind_of_large_rows_begins_with_few_and_grows() -> None:
    large = Kind("float32", (1 << 20,))
    arena = Arena([large], max_bytes=64 << 20)
    assert arena.bytes == 16 << 20
    assert arena.fits([Region(0, 14)])
    assert not arena.fits([Region(0, 15)])
    arena.take([Region(0, 14)])
    assert arena.bytes <= 64 << 20
    with pytest.raises(ArenaFull):
        arena.take([Region(0, 1)])
