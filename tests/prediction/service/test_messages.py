"""Frames: what was packed is read again however the stream is cut, and whatever else comes is a `FrameError`."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.prediction.service.messages import (
    MAX_FRAME_BYTES,
    Ask,
    Failed,
    Finished,
    FrameError,
    Frames,
    Gone,
    Question,
    Status,
    Told,
    pack,
    read_answer,
    read_question,
)

QUESTIONS = (Ask("a-0", "What is a fjord? 峡湾\n\0", 128, "llama", 5), Ask("", "", 1), Finished("a-0", 77), Gone("a-0"))
ANSWERS = (Told("a", 7, 9, "retrieval"), Told("a", source="expired"), Status(entries=3, tau=-0.25), Failed("no faiss"))

texts = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.integers(-(2**63), 2**64 - 1)
questions = st.one_of(
    st.builds(Ask, texts, texts, numbers, texts, numbers), st.builds(Finished, texts, numbers), st.builds(Gone, texts)
)


def body_of(frame: bytes) -> bytes:
    (body,) = Frames().feed(frame)
    return body


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_read_as_it_was_packed(question: Question) -> None:
    assert read_question(body_of(pack(question))) == question


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_read_as_it_was_packed(answer: Told | Status | Failed) -> None:
    assert read_answer(body_of(pack(answer))) == answer


@given(st.lists(questions, max_size=5), st.lists(st.integers(0, 40), max_size=12))
def test_frames_are_found_however_the_stream_is_cut(sent: list[Question], cuts: list[int]) -> None:
    stream = b"".join(map(pack, sent))
    frames, found = Frames(), list[bytes]()
    for cut in cuts:
        found += frames.feed(stream[:cut])
        stream = stream[cut:]
    found += frames.feed(stream)
    assert [read_question(body) for body in found] == sent
    assert frames.feed(b"") == []


def test_a_frame_that_comes_byte_by_byte_is_found_at_its_last_byte() -> None:
    frame = pack(QUESTIONS[0])
    frames = Frames()
    assert [len(frames.feed(frame[i : i + 1])) for i in range(len(frame))] == [0] * (len(frame) - 1) + [1]


def test_a_longer_question_of_a_later_version_is_understood() -> None:
    """Structures are arrays: a field that was added at the end is passed over by those that don't know it."""
    raw = msgspec.msgpack.encode(["ask", "a", "text", 5, "m", 3, "a field of the future"])
    assert read_question(raw) == Ask("a", "text", 5, "m", 3)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="an opcode that MessagePack does not have"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
        pytest.param(msgspec.msgpack.encode(["ask"]), id="too few fields"),
        pytest.param(msgspec.msgpack.encode(["sing", "a"]), id="an unknown message"),
        pytest.param(msgspec.msgpack.encode(["finished", "a", "7"]), id="a field of another type"),
        pytest.param(msgspec.msgpack.encode(["ask", "a", "b", None]), id="nothing for a number"),
        pytest.param(msgspec.msgpack.encode({"gone": "a"}), id="an object"),
        pytest.param(pack(QUESTIONS[0])[4:-1], id="cut"),
        pytest.param(pack(QUESTIONS[3])[4:] + b"\x00", id="bytes behind it"),
        pytest.param(b"\x92\xa4gone\xa1\xff", id="broken UTF-8"),
        pytest.param(b"\x93\xa4gone\xa1a" + b"\x91" * 100_000 + b"\xc0", id="deeper than a stack"),
        pytest.param(pack(ANSWERS[0])[4:], id="an answer"),
    ],
)
def test_what_is_no_question_is_an_error_of_its_own(body: bytes) -> None:
    """Each of these once ended another way than by `FrameError`, or could: an event loop must not see them."""
    with pytest.raises(FrameError, match="not a question"):
        read_question(body)


@pytest.mark.parametrize("body", [b"", b"\x92\xa4told\xa1\xff", pack(QUESTIONS[0])[4:], b"\x91" * 100_000])
def test_what_is_no_answer_is_an_error_of_its_own(body: bytes) -> None:
    with pytest.raises(FrameError, match="not an answer"):
        read_answer(body)


@given(st.binary(max_size=200))
def test_any_bytes_give_messages_or_the_error(data: bytes) -> None:
    frames = Frames()
    try:
        bodies = frames.feed(data)
        for body in bodies:
            read_question(body)
    except FrameError:
        pass
    else:
        assert sum(4 + len(body) for body in bodies) <= len(data)


def test_a_length_that_no_message_has_is_refused_before_its_bytes_are_waited_for() -> None:
    frames = Frames()
    assert frames.feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")[:3]) == []
    with pytest.raises(FrameError, match=f"{MAX_FRAME_BYTES + 1} bytes, more than {MAX_FRAME_BYTES}"):
        frames.feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")[3:])


def test_the_longest_frame_passes_and_a_longer_one_is_not_even_packed() -> None:
    overhead = len(pack(Ask("a", "x" * 70_000, 1, "m"))) - 4 - 70_000
    longest = Ask("a", "x" * (MAX_FRAME_BYTES - overhead), 1, "m")
    assert read_question(body_of(pack(longest))) == longest
    with pytest.raises(FrameError, match="more than"):
        pack(Ask("a", longest.text + "x", 1, "m"))


@pytest.mark.parametrize(
    "message", [Ask("a", "\ud800", 1), Ask("\udfff", "b", 1), Ask("a", "b", 2**64), Failed("\ud800")]
)
def test_what_messagepack_cannot_hold_is_an_error_of_ours(message: Question) -> None:
    with pytest.raises(FrameError, match="no message"):
        pack(message)
