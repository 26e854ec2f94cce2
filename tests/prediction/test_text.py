"""The text of a request: the user's words first, whatever form the prompt has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.prediction.text import PromptText, rendered_turns

SYSTEM = "You are   a pirate.\n" + "Never break character. " * 50


def message(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


CHAT = [
    message("system", SYSTEM),
    message("user", "Who wrote Moby-Dick?"),
    message("assistant", "Arr, that be Melville."),
    message("user", "Write an essay of 500 words about it."),
]


# --- what is known ----------------------------------------------------------------------------------------------------


class Tokenizer:
    """A token is a code point; marks of chats are special tokens."""

    def __init__(self, *special: str) -> None:
        self.all_special_tokens = special
        self.decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens, "a chat's marks are special tokens"
        self.decoded += len(ids)
        return "".join(map(chr, ids))


CHATML = Tokenizer("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("prompt", ["Once upon a time", "", "   ", "\0", "数字和颜色", "👩‍👩‍👧", "مرحبا"])
def test_a_completion_prompt_is_its_own_text(prompt: str) -> None:
    assert PromptText().of(prompt, [1, 2, 3], None, CHATML) == prompt


def test_a_chat_is_what_the_client_sent_not_what_was_rendered_from_it() -> None:
    assert PromptText().of("<|im_start|>user\nno", [1], [message("user", "hi")], CHATML) == "hi"


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
    assert PromptText().of(rendered, None, messages, CHATML) == "And a lake?"


def test_token_ids_alone_are_decoded_at_their_ends() -> None:
    tokenizer = Tokenizer()
    assert PromptText().of(None, list(map(ord, "a prompt")), None, tokenizer) == "a prompt"
    long = PromptText(max_tokens=32).of(None, [ord("h")] * 50_000 + [ord("t")] * 50_000, None, tokenizer)
    assert long is not None
    assert (long[0], long[-1]) == ("h", "t")
    assert tokenizer.decoded < 2000


@pytest.mark.parametrize(
    ("prompt", "token_ids", "tokenizer"), [(None, None, CHATML), (None, [1, 2], None), (None, None, None)]
)
def test_what_cannot_be_read_has_no_text(prompt: str | None, token_ids: list[int] | None, tokenizer: Any) -> None:
    """Embeddings, or tokens on a server without a tokenizer."""
    assert PromptText().of(prompt, token_ids, None, tokenizer) is None


def test_a_long_prompt_keeps_its_ends_and_loses_its_middle() -> None:
    rule = PromptText(max_tokens=32)
    text = rule.of("h" * 300_000 + "middle" + "t" * 300_000)
    assert text is not None
    assert len(text) == 2 * 32 * 16 + 1
    assert (text[0], text[-1]) == ("h", "t")
    fitting = "ab" * (32 * 16)
    assert rule.of(fitting) == fitting


@pytest.mark.parametrize("as_chat", [True, False])
def test_a_lone_surrogate_becomes_what_can_be_sent(as_chat: bool) -> None:
    r"""JSON can hold ``"\ud800"``, UTF-8 can't."""
    odd = "before \ud800 after"
    assert (
        PromptText().of(None if as_chat else odd, None, [message("user", odd)] if as_chat else None) == "before ? after"
    )


@pytest.mark.parametrize("letter", ["a", "字", "👧"])
def test_however_many_tokens_are_embedded_a_text_is_bounded(letter: str) -> None:
    """With a window of 20,000 tokens, a chat in Chinese was once longer than a message may be."""
    text = PromptText(max_tokens=20_000).of(None, None, [message("user", letter * 1_000_000)])
    assert text is not None
    assert 100_000 < len(text.encode()) < 1 << 20


# --- chats ------------------------------------------------------------------------------------------------------------


def test_chat_is_a_system_prefix_then_the_last_turn_then_earlier_ones() -> None:
    text = PromptText(system_chars=30).from_messages(CHAT)
    assert text == "You are a pirate. Never break\nWrite an essay of 500 words about it.\nWho wrote Moby-Dick?"


def test_system_prompt_can_be_left_out() -> None:
    assert PromptText(system_chars=0).from_messages(CHAT[:2]) == "Who wrote Moby-Dick?"


