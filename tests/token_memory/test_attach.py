"""The memory between vLLM's renderer and its tokenizer: when it is asked, and when the tokenizer is."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from vllm.renderers.params import TokenizeParams

from vllm_ext.patches import token_memory as hooks
from vllm_ext.token_memory import attach as attaching
from vllm_ext.token_memory.attach import ATTRIBUTE, PromptMemory, TokenizedText
from vllm_ext.token_memory.metrics import TokenMemoryMetrics

PARAMS = TokenizeParams(max_total_tokens=400, add_special_tokens=True)
TEXT = "<u>What is it that you are thinking of?</u><a>"
ANSWER = "An answer"


def made_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that puts ``<s>`` before a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = [AddedToken(c, special=True, normalized=False) for c in ("<s>", "<u>", "</u>", "<a>", "</a>")]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([ANSWER] * 3, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    found = PreTrainedTokenizerFast(tokenizer_object=made)
    found.max_token_id = len(found) - 1  # as vLLM's have it
    return found


TOKENIZER = made_tokenizer()
SPELLED = [TOKENIZER.convert_tokens_to_ids(c) for c in "AnĠanswer"]


class Renderer:
    """vLLM's, as far as it is used, with what went through the tokenizer."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.tokenizer = TOKENIZER
        self.default_chat_tok_params = dataclasses.replace(PARAMS, add_special_tokens=False)
        self.default_cmpl_tok_params = PARAMS
        memory = PromptMemory(TOKENIZER, len(TOKENIZER), 1 << 20, TokenMemoryMetrics("attached"))
        setattr(self, ATTRIBUTE, memory)
        self.memory = memory

    def tokenize(self, prompt: Mapping[str, Any], params: TokenizeParams) -> dict[str, Any]:
        self.seen.append(prompt["prompt"])
        return {**prompt, "prompt_token_ids": TOKENIZER(prompt["prompt"], **params.get_encode_kwargs())["input_ids"]}

    def asked(self, text: str, *, salt: str = "", params: TokenizeParams = PARAMS, **more: Any) -> dict[str, Any]:
        marked = copy.copy(params)
        object.__setattr__(marked, "_vllm_ext_salt", salt)
        original = lambda self, prompt, params: self.tokenize(prompt, params)  # noqa: E731
        found: dict[str, Any] = hooks._tokenize_prompt(original, self, {"prompt": text, **more}, marked)
        return found

    def answered(self, made: Mapping[str, Any], ids: list[int]) -> list[int]:
        state = SimpleNamespace(
            prompt=made["prompt"],
            prompt_token_ids=made["prompt_token_ids"],
            detokenizer=SimpleNamespace(output_token_ids=ids),
        )
        hooks._finish_request(lambda self, state: None, self, state)
        return [*made["prompt_token_ids"], *ids]


def encoded(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text)["input_ids"]
    return ids


def test_a_next_turn_keeps_bos_and_all_ids_and_only_its_rest_is_tokenised() -> None:
    renderer = Renderer()
    known = renderer.answered(renderer.asked(TEXT), SPELLED)
    again = renderer.asked(f"{TEXT}{ANSWER}</a><u>And then?</u><a>")
    assert again["prompt_token_ids"] == known + encoded("</a><u>And then?</u><a>")[1:]
    assert renderer.seen == [TEXT, "</a><u>And then?</u><a>"]
    assert again["prompt"] == f"{TEXT}{ANSWER}</a><u>And then?</u><a>"


