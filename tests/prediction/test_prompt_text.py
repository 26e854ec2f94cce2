"""The text of a request: the user's words first, whatever form the prompt has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.prediction import chat_template
from vllm_ext.prediction.prompt_text import PromptText

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


def test_completion_prompt_is_its_own_text() -> None:
    assert PromptText().of(prompt="Once upon a time") == "Once upon a time"


def test_token_ids_are_decoded() -> None:
    assert PromptText().of(token_ids=[104, 105], decode=lambda ids: "".join(map(chr, ids))) == "hi"


def test_token_ids_without_a_decoder_have_no_text() -> None:
    assert PromptText().of(token_ids=[1, 2, 3]) is None


def test_nothing_known_has_no_text() -> None:
    assert PromptText().of() is None


def test_empty_prompt_is_an_empty_text() -> None:
    assert PromptText().of(prompt="") == ""


def test_messages_are_preferred_to_the_rendered_prompt() -> None:
    assert PromptText().of(prompt="<rendered>", token_ids=[1], messages=[message("user", "hi")]) == "hi"


def test_only_the_ends_of_a_long_token_prompt_are_decoded() -> None:
    seen: list[Sequence[int]] = []

    def decode(ids: Sequence[int]) -> str:
        seen.append(ids)
        return "text"

    assert PromptText(max_tokens=8).of(token_ids=range(100_000), decode=decode) == "text"
    assert seen == [[*range(64), *range(100_000 - 64, 100_000)]]


# --- chats ------------------------------------------------------------------------------------------------------------


def test_chat_is_a_system_prefix_then_the_last_turn_then_earlier_ones() -> None:
    text = PromptText(system_chars=30).of(messages=CHAT)
    assert text == "You are a pirate. Never break\nWrite an essay of 500 words about it.\nWho wrote Moby-Dick?"


def test_system_prompt_can_be_left_out() -> None:
    assert PromptText(system_chars=0).of(messages=CHAT[:2]) == "Who wrote Moby-Dick?"


def test_what_assistant_and_tools_said_is_left_out() -> None:
    chat = [
        message("user", "What time is it?"),
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        message("tool", "12:30"),
        message("function", "again 12:30"),
    ]
    assert PromptText().of(messages=chat) == "What time is it?"


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
    assert PromptText().of(messages=chat) == expected


def test_parts_are_joined_and_media_leave_a_mark() -> None:
    parts = [
        {"type": "text", "text": "What is on"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {}},
        "these?",
    ]
    assert PromptText().of(messages=[message("user", parts)]) == "What is on\n[image]\n[audio]\nthese?"


def test_earlier_turns_take_no_more_than_the_last_one() -> None:
    last, earlier = "b" * 160, "a" * 1000
    text = PromptText(context_tokens=8).of(messages=[message("user", earlier), message("user", last)])
    assert text == f"{last}\n{'a' * 160}"


def test_context_is_kept_beside_a_short_last_turn() -> None:
    text = PromptText(context_tokens=10).of(messages=[message("user", "a" * 1000), message("user", "go on")])
    assert text == f"go on\n{'a' * 40}"


def test_latest_of_the_earlier_turns_comes_first() -> None:
    chat = [message("user", word * 40) for word in "abcd"]
    text = PromptText(context_tokens=20).of(messages=chat)
    assert text == "\n".join(["d" * 40, "c" * 40, "b" * 40])


def test_long_last_turn_leaves_no_room_and_is_not_cut() -> None:
    """Which part of it is embedded is the encoder's choice."""
    text = PromptText(max_tokens=64).of(messages=[message("user", "earlier " * 9), message("user", "b" * 10_000)])
    assert text == "b" * 10_000


def test_non_ascii_characters_count_as_tokens() -> None:
    chat = [message("user", "数" * 500), message("user", "q" * 4)]
    assert PromptText(context_tokens=10).of(messages=chat) == "qqqq\n" + "数" * 10


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
    text = rule.of(messages=chat)
    assert text is not None
    last = next(
        (
            turn
            for said in reversed(chat)
            if said["role"] in ("user", "human") and (turn := PromptText(system_chars=0).of(messages=[said]))
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
        PromptText().of(messages=chat)
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
    "Llama 2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nOne? [/INST] Yes. </s><s>[INST] Two? [/INST]",
    "Mistral": "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]One?[/INST]Yes.</s>[INST]Two?[/INST]",
    "Gemma": "<bos><start_of_turn>system\nBe brief.<end_of_turn>\n<start_of_turn>user\nOne?<end_of_turn>\n"
    "<start_of_turn>model\nYes.<end_of_turn>\n<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n",
    "Phi": "<|system|>\nBe brief.<|end|>\n<|user|>\nOne?<|end|>\n<|assistant|>\nYes.<|end|>\n<|user|>\nTwo?<|end|>\n"
    "<|assistant|>\n",
    "harmony": "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>One?<|end|><|start|>assistant"
    "<|channel|>final<|message|>Yes.<|end|><|start|>user<|message|>Two?<|end|><|start|>assistant",
    "DeepSeek": "<｜begin▁of▁sentence｜>Be brief.<｜User｜>One?<｜Assistant｜>Yes.<｜end▁of▁sentence｜><｜User｜>Two?"
    "<｜Assistant｜><think>\n",
    "Vicuna": "Be brief. USER: One? ASSISTANT: Yes.</s>USER: Two? ASSISTANT:",
}


@pytest.mark.parametrize("template", RENDERED)
def test_rendered_chat_is_read_like_its_messages(template: str) -> None:
    assert chat_template.parse(RENDERED[template]) == [
        message("system", "Be brief."),
        message("user", "One?"),
        message("assistant", "Yes."),
        message("user", "Two?"),
    ]
    assert PromptText().of(prompt=RENDERED[template]) == "Be brief.\nTwo?\nOne?"


@pytest.mark.parametrize(
    "prompt",
    [
        "Explain the token <|im_start|> to me.",
        "USER: is a word here",
        "[INST]",
        "<|im_start|>assistant\nonly this",
        "<|user|>",
    ],
)
def test_prompt_that_only_mentions_marks_stays_whole(prompt: str) -> None:
    assert PromptText().of(prompt=prompt) == prompt


def test_copied_chat_inside_a_turn_does_no_harm() -> None:
    text = PromptText().of(prompt=RENDERED["ChatML"].replace("Two?", "What does <|im_start|>user mean?"))
    assert text is not None
    assert "mean?" in text


@pytest.mark.parametrize("mark", ["<|im_start|> ", "<|start|>user", "<|start|>user<|channel|>", "[INST]", "USER: "])
def test_many_marks_take_linear_time(mark: str) -> None:
    assert PromptText().of(prompt=mark * 100_000 + "ASSISTANT:") is not None


@given(st.text())
def test_any_prompt_has_a_text(prompt: str) -> None:
    assert PromptText().of(prompt=prompt) is not None


WORDS = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=40)


@given(system=WORDS, turns=st.lists(WORDS, min_size=1, max_size=5))
def test_rendering_loses_nothing_of_the_text(system: str, turns: list[str]) -> None:
    chat = [message("system", system), *(message("user", words) for words in turns)]
    rendered = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat)
    assert PromptText().of(prompt=rendered + "<|im_start|>assistant\n") == PromptText().of(messages=chat)
