"""Which request belongs to which conversation, and how many conversations return."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key

from vllm_ext.kv.conversations.conversation import Conversation, ConversationBook
from vllm_ext.kv.conversations.returns import NUM_TURN_CLASSES, ReturnModel, turn_class


def keys(*names: str) -> list[OffloadKey]:
    return [make_offload_key(name.encode(), 0) for name in names]


def turn(
    book: ConversationBook, name: str | None, prompt: Sequence[str], answer: Sequence[str], at: float, salt: str = ""
) -> Conversation:
    conversation = book.enter(name, book.salt_tag(salt), keys(*prompt), at)
    book.leave(conversation, keys(*prompt, *answer), at + 1.0)
    return conversation


def test_5_a_name_is_a_conversation_of_its_salt_whatever_is_said_in_it() -> None:
    book = ConversationBook()
    first = turn(book, "a", ["x"], ["y"], 0.0)
    assert turn(book, "a", ["other"], [], 5.0) is first
    assert (first.turns, first.running, first.last_used_s) == (2, 0, 6.0)
    theirs = turn(book, "a", ["x"], [], 0.0, salt="them")
    assert book.find("a") == {"": first, book.salt_tag("them"): theirs}
    assert len({first, theirs, turn(book, "b", ["x"], ["y"], 7.0), turn(book, None, ["x", "y", "z"], [], 8.0)}) == 4


def test_of_a_salt_only_a_tag_is_kept() -> None:
    book, other = ConversationBook(), ConversationBook()
    salt = "secret" * 100_000
    tag = turn(book, "a", ["x"], [], 0.0, salt=salt).salt_tag
    assert len(tag) == 32
    assert tag == book.salt_tag(salt) != other.salt_tag(salt)
    assert book.salt_tag("") == book.salt_tag(None) == ""
    assert len(book.salt_tag("half a pair: \ud800")) == 32


def test_a_name_that_is_forgotten_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_ext.kv.conversations.conversation._MOST_KNOWN", 3)
    book = ConversationBook()
    for number in range(10):
        turn(book, f"c{number}", [f"{number}"], [], float(number))
    assert [conversation.name for conversation in book.after(0)] == ["c7", "c8", "c9"]
    assert set(book._named) == {"c7", "c8", "c9"}
    assert not book._endings._by_last, "of the anonymous ones only"
    assert book.get(1) is None


def test_without_a_name_a_prompt_that_begins_with_the_last_turn_continues_it() -> None:
    book = ConversationBook()
    first = turn(book, None, ["system", "hello"], ["hi"], 0.0)
    other = turn(book, None, ["system", "bonjour"], ["salut"], 1.0)
    assert other is not first, "they share a system prompt, and no more"
    assert turn(book, None, ["system", "hello", "hi", "more"], ["yes"], 2.0) is first
    assert turn(book, None, ["system", "hello", "hi"], [], 3.0) is not first, "the last turn is longer by now"
    assert turn(book, None, ["system", "hello", "hi", "more", "yes"], [], 4.0, salt="them") is not first


def test_a_conversation_expires_once_and_not_while_it_runs() -> None:
    book = ConversationBook(ttl_s=10.0)
    first = turn(book, "a", ["x"], [], 0.0)  # used last at 1
    assert list(book.expired(10.9, 9)) == []
    running = book.enter("a", "", keys("x"), 10.95)
    assert list(book.expired(50.0, 9)) == []
    book.leave(running, keys("x"), 60.0)
    assert list(book.expired(69.9, 9)) == []
    assert list(book.expired(70.0, 9)) == [first]
    assert list(book.expired(99.0, 9)) == []


def test_a_client_may_want_its_conversation_dropped_earlier() -> None:
    book = ConversationBook(ttl_s=100.0)
    assert turn(book, "a", ["x"], [], 0.0).ttl_s == 100.0
    conversation = book.enter("a", "", [], 0.0, ttl_s=5.0)
    assert book.enter("a", "", [], 0.0).ttl_s == 5.0, "what was said once holds"
    assert book.enter("a", "", [], 0.0, ttl_s=50.0).ttl_s == 5.0
    for _ in range(3):
        book.leave(conversation, keys("x"), 1.0)
    assert list(book.expired(5.9, 9)) == []
    assert list(book.expired(6.0, 9)) == [conversation]
    assert list(book.expired(1000.0, 9)) == [], "and not again when its first time is over"


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_ext.kv.conversations.conversation._MOST_KNOWN", 10)
    book = ConversationBook()
    holding = turn(book, "holding", ["h"], [], 0.0)
    holding.own(*keys("h"))
    running = book.enter("running", "", [], 0.0)
    for number in range(100):
        turn(book, None, [f"{number}"], [], float(number))
    assert len(book) <= 11
    assert {holding, running} <= set(book.after(0))
    assert len(book._endings._by_last) <= 11


def test_a_forgotten_conversation_whose_chunks_are_stored_after_all_is_known_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks that lay on the device may be copied when 65,536 others have come."""
    monkeypatch.setattr("vllm_ext.kv.conversations.conversation._MOST_KNOWN", 3)
    book = ConversationBook(ttl_s=10.0)
    late, taken = turn(book, "late", ["x"], [], 0.0), turn(book, "taken", ["y"], [], 0.0)
    for number in range(10):
        turn(book, f"c{number}", [f"{number}"], [], 1.0)
    new = turn(book, "taken", ["y"], [], 1.0)
    assert not {late, taken} & set(book.after(0))
    late.own(*keys("x"))
    taken.own(*keys("y"))
    assert [c.name for c in book.after(new.number)] == ["late", None]
    assert book.find("late") == {"": late}
    assert book.find("taken") == {"": new}, "its name is another one's by now"
    assert (book.counts.running, book.counts.kept) == (0, 2)
    assert {late, taken} <= set(book.expired(11.0, 100))


