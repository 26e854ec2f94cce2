"""Room: seats, tokens and blocks by hand, gates, who leaves, and why somebody does not join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.contract import Candidate, Demand, RequestView, Room, Victim


def candidate(name: str) -> Candidate:
    return Candidate(name, (0.0,), lambda: RequestView(name, 0.0, 10))


def victim(name: str, blocks: int) -> Victim:
    return Victim(RequestView(name, 0.0, 10), (1.0,), blocks)


A, B, C = map(candidate, "abc")


@dataclass
class OnlyWith:
    """A gate that lets those join who are named, and whoever somebody leaves for."""

    name: str
    names: str = ""
    closed: bool = False
    taken: list[tuple[str, int]] = field(default_factory=list)

    def fits(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> bool:
        return bool(leaving) or candidate.request.req_id in self.names

    def take(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> None:
        self.taken.append((candidate.request.req_id, len(leaving)))


def room(needs: dict[str, Demand] | None = None, **fields: Any) -> Room:
    """Two seats, 100 tokens, 10 blocks; who is not named needs 10 tokens and a block."""

    def price(candidate: Candidate, free_tokens: int) -> Demand:
        return (needs or {}).get(candidate.request.req_id, Demand(10, 1, 10))

    defaults = {"seats": 2, "tokens": 100, "blocks": 10, "idle": False, "price": price, "taken": lambda *_: None}
    return Room(**{**defaults, **fields})


def test_seats_are_counted() -> None:
    left = room()
    for each in (A, B):
        assert left.fits(each)
        left.take(each)
    assert (left.admit, left.seats, left.open) == (["a", "b"], 0, False)
    assert not left.fits(C)
    assert left.why == {"c": "seats"}


def test_a_prompt_is_cut_to_the_tokens_that_are_left_and_one_is_enough() -> None:
    granted: list[tuple[str, int]] = []
    left = room(
        {"a": Demand(99, 1, 99), "b": Demand(50, 1, 50)},
        seats=9,
        taken=lambda candidate, tokens: granted.append((candidate.request.req_id, tokens)),
    )
    left.take(A)
    assert left.fits(B)
    left.take(B)
    assert (granted, left.tokens, left.open) == ([("a", 99), ("b", 1)], 0, False)
    assert not left.fits(C)
    assert left.why == {"c": "tokens"}


def test_who_loads_takes_blocks_but_neither_seat_nor_tokens() -> None:
    left = room({"a": Demand(0, 4, 64, loads=True)})
    left.take(A)
    assert (left.seats, left.tokens, left.blocks) == (2, 100, 6)
    assert not room(tokens=0).fits(A), "vLLM looks at nobody in a step without tokens"
    assert not room(seats=0).fits(A), "nor in one without seats"


def test_blocks_are_counted() -> None:
    left = room({"a": Demand(10, 7, 10), "b": Demand(10, 4, 10), "c": Demand(10, 3, 10)})
    left.take(A)
    assert [left.fits(B), left.fits(C)] == [False, True], "3 are left"
    assert left.why == {"b": "blocks"}
    left.take(C)
    assert (left.blocks, left.seats, left.open) == (0, 0, False)


def test_the_first_reason_is_the_one_that_is_noted() -> None:
    needs = {"a": Demand(10, 11, 10)}
    gates = (OnlyWith("g"),)
    assert [_why(room(needs, gates=gates, **fields)) for fields in ({"seats": 0, "tokens": 0}, {"tokens": -5}, {})] == [
        "seats",
        "tokens",
        "blocks",
    ]
    assert _why(room(needs, gates=gates, blocks=11)) == "g"


def _why(left: Room) -> str:
    assert not left.fits(A)
    return left.why["a"]


def test_when_idle_the_first_joins_whatever_it_needs_and_only_the_first() -> None:
    gate = OnlyWith("g")
    left = room({"a": Demand(900, 99, 900)}, seats=2, blocks=0, idle=True, gates=(gate,))
    assert (left.open, left.fits(A)) == (True, True)
    left.take(A)
    assert (left.admit, gate.taken, left.tokens, left.blocks) == (["a"], [("a", 0)], 0, -99)
    assert (left.open, left.fits(B)) == (False, False)


def test_all_gates_must_let_a_request_pass_and_all_are_told() -> None:
    first, second = OnlyWith("first", "ab"), OnlyWith("second", "bc")
    left = room(gates=(first, second))
    assert [left.fits(each) for each in (A, B, C)] == [False, True, False]
    assert left.why == {"a": "second", "c": "first"}
    left.take(B)
    assert left.fits(C, (victim("r", 1),)), "they are asked with those who leave"
    left.take(C, (victim("r", 1),))
    assert first.taken == second.taken == [("b", 0), ("c", 1)]


def test_who_leaves_gives_a_seat_and_blocks_but_no_tokens() -> None:
    left = room({"a": Demand(10, 9, 10)}, seats=0, blocks=2)
    assert [left.fits(A, leaving) for leaving in ((), (victim("r", 6),), (victim("r", 6), victim("s", 1)))] == [
        False,
        False,
        True,
    ]
    left.take(A, (victim("r", 6), victim("s", 1)))
    assert (left.admit, left.preempt) == (["a"], ["r", "s"])
    assert (left.seats, left.blocks, left.tokens) == (1, 0, 90)
    assert not room(tokens=0).fits(A, (victim("r", 9),))


def test_why_is_forgotten_when_a_request_is_taken_after_all() -> None:
    left = room(seats=0)
    assert [left.fits(A), left.fits(B)] == [False, False]
    assert left.why == {"a": "seats", "b": "seats"}
    left.take(A, (victim("r", 1),))
    assert left.why == {"b": "seats"}


def test_a_price_holds_until_somebody_joins() -> None:
    """B shares 5 of its 8 blocks with A, once A has joined."""
    asked: list[tuple[str, int]] = []

    def price(each: Candidate, free_tokens: int) -> Demand:
        asked.append((each.request.req_id, free_tokens))
        blocks = 8 - 5 * bool(left.admit)
        return Demand(16 * blocks, blocks, 16 * blocks)

    left = room(price=price, blocks=12, tokens=300)
    assert left.fits(A)
    assert left.demand(A) == Demand(128, 8, 128)
    assert asked == [("a", 300)]
    left.take(A)
    assert left.fits(B), "4 are left"
    assert left.demand(B) == Demand(48, 3, 48)
    assert asked == [("a", 300), ("b", 172)]


@pytest.mark.parametrize(
    ("fields", "is_open"),
    [
        ({}, True),
        ({"seats": 0}, False),
        ({"tokens": 0}, False),
        ({"tokens": -3}, False),
        ({"blocks": 0}, False),
        ({"gates": (OnlyWith("g"), OnlyWith("h"))}, True),
        ({"gates": (OnlyWith("g"), OnlyWith("h", closed=True))}, False),
        ({"idle": True, "blocks": 0, "gates": (OnlyWith("g", closed=True),)}, True),
    ],
)
def test_a_room_is_open_while_anybody_could_join_without_somebody_leaving(
    fields: dict[str, Any], is_open: bool
) -> None:
    assert room(**fields).open is is_open


_NEEDS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=9)


@given(
    needs=_NEEDS,
    freed=st.lists(st.integers(0, 4), max_size=9),
    left=st.tuples(st.integers(0, 4), st.integers(0, 99), st.integers(0, 20)),
)
def test_nothing_is_given_out_twice(needs: list[tuple[int, int]], freed: list[int], left: tuple[int, int, int]) -> None:
    names = "abcdefghi"[: len(needs)]
    demands = {name: Demand(tokens, blocks, tokens) for name, (tokens, blocks) in zip(names, needs, strict=True)}
    seats, tokens, blocks = left
    got = room(demands, seats=seats, tokens=tokens, blocks=blocks)
    victims = iter([victim(f"r{i}", blocks) for i, blocks in enumerate(freed)])
    for each in map(candidate, names):
        leaving: tuple[Victim, ...] = ()
        while not got.fits(each, leaving) and (more := next(victims, None)):
            leaving += (more,)
        if got.fits(each, leaving):
            got.take(each, leaving)
    assert min(got.seats, got.tokens, got.blocks) >= 0
    assert got.seats == seats + len(got.preempt) - len(got.admit)
    assert got.blocks == blocks + sum(freed[int(name[1:])] for name in got.preempt) - sum(
        demands[name].blocks for name in got.admit
    )
    assert {*got.admit, *got.why} == set(names)
    assert not {*got.admit} & {*got.why}
