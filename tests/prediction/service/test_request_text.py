"""The text that stands for a request: what the user said, short whatever was sent, and fit to be sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from vllm_ext.prediction.prompt_text import PromptText
from vllm_ext.prediction.service.messages import Ask, pack
from vllm_ext.prediction.service.request_text import RequestTexts

TOKENS = 32
LONGEST = 2 * TOKENS * 16 + 1
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name a river."},
    {"role": "assistant", "content": "The Rhine."},
    {"role": "user", "content": "And a lake?"},
]


class Tokenizer:
    """A token is a code point."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens, "a chat's marks are special tokens"
        self.decoded += len(ids)
        return "".join(map(chr, ids))


def text_of(
    prompt: str | None = None,
    token_ids: Sequence[int] | None = None,
    messages: Sequence[Any] | None = None,
    tokenizer: Any = None,
    max_tokens: int = TOKENS,
) -> str | None:
    return RequestTexts(PromptText(max_tokens=max_tokens)).of(prompt, token_ids, messages, tokenizer)


def test_a_completion_prompt_is_its_own_text() -> None:
    assert text_of("Once upon a time", [1, 2, 3], None, Tokenizer()) == "Once upon a time"


def test_a_chat_is_what_the_client_sent_not_what_was_rendered_from_it() -> None:
    text = text_of("<|im_start|>system\nBe brief.<|im_end|>", [1, 2], CHAT)
    assert text == "Be brief.\nAnd a lake?\nName a river."


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": 7}],
        [{"content": "nobody's"}],
        [{"role": "user", "content": iter(["a form that only vLLM understands"])}],
        ["text"],
        [],
    ],
    ids=["a number", "no role", "an iterator", "no object", "none"],
)
def test_a_chat_of_another_form_is_read_from_its_rendered_prompt(messages: list[Any]) -> None:
    rendered = "<|im_start|>user\nAnd a lake?<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(rendered, None, messages) == "And a lake?"


def test_an_iterator_of_parts_is_left_to_those_who_render_it() -> None:
    parts = iter([{"type": "text", "text": "hello"}])
    assert text_of("hello", None, [{"role": "user", "content": parts}]) == "hello"
    assert next(parts)["text"] == "hello"


def test_token_ids_alone_are_decoded_at_their_ends() -> None:
    tokenizer = Tokenizer()
    assert text_of(None, list(map(ord, "a prompt")), None, tokenizer) == "a prompt"
    long = text_of(None, [ord("h")] * 50_000 + [ord("t")] * 50_000, None, tokenizer)
    assert long is not None
    assert (long[0], long[-1]) == ("h", "t")
    assert tokenizer.decoded < 2000


@pytest.mark.parametrize(
    ("prompt", "token_ids", "tokenizer"), [(None, None, Tokenizer()), (None, [1, 2], None), (None, None, None)]
)
def test_what_cannot_be_read_has_no_text(prompt: str | None, token_ids: list[int] | None, tokenizer: Any) -> None:
    """Embeddings, or tokens on a server without a tokenizer."""
    assert text_of(prompt, token_ids, None, tokenizer) is None


@pytest.mark.parametrize("prompt", ["", "   ", "\0", "数字和颜色", "👩‍👩‍👧", "مرحبا"])
def test_any_prompt_has_a_text_that_can_be_sent(prompt: str) -> None:
    assert text_of(prompt) == prompt


def test_a_long_prompt_keeps_its_ends_and_loses_its_middle() -> None:
    text = text_of("h" * 300_000 + "middle" + "t" * 300_000)
    assert text is not None
    assert len(text) == LONGEST
    assert (text[0], text[-1]) == ("h", "t")
    assert "middle" not in text


def test_a_prompt_that_just_fits_is_whole() -> None:
    fitting = "ab" * (TOKENS * 16)
    assert text_of(fitting) == fitting
    assert text_of(fitting + "c") == f"{fitting[: TOKENS * 16]}\n{(fitting + 'c')[-TOKENS * 16 :]}"


def test_the_turns_of_a_long_rendered_chat_are_found_at_its_end() -> None:
    rendered = "<|im_start|>user\n" + "filler " * 100_000 + "<|im_end|>\n<|im_start|>user\nAnd a lake?<|im_end|>\n"
    text = text_of(rendered)
    assert text is not None
    assert text.startswith("And a lake?")


@pytest.mark.parametrize("as_chat", [True, False])
def test_a_lone_surrogate_becomes_what_can_be_sent(as_chat: bool) -> None:
    r"""JSON can hold ``"\ud800"``, UTF-8 can't."""
    odd = "before \ud800 after"
    text = text_of(None if as_chat else odd, None, [{"role": "user", "content": odd}] if as_chat else None)
    assert text == "before ? after"


@pytest.mark.parametrize("as_chat", [True, False])
@pytest.mark.parametrize("letter", ["a", "字", "👧"])
def test_however_many_tokens_are_embedded_the_text_fits_into_a_frame(letter: str, as_chat: bool) -> None:
    """With a window of 20,000 tokens, a chat in Chinese was once too long, and the connection was closed over it."""
    prompt = letter * 1_000_000
    chat = [{"role": "user", "content": prompt}] if as_chat else None
    text = text_of(prompt, None, chat, max_tokens=20_000)
    assert text is not None
    assert len(pack(Ask("a", text, 1, "m"))) > 100_000
