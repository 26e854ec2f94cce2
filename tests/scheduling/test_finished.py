"""The book of finished requests: numbering without gaps, bounded, and losses told to the reader."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from vllm_ext.config import HASH_BLOCK_TOKENS
from vllm_ext.scheduling.finished import Counters, LogDetails, RecordBook, RequestRecord, hash_ids
from vllm_ext.simulation.engine.harness import block_hasher, make_request


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


def test_what_was_fetched_is_let_go() -> None:
    kept = book(4)
    assert numbers(kept.since(2)) == ([2, 3], 0)
    assert len(kept._records) == 2
    assert numbers(kept.since(0)) == ([2, 3], 2)
    assert numbers(kept.since(4)) == ([], 0)
    assert len(kept._records) == 0


def details(**changes: Any) -> LogDetails:
    return LogDetails(**{"sample": 1.0, "prompts": False, "block_tokens": 16, **changes})


def request(prompt: list[int], req_id: str = "r", **extra: Any) -> Any:
    return make_request(req_id, prompt, max_tokens=4, hasher=block_hasher(16), **extra)


def test_a_sample_has_its_share_of_requests_and_whole_conversations() -> None:
    half = details(sample=0.5)
    one = request([1, 2])
    alone = [bool(half.of(request([1], f"r{n}"), None)) for n in range(1000)]
    assert 400 < sum(alone) < 600
    talks = [{bool(half.of(request([1], f"r{n}-{turn}"), f"talk-{n}")) for turn in range(5)} for n in range(200)]
    assert all(len(each) == 1 for each in talks)
    assert {True} in talks
    assert {False} in talks
    assert all(details(sample=0.8).of(one, f"talk-{n}") for n in range(200) if {True} == talks[n])


def test_prompts_are_in_the_details_only_if_asked_for() -> None:
    one = request([5, 6, 7], cache_salt="s")
    assert details().of(one, None)["prompt_token_ids"] is None
    assert details(prompts=True).of(one, None)["prompt_token_ids"] == [5, 6, 7]
    assert details().of(one, None)["cache_salt"] == "s"


@pytest.mark.parametrize("length", [16, 17, 511, 512, 513, 527, 528, 1024, 1500])
def test_hash_ids_are_equal_as_long_as_prompts_are(length: int) -> None:
    prompt = [7 * n % 900 for n in range(length)]
    ids = hash_ids(request(prompt), 16)
    assert ids is not None
    assert len(ids) == -(-length // HASH_BLOCK_TOKENS)
    assert ids == hash_ids(request(prompt), 16)
    for changed in {0, length // 2, length - 1}:
        other = hash_ids(request([*prompt[:changed], 901, *prompt[changed + 1 :]]), 16)
        assert other is not None
        equal = changed // HASH_BLOCK_TOKENS
        assert [one == two for one, two in zip(ids, other, strict=True)] == [n < equal for n in range(len(ids))]
    longer = hash_ids(request([*prompt, 902]), 16)
    assert longer is not None
    whole = length // HASH_BLOCK_TOKENS
    assert (longer[:whole], longer[whole] in ids) == (ids[:whole], False)


def test_a_short_prompt_has_the_same_hash_id_in_every_engine() -> None:
    """Engines are processes; Python's own hash of a text is another one in each."""
    script = (
        "from types import SimpleNamespace as S\n"
        "from vllm_ext.scheduling.finished import hash_ids\n"
        "print(hash_ids(S(prompt_token_ids=[5] * 20, block_hashes=[b'x' * 32], cache_salt='s'), 16))"
    )
    said = [
        subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
                       capture_output=True, text=True).stdout
        for seed in "12"
    ]  # fmt: skip
    assert said[0] == said[1] != ""


def test_tenants_share_no_hash_ids() -> None:
    one, other = (hash_ids(request(list(range(600)), cache_salt=salt), 16) for salt in ("a", "b"))
    assert one is not None
    assert other is not None
    assert set(one).isdisjoint(other)


def test_without_prefix_hashes_or_with_blocks_that_do_not_divide_there_are_no_hash_ids() -> None:
    assert hash_ids(make_request("r", [1] * 600, max_tokens=4), 16) is None
    assert hash_ids(request([1] * 600), 48) is None


def test_counters_of_two_schedulers_are_apart() -> None:
    one, two = Counters(), Counters()
    one.preemptions["policy"] += 1
    assert two.preemptions == {"policy": 0, "memory": 0}