def test_who_is_forgotten_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a long time to live every request left an entry, and its conversation, until that was over."""
    monkeypatch.setattr("vllm_ext.kv.conversations.conversation._MOST_KNOWN", 10)
    book = ConversationBook(ttl_s=1e6)
    kept = turn(book, "kept", ["k"], [], 0.0)
    kept.own(*keys("k"))
    for number in range(1000):
        turn(book, None, [f"{number}"], [], 1.0 + number)
        turn(book, "kept", ["k"], [], 1.0 + number)
    for number in range(500):
        book.leave(book.enter("kept", "", [], 2e3, ttl_s=1e5 - number), [], 2e3)
    assert len(book._expiry) <= 2 * len(book) + 64
    assert list(book.expired(2e3 + 1e5, 1000)) == [kept]


@pytest.mark.parametrize(
    ("turns", "number"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (7, 2), (8, 3), (16, 4), (31, 4), (32, 5), (1000, 5)]
)
def test_turns_fall_into_classes(turns: int, number: int) -> None:
    assert turn_class(turns) == number < NUM_TURN_CLASSES


def test_the_share_that_comes_back_is_learned_by_turns_and_follows_a_change() -> None:
    model = ReturnModel()
    rate = model.by("turns")
    assert [rate(0, age) for age in (1.0, 2.0, 64.0, math.inf)] == pytest.approx([1.0, 0.5, 1 / 64, 0.0]), "the paper's"
    assert rate(0, 0.0) >= rate(0, 1.0)
    assert [model.share(turns) for turns in (1, 2, 40)] == [1.0] * 3, "anybody may, until something was seen"
    for every, count, share in ((4, 4000, 0.25), (1, 20_000, 0.99), (10**6, 50_000, 0.0)):
        for number in range(count):
            model.ended(1)
            if number % every == 0:
                model.returned(1)
        assert model.share(1) == pytest.approx(share, abs=0.02)
        assert rate(0, 2.0) == model.share(1) / 2
    assert model.share(2) == 1.0


@pytest.mark.parametrize("samples", [1, 4])
def test_requests_of_one_turn_that_run_side_by_side_are_one_turn(samples: int) -> None:
    """Samples of one prompt (``n``), retries and fanned-out agents each counted as a turn after which nobody came.

    Of conversations that always came back the model learned that one in fourteen does.
    """
    book = ConversationBook()
    for turn_number in range(200):
        at = 10.0 * turn_number
        running = [book.enter("a", "", [], at + number) for number in range(samples)]
        for conversation in running:
            book.leave(conversation, [], at + 5.0)
    assert running[0].turns == 200
    assert book.returns.share(40) == pytest.approx(1.0, abs=0.01)
    assert sum(book.returns._ended) - sum(book.returns._returned) == pytest.approx(1.0, abs=0.05), "the last one"


def test_a_conversation_that_returns_is_counted_once_for_each_turn() -> None:
    book = ConversationBook()
    first = book.enter("a", "", [], 0.0)
    book.enter("a", "", [], 0.0)  # while the first still runs, and before any ended
    assert sum(book.returns._returned) == 0
    book.leave(first, [], 1.0)
    assert sum(book.returns._ended) == 0, "the other one runs"
    book.leave(first, [], 1.0)
    book.enter("a", "", [], 2.0)
    assert sum(book.returns._returned) == pytest.approx(1.0)
