"""Messages survive their way; what is none is told apart, whatever the bytes."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.contract.length_distribution import LEVELS, LengthDistribution
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt
from vllm_ext.predictor import messages
from vllm_ext.predictor.messages import Answer, Ask, BadMessage, Finished, Ping, Status, is_distribution, pack, unpack

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
COUNTS = st.integers(0, 2**40)
PROMPTS = st.builds(Prompt, TEXTS, COUNTS, TEXTS, COUNTS, TEXTS, COUNTS, TEXTS, TEXTS)
MESSAGES = st.one_of(
    st.builds(Ask, TEXTS, PROMPTS),
    st.builds(Finished, COUNTS, st.builds(FinishedPrompt, PROMPTS, COUNTS, st.floats(0, 1e12), st.booleans())),
    st.just(Ping()),
    st.builds(Answer, TEXTS, st.lists(COUNTS, max_size=9).map(tuple), TEXTS),
    st.builds(Status, st.booleans(), st.floats(0, 1e6), *[COUNTS] * 7, *[st.floats(-1, 1)] * 3),
)


@given(MESSAGES)
def test_a_message_survives_its_way(message: messages.Message) -> None:
    assert unpack(pack(message)) == message


@given(MESSAGES, st.data())
def test_a_part_of_a_message_is_none(message: messages.Message, data: st.DataObject) -> None:
    body = pack(message)
    with pytest.raises(BadMessage):
        unpack(body[: data.draw(st.integers(0, len(body) - 1))])


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_bad_one(body: bytes) -> None:
    try:
        unpack(body)
    except BadMessage:
        return


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        msgspec.msgpack.encode(["ask", "r", "no prompt"]),
        msgspec.msgpack.encode(["ask", "r", ["text", "many", "m"]]),
        msgspec.msgpack.encode(["answer", "r", [1.5] * 9, "s"]),
        msgspec.msgpack.encode(["gone", "r"]),
        msgspec.msgpack.encode({"type": "ping"}),
        b"\x92\xa6answer\xa1\xff",
        pickle.dumps(Ping),
    ],
    ids=["nothing", "never used", "deep", "prompt", "bound", "fractions", "tag", "form", "no UTF-8", "pickle"],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(BadMessage):
        unpack(body)


@pytest.mark.parametrize("text", ["\ud800", "x" * messages.MAX_BYTES], ids=["a lone surrogate", "too long"])
def test_what_no_message_can_hold_is_refused_before_it_is_sent(text: str) -> None:
    with pytest.raises(BadMessage):
        pack(Ask("r", Prompt(text, 1, "m")))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_the_quantiles_of_any_law_are_an_answer(lengths: list[int]) -> None:
    assert is_distribution(LengthDistribution.of(lengths).quantiles())


@pytest.mark.parametrize("quantiles", [(), (1,) * 8, (0,) * 9, range(9, 0, -1), (1,) * 8 + (2**41,)])
def test_what_is_no_law_is_seen(quantiles: tuple[int, ...]) -> None:
    assert len(LEVELS) == 9
    assert not is_distribution(quantiles)
