"""Which tokenizers cut a text at which special tokens, tried on tokenizers of the common kinds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from vllm_ext.token_memory import special_tokens
from vllm_ext.token_memory.special_tokens import Unsuitable, standing_apart

TEXTS = ["Hello there user Hi a y 1 2 def f( g)"] * 3


def byte_level(*added: AddedToken, prefix_space: bool = False) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    made.decoder = decoders.ByteLevel()
    return trained(made, added)


def metaspace(scheme: str, *added: AddedToken) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    if scheme == "never":
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return trained(made, added)


def trained(made: Tokenizer, added: tuple[AddedToken, ...]) -> PreTrainedTokenizerFast:
    alphabet = pre_tokenizers.ByteLevel.alphabet() + list("\n▁")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(added), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def token(content: str, **flags: Any) -> AddedToken:
    return AddedToken(content, special=True, **{"normalized": False, **flags})


def test_tokens_that_may_eat_what_stands_beside_them_are_left_out() -> None:
    found = special_tokens.read(
        byte_level(
            token("<a>"),
            token("<l>", lstrip=True),
            token("<r>", rstrip=True),
            token("<w>", single_word=True),
            token("<n>", normalized=True),
        )
    )
    assert found == {"<a>": 0}


@pytest.mark.parametrize(
    ("contents", "apart"),
    [
        (("<|a|>", "<|b|>"), {"<|a|>", "<|b|>"}),
        (("<a>", "<a>b"), {"<a>b"}),
        (("<a>", "x<a"), {"x<a"}),
        (("<a>", "b<"), {"b<"}),
        (("||",), set[str]()),
        (("\n", "\n\n", " ", ""), set[str]()),
    ],
)
def test_a_token_stands_apart_unless_another_overlaps_with_its_beginning(contents: tuple[str], apart: set[str]) -> None:
    assert standing_apart(contents) == apart


@pytest.mark.parametrize(
    "made",
    [
        byte_level(token("<a>")),
        metaspace("never", token("<a>")),
        metaspace("first", token("<a>")),
    ],
    ids=["byte-level", "metaspace", "metaspace with a space before the text"],
)
def test_tokenizers_whose_texts_can_be_cut(made: PreTrainedTokenizerFast) -> None:
    assert special_tokens.read(made) == {"<a>": 0}


def prepending() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: a space before each part."""
    made = metaspace("never", token("<a>"))
    made.backend_tokenizer.normalizer = normalizers.Prepend("▁")
    return made


@pytest.mark.parametrize(
    "made",
    [
        byte_level(token("<a>"), prefix_space=True),
        metaspace("always", token("<a>")),
        prepending(),
        byte_level(),
    ],
    ids=["byte-level with a space", "metaspace with a space before each part", "Llama 2", "no special tokens"],
)
def test_tokenizers_whose_texts_cannot_be_cut(made: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Unsuitable, match=r"none of its \d+ added tokens"):
        special_tokens.read(made)


class Leaking(SimpleNamespace):
    """A tokenizer that cuts what follows a special token otherwise if something stands before it."""

    is_fast = True

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        before, special, behind = text.partition("<a>")
        pieces = [before, special, *(behind if before else [behind])]
        return {"input_ids": [i for piece in pieces for i in self.made(piece, **options)["input_ids"]]}


def test_a_tokenizer_whose_ids_depend_on_what_is_before_the_cut_is_refused() -> None:
    made = byte_level(token("<a>"))
    leaking = Leaking(made=made, added_tokens_decoder=made.added_tokens_decoder, decode=made.decode)
    assert special_tokens.decode(leaking, leaking("Hello there<a>user")["input_ids"]) == "Hello there<a>user"
    with pytest.raises(Unsuitable):
        special_tokens.read(leaking)


def test_a_tokenizer_of_another_kind_is_refused_by_its_name() -> None:
    with pytest.raises(Unsuitable, match="dict is no fast tokenizer"):
        special_tokens.read({})


def processed(template: str) -> PreTrainedTokenizerFast:
    made = byte_level(token("<s>"), token("</s>"))
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return made


def test_what_is_put_before_a_text_is_known_and_what_is_put_behind_is_refused() -> None:
    assert special_tokens.front(processed("<s> $A")) == [0]
    assert special_tokens.front(byte_level(token("<s>"))) == []
    assert special_tokens.front(processed("<s> $A </s>")) is None