def test_what_assistant_and_tools_said_is_left_out() -> None:
    chat = [
        message("user", "What time is it?"),
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        message("tool", "12:30"),
        message("function", "again 12:30"),
    ]
    assert PromptText().from_messages(chat) == "What time is it?"


@pytest.mark.parametrize(
    ("chat", "expected"),
    [
        ([], ""),
        ([message("system", "Be brief.")], "Be brief."),
        ([message("system", "Be brief."), message("assistant", "Once upon")], "Be brief.\nOnce upon"),
        ([message("user", "  "), message("tool", "42")], "42"),
        ([message("user", None)], ""),
        ([message("developer", "Be brief."), message("human", "hi")], "Be brief.\nhi"),
    ],
    ids=["no message", "system only", "prefill only", "blank user", "null", "other names of roles"],
)
def test_chat_without_the_usual_roles(chat: list[dict[str, object]], expected: str) -> None:
    assert PromptText().from_messages(chat) == expected


def test_parts_are_joined_and_media_leave_a_mark() -> None:
    parts = [
        {"type": "text", "text": "What is on"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {}},
        "these?",
    ]
    assert PromptText().from_messages([message("user", parts)]) == "What is on\n[image]\n[audio]\nthese?"


def test_earlier_turns_take_no_more_than_the_last_one() -> None:
    last, earlier = "b" * 160, "a" * 1000
    text = PromptText(context_tokens=8).from_messages([message("user", earlier), message("user", last)])
    assert text == f"{last}\n{'a' * 160}"


def test_context_is_kept_beside_a_short_last_turn() -> None:
    text = PromptText(context_tokens=10).from_messages([message("user", "a" * 1000), message("user", "go on")])
    assert text == f"go on\n{'a' * 40}"


def test_latest_of_the_earlier_turns_comes_first() -> None:
    chat = [message("user", word * 40) for word in "abcd"]
    text = PromptText(context_tokens=20).from_messages(chat)
    assert text == "\n".join(["d" * 40, "c" * 40, "b" * 40])


def test_long_last_turn_leaves_no_room_and_is_not_cut() -> None:
    """Which part of it is embedded is the encoder's choice."""
    text = PromptText(max_tokens=64).from_messages([message("user", "earlier " * 9), message("user", "b" * 10_000)])
    assert text == "b" * 10_000


def test_non_ascii_characters_count_as_tokens() -> None:
    chat = [message("user", "数" * 500), message("user", "q" * 4)]
    assert PromptText(context_tokens=10).from_messages(chat) == "qqqq\n" + "数" * 10


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool", "human", "x"]),
            "content": st.one_of(
                st.none(),
                st.text(max_size=300),
                st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=50)}), max_size=3),
            ),
        }
    ),
    max_size=6,
)


@given(chat=MESSAGES, system_chars=st.integers(0, 50), max_tokens=st.integers(8, 200))
def test_text_is_the_whole_last_turn_and_little_else(
    chat: list[dict[str, Any]], system_chars: int, max_tokens: int
) -> None:
    rule = PromptText(max_tokens=max_tokens, system_chars=system_chars)
    text = rule.from_messages(chat)
    assert text is not None
    last = next(
        (
            turn
            for said in reversed(chat)
            if said["role"] in ("user", "human") and (turn := PromptText(system_chars=0).from_messages([said]))
        ),
        "",
    )
    assert last in text
    # A token stands for 4 characters at most, and every part is followed by a line break.
    assert len(text) <= len(last) + system_chars + 4 * max_tokens + len(chat) or not last


@pytest.mark.parametrize(
    ("chat", "error"),
    [
        (["hi"], r"messages\[0\]=<str>: must be an object with the texts 'role' and 'content'"),
        ([message("user", "a"), {"content": "secret"}], r"messages\[1\]=<dict>: must be an object"),
        ([message("user", 5)], r"messages\[0\]\.content=<int>: must be text, a list of parts, or null"),
        ([message("user", b"secret")], r"content=<bytes>: must be text"),
        ([message("user", [3])], r"messages\[0\]\.content\[0\]=<int>: must be text or an object with 'type'"),
        ([message("user", [{"secret": "x"}])], r"content\[0\]\.type=<NoneType>: must be text"),
    ],
    ids=["text", "no role", "number", "bytes", "number as part", "part without type"],
)
def test_malformed_message_is_named_without_its_content(chat: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error) as caught:
        PromptText().from_messages(chat)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 7), ("system_chars", -1), ("context_tokens", True), ("max_tokens", 8.0)]
)
def test_bad_limit_is_named(name: str, value: object) -> None:
    limits: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name}={value!r}: must be a whole number"):
        PromptText(**limits)