def test_a_text_that_the_tokenizer_refuses_is_no_failure_of_the_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure only is logged: a lone surrogate would hide those that follow."""
    monkeypatch.setattr(hooks.guarded, "_logged", False)
    monkeypatch.setattr(hooks.guarded._logger, "propagate", True)
    with caplog.at_level(logging.ERROR), pytest.raises(TypeError):
        Renderer().asked(f"{TEXT}\ud800")
    assert not caplog.records


REFUSED: dict[str, dict[str, Any]] = {
    "truncation": {"params": dataclasses.replace(PARAMS, truncate_prompt_tokens=300)},
    "padding": {"params": dataclasses.replace(PARAMS, pad_prompt_tokens=300)},
    "offsets": {"params": dataclasses.replace(PARAMS, return_token_offsets=True)},
    "images": {"multi_modal_data": {"image": object()}},
    "known images": {"multi_modal_uuids": {"image": ["a"]}},
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_needs_the_tokenizer_gets_it_and_is_not_learned(case: dict[str, Any]) -> None:
    renderer = Renderer()
    renderer.answered(renderer.asked(TEXT), SPELLED)
    again = renderer.asked(f"{TEXT}{ANSWER}</a><u>And", **case)
    assert again["prompt_token_ids"] == encoded(f"{TEXT}{ANSWER}</a><u>And")
    assert not isinstance(again["prompt"], TokenizedText)


def test_known_ids_that_do_not_fit_the_context_give_way_to_the_tokenizers() -> None:
    renderer = Renderer()
    renderer.answered(renderer.asked(TEXT), SPELLED)
    text = f"{TEXT}{ANSWER}</a><u>And"
    fits = dataclasses.replace(PARAMS, max_total_tokens=len(encoded(text)))
    assert renderer.asked(text, params=fits)["prompt_token_ids"] == encoded(text)


def test_a_text_that_is_too_long_is_reported_with_as_many_tokens_as_before() -> None:
    renderer = Renderer()
    renderer.asked(TEXT)
    short = dataclasses.replace(PARAMS, max_total_tokens=30)
    assert len(renderer.asked(TEXT * 3, params=short)["prompt_token_ids"]) == 31


def test_parameters_that_came_by_another_way_have_no_known_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer()
    renderer.answered(renderer.asked(TEXT), SPELLED)
    original = lambda self, prompt, params: self.tokenize(prompt, params)  # noqa: E731
    text = f"{TEXT}{ANSWER}</a>"
    monkeypatch.setattr(renderer.memory, "tokenize", lambda *_: pytest.fail("it was asked"))
    assert hooks._tokenize_prompt(original, renderer, {"prompt": text}, PARAMS)["prompt_token_ids"] == encoded(text)


def test_a_mismatch_switches_the_memory_off(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer()
    renderer.answered(renderer.asked(TEXT), SPELLED)
    monkeypatch.setattr(renderer.memory, "_decode", lambda ids: "something else")
    text = f"{TEXT}{ANSWER}</a><u>And"
    with caplog.at_level(logging.ERROR, "vllm.vllm_ext.token_memory"):
        assert renderer.asked(text)["prompt_token_ids"] == encoded(text)
    assert "token memory is off" in caplog.text
    assert renderer.asked(text)["prompt_token_ids"] == encoded(text)
    assert len(caplog.records) == 1


def test_a_failure_at_the_end_of_a_request_stays_there(caplog: pytest.LogCaptureFixture) -> None:
    renderer = Renderer()
    made = renderer.asked(TEXT)
    ended = []
    state = SimpleNamespace(prompt=made["prompt"], prompt_token_ids=None, detokenizer=SimpleNamespace())
    with caplog.at_level(logging.ERROR, "vllm.vllm_ext.token_memory"):
        hooks._finish_request(lambda self, state: ended.append(state), renderer, state)
    assert ended == [state]


def test_a_failure_of_the_memory_leaves_the_prompt_to_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer()
    monkeypatch.setattr(renderer.memory, "tokenize", lambda *_: 1 / 0)
    assert renderer.asked(TEXT)["prompt_token_ids"] == encoded(TEXT)


def test_a_text_that_no_special_token_cuts_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer()
    monkeypatch.setattr(renderer.memory._memory, "_decode", lambda ids: 1 / 0)
    made = renderer.asked("What is it that you are thinking of?")
    assert made["prompt_token_ids"] == encoded("What is it that you are thinking of?")
    assert isinstance(made["prompt"], TokenizedText)
    made["prompt"].memory.ended(made["prompt"], made["prompt_token_ids"], SPELLED)


def test_texts_leave_the_process_as_plain_ones() -> None:
    text = Renderer().asked(TEXT)["prompt"]
    assert type(pickle.loads(pickle.dumps(text))) is str  # noqa: S301
    assert text == TEXT


@pytest.mark.parametrize(("kind", "default"), [("render_chat", False), ("render_cmpl_async", True)])
@pytest.mark.parametrize("given", [None, dataclasses.replace(PARAMS, max_total_tokens=7)], ids=["default", "given"])
def test_salts_go_with_the_parameters_of_a_call(kind: str, default: bool, given: TokenizeParams | None) -> None:
    renderer, seen = Renderer(), []

    def original(self: Any, prompts: Any, tok_params: Any = None, *, prompt_extras: Any = None) -> None:
        seen.append(tok_params)

    original.__name__ = kind
    hooks._render(original, renderer, ["text"], given, prompt_extras={"cache_salt": "mine"})
    hooks._render(original, renderer, ["text"], tok_params=given)
    assert [found._vllm_ext_salt for found in seen] == ["mine", ""]
    expected = given or dataclasses.replace(PARAMS, add_special_tokens=default)
    assert all(found == expected and found is not given for found in seen)
    assert not hasattr(PARAMS, "_vllm_ext_salt")


def engine_of(**model: Any) -> Any:
    known = {
        "runner_type": "generate",
        "is_encoder_decoder": False,
        "enable_prompt_embeds": False,
        "served_model_name": ["attached", "alias"],
        "get_vocab_size": lambda: 512,
    }
    config = SimpleNamespace(model_config=SimpleNamespace(**{**known, **model}))
    return SimpleNamespace(vllm_config=config, renderer=SimpleNamespace(tokenizer=TOKENIZER))


def test_a_server_says_that_it_has_a_memory(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of()
    with caplog.at_level(logging.INFO, "vllm.vllm_ext.token_memory"):
        attaching.attach(engine, 8)
    assert isinstance(getattr(engine.renderer, ATTRIBUTE), PromptMemory)
    assert caplog.messages == ["token memory of 8 MiB; texts are cut at 5 special tokens: </a>, </u>, <a>, <s>, <u>"]


@pytest.mark.parametrize(
    "model", [{"runner_type": "pooling"}, {"is_encoder_decoder": True}, {"enable_prompt_embeds": True}], ids=str
)
def test_a_model_that_cannot_have_one_is_served_without(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(**model)
    with caplog.at_level(logging.WARNING, "vllm.vllm_ext.token_memory"):
        attaching.attach(engine, 8)
    assert not hasattr(engine.renderer, ATTRIBUTE)
    (message,) = caplog.messages
    assert message.startswith("--ext-token-memory 8: off, every prompt is tokenised whole: ")


def test_a_tokenizer_that_fails_does_not_keep_a_server_from_starting(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of()
    engine.renderer.tokenizer = SimpleNamespace(is_fast=True, added_tokens_decoder={0: None}, max_token_id=1)
    with caplog.at_level(logging.WARNING, "vllm.vllm_ext.token_memory"):
        attaching.attach(engine, 8)
    assert not hasattr(engine.renderer, ATTRIBUTE)
    assert "off, every prompt is tokenised whole" in caplog.text
