"""The book of finished requests: numbering without gaps, bounded, and losses told to the reader."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ext.scheduling.finished import Counters, RecordBook, RequestRecord


def record(seq: int) -> RequestRecord:
    return RequestRecord(
        seq=seq,
        req_id=f"r{seq}",
        arrival_unix_s=1.0,
        prompt_tokens=2,
        output_tokens=3,
        max_tokens=4,
        predicted_tokens=5,
        prediction_source="prior",
        num_preemptions=0,
        demotions=0,
        queue_s=None,
        ttft_s=None,
        e2e_s=0.5,
        finish_reason="stop",
        priority=0,
        conversation_id=None,
    )


def book(count: int, capacity: int = 4) -> RecordBook:
    book = RecordBook(capacity)
    for _ in range(count):
        book.add(record(book.next_seq))
    return book


def numbers(found: tuple[list[dict[str, Any]], int]) -> tuple[list[int], int]:
    return [r["seq"] for r in found[0]], found[1]


@pytest.mark.parametrize(
    ("count", "since", "expected"),
    [
        (0, 0, ([], 0)),
        (0, 5, ([], 0)),
        (3, 0, ([0, 1, 2], 0)),
        (3, 2, ([2], 0)),
        (3, 3, ([], 0)),
        (3, 99, ([], 0)),
        (4, 0, ([0, 1, 2, 3], 0)),
        (5, 0, ([1, 2, 3, 4], 1)),
        (9, 0, ([5, 6, 7, 8], 5)),
        (9, 4, ([5, 6, 7, 8], 1)),
        (9, 5, ([5, 6, 7, 8], 0)),
        (9, 8, ([8], 0)),
        (9, -3, ([5, 6, 7, 8], 5)),
    ],
)
def test_records_from_a_number_on_and_how_many_are_gone(
    count: int, since: int, expected: tuple[list[int], int]
) -> None:
    assert numbers(book(count).since(since)) == expected


def test_a_reader_that_keeps_up_sees_every_record_once() -> None:
    b, seen, place = book(0), [], 0
    for number in range(50):
        b.add(record(b.next_seq))
        if number % 4 == 3:
            found, lost = b.since(place)
            assert lost == 0
            seen += [r["seq"] for r in found]
            place = b.next_seq
    assert seen == list(range(48))


def test_a_record_is_handed_out_as_plain_values() -> None:
    (plain,), _ = book(1).since(0)
    assert plain == {name: getattr(record(0), name) for name in RequestRecord.__dataclass_fields__}


def test_counters_of_two_schedulers_are_apart() -> None:
    one, two = Counters(), Counters()
    one.preemptions["policy"] += 1
    assert two.preemptions == {"policy": 0, "memory": 0}