# --- rendered chats ---------------------------------------------------------------------------------------------------

RENDERED = {
    "ChatML": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
    "Yes.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n",
    "Llama 3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nTwo?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "Mistral": "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]One?[/INST]Yes.</s>[INST]Two?[/INST]",
    "Gemma": "<bos><start_of_turn>system\nBe brief.<end_of_turn>\n<start_of_turn>user\nOne?<end_of_turn>\n"
    "<start_of_turn>model\nYes.<end_of_turn>\n<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n",
    "Phi": "<|system|>\nBe brief.<|end|>\n<|user|>\nOne?<|end|>\n<|assistant|>\nYes.<|end|>\n<|user|>\nTwo?<|end|>\n"
    "<|assistant|>\n",
    "harmony": "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>One?<|end|><|start|>assistant"
    "<|channel|>final<|message|>Yes.<|end|><|start|>user<|message|>Two?<|end|><|start|>assistant",
    "DeepSeek": "<｜begin▁of▁sentence｜>Be brief.<｜User｜>One?<｜Assistant｜>Yes.<｜end▁of▁sentence｜><｜User｜>Two?"
    "<｜Assistant｜><think>\n",
}


SPECIAL = re.compile(r"<[|｜][^>]*[|｜]>|</?s>|<bos>|<start_of_turn>|<end_of_turn>|<think>|\[/?[A-Z_]+\]")


@pytest.mark.parametrize("template", RENDERED)
def test_a_rendered_chat_is_read_like_its_messages(template: str) -> None:
    tokenizer = Tokenizer(*dict.fromkeys(SPECIAL.findall(RENDERED[template])))
    turns = rendered_turns(RENDERED[template], tokenizer)
    assert turns is not None
    said = [message("system", "Be brief."), message("user", "One?"), message("user", "Two?")]
    assert [turn for turn in turns if turn["role"] not in ("assistant", "model")] == said
    assert PromptText().of(RENDERED[template], None, None, tokenizer) == "Be brief.\nTwo?\nOne?"


@pytest.mark.parametrize(
    "prompt", ["Explain the token <|im_start|> to me.", "<|im_start|>assistant\nonly this", "<|im_start|>", "user\nhi"]
)
def test_a_prompt_that_only_mentions_marks_stays_whole(prompt: str) -> None:
    assert PromptText().of(prompt, None, None, CHATML) == prompt


def test_without_a_tokenizer_a_rendered_chat_is_its_own_text() -> None:
    assert PromptText().of(RENDERED["ChatML"]) == RENDERED["ChatML"]


def test_a_copied_chat_inside_a_turn_does_no_harm() -> None:
    prompt = RENDERED["ChatML"].replace("Two?", "What does <|im_start|>user mean?")
    text = PromptText().of(prompt, None, None, CHATML)
    assert text is not None
    assert "mean?" in text


def test_the_turns_of_a_long_rendered_chat_are_found_at_its_end() -> None:
    rendered = "<|im_start|>user\n" + "filler " * 100_000 + "<|im_end|>\n<|im_start|>user\nAnd a lake?<|im_end|>\n"
    text = PromptText().of(rendered, None, None, CHATML)
    assert text is not None
    assert text.startswith("And a lake?")


@pytest.mark.parametrize("mark", ["<|im_start|> ", "<|im_start|>user", "<|im_start|>user\n"])
def test_many_marks_take_linear_time(mark: str) -> None:
    assert PromptText().of(mark * 100_000 + "the end", None, None, CHATML) is not None


@given(st.text())
def test_any_prompt_has_a_text(prompt: str) -> None:
    assert PromptText().of(prompt, None, None, CHATML) is not None


WORDS = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=40)


@given(system=WORDS, turns=st.lists(WORDS, min_size=1, max_size=5))
def test_rendering_loses_nothing_of_the_text(system: str, turns: list[str]) -> None:
    chat = [message("system", system), *(message("user", words) for words in turns)]
    rendered = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat)
    assert PromptText().of(rendered + "<|im_start|>assistant\n", None, None, CHATML) == PromptText().from_messages(chat)
