"""Next turns that name no conversation and leave out what the model thought."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from vllm.v1.kv_offload.base import OffloadKey

from vllm_ext.kv.conversations import endings
from vllm_ext.kv.conversations.conversation import Conversation, ConversationBook
from vllm_ext.kv.conversations.endings import Endings, ending

CHUNK = 16
STOP = 2
LAST = OffloadKey(b"last chunk of a turn")


def keys(tokens: Sequence[int]) -> list[OffloadKey]:
    """Of whole chunks, each by all tokens up to its end, as block hashes are."""
    ends = range(CHUNK, len(tokens) + 1, CHUNK)
    return [OffloadKey(repr(list(tokens[:end])).encode()) for end in ends]


class Talk:
    """A client without names, whose template leaves out what was thought."""

    def __init__(self, book: ConversationBook, system: Sequence[int] = (), *, seed: int, salt: str = "") -> None:
        self.book, self.salt, self.dice = book, salt, random.Random(seed)
        self.history, self.at = list(system), 0.0

    def words(self, count: int) -> list[int]:
        return [self.dice.randrange(10, 50_000) for _ in range(count)]

    def turn(self, *, thought: int = 40, answer: Sequence[int] | None = None) -> Conversation:
        prompt = self.history + self.words(20)
        said = list(answer if answer is not None else self.words(30))
        output = [*self.words(thought), *said, STOP]
        self.at += 10.0
        found = self.book.enter(None, self.salt, keys(prompt), self.at, tokens=prompt)
        left = ending(keys(prompt), len(prompt), output)
        self.book.leave(found, keys(prompt + output), self.at + 1.0, left)
        self.history = [*prompt, *said, 7, 8]  # the template ends turns in its own way
        return found


@pytest.mark.parametrize("strangers", [1, 6])
def test_next_turns_are_known_without_what_was_thought(strangers: int) -> None:
    """Also of strangers who share a system prompt."""
    book, system = ConversationBook(), list(range(100, 100 + 4 * CHUNK)) if strangers > 1 else []
    talks = [Talk(book, system, seed=seed) for seed in range(strangers)]
    turns = [[talk.turn() for talk in talks] for _ in range(4)]
    assert len({id(found) for found in turns[0]}) == strangers
    assert all(found == turns[0] for found in turns)


def test_another_salt_is_another_conversation() -> None:
    book = ConversationBook()
    first, second = Talk(book, seed=0, salt="a"), Talk(book, seed=0, salt="b")
    found = first.turn()
    second.turn()
    second.history = first.history
    assert second.turn() is not found
    assert first.turn() is found


def test_a_short_answer_is_said_by_others_too() -> None:
    prompt = list(range(2 * CHUNK))
    assert ending(keys(prompt), len(prompt), [*range(7), STOP]) is None
    assert ending(keys(prompt), len(prompt), [*range(8), STOP]) is not None
    left = ending(keys(prompt), len(prompt), range(9))
    assert left is not None
    assert left.at == keys(prompt)[-2], "the last chunk may end within what the template adds for the answer"
    assert ending([], 5, [*range(8), STOP]) is None, "nothing to find it by"


def test_of_several_the_longest_and_latest_is_gone_on_with() -> None:
    """Three ask the same and get the same answer; one goes on, and then all."""
    book = ConversationBook()
    talks = [Talk(book, seed=1) for _ in range(3)]
    found = [talk.turn() for talk in talks]
    assert talks[0].turn() is found[2]
    assert talks[0].turn() is found[2]
    assert talks[1].turn() is not found[2]


def test_tokens_are_found_as_a_whole_and_ids_that_are_no_characters_not_at_all() -> None:
    """16 tokens whose bytes are there, one byte further on: searched as such, a long prompt took seconds."""
    left, book, conversation = ending([LAST], 1, [256] * 17 + [STOP]), Endings(), Conversation(1, None, "")
    assert left is not None
    book.add(conversation, OffloadKey(b"other"), left)
    assert isinstance(left.tokens, str), "a character is found as a whole"
    assert book.find("", [LAST], [65536] * 100) is None
    assert book.find("", [LAST], [0xD800, *[256] * 16]) is conversation
    assert book.find("", [LAST], [2_000_000, *[256] * 16]) is None
    assert ending([LAST], 1, [2_000_000] * 20) is None


def test_what_is_remembered_is_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "_MOST_ALIKE", 4)
    book = Endings()
    prompt = keys(list(range(3 * CHUNK)))
    made = [Conversation(number, None, "") for number in range(10)]
    for number, conversation in enumerate(made):
        left = ending(prompt, 3 * CHUNK, [*range(100 * number, 100 * number + 30), STOP])
        assert left is not None
        book.add(conversation, LAST, left)
    assert [len(alike) for alike in book._at.values()] == [4]
    tokens = [*range(3 * CHUNK), *range(914, 930)]
    assert book.find("", prompt, tokens) is made[9]
    assert book.find("", prompt, [*range(3 * CHUNK), *range(14, 30)]) is None, "forgotten"
    for conversation in made:
        book.forget(conversation)
    assert [book._of, book._at, book._by_last] == [{}, {}, {}]
    assert book.find("", prompt, tokens) is None
