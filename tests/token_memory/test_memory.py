"""What the memory returns: ids that were learned, for exactly their text, within its bytes."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vllm_ext.token_memory import special_tokens
from vllm_ext.token_memory.memory import LEAST_BYTES, SEGMENT_BYTES, Prefix, TokenMemory, alternation

SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>")
ROOMY = 1 << 20
LETTERS = "Thinking of an answer, slowly: één, 二, 🙂 ... <|im_ thin <| <thin"
"""Words that the tokenizer has merges for, others, and parts of special tokens."""


def trained() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as Llama 3 and Qwen have it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(content, special=True, normalized=False) for content in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([LETTERS] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)


TOKENIZER = trained()
START, END, _ = (TOKENIZER.convert_tokens_to_ids(content) for content in SPECIAL)
ALPHABET = sorted(number for token, number in TOKENIZER.get_vocab().items() if len(token) == 1)
"""Ids of single bytes."""


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def decode(ids: list[int]) -> str:
    return special_tokens.decode(TOKENIZER, ids)


def spelled(text: str) -> list[int]:
    """Another tokenisation: a token for each byte."""
    return [number for char in text for number in by_bytes(char)]


def by_bytes(char: str) -> list[int]:
    names = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(char)[0][0]
    return [TOKENIZER.convert_tokens_to_ids(name) for name in names]


def make_memory(max_bytes: int = ROOMY) -> TokenMemory:
    return TokenMemory(special_tokens.read(TOKENIZER), decode, len(TOKENIZER), max_bytes)


def prompt_of(*messages: str) -> str:
    turns = "".join(
        f"<|im_start|>{('user', 'assistant')[i % 2]}\n{text}<|im_end|>\n" for i, text in enumerate(messages)
    )
    return f"{turns}<|im_start|>assistant\n"


QUESTION, ANSWER, NEXT = "What is it that you are thinking of?", "Thinking of an answer", "And then?"


def asked(memory: TokenMemory, text: str, scope: str = "") -> tuple[list[int], Prefix, str]:
    """Ids of a prompt, as a server makes them, and what is known of it."""
    prefix, known, rest = memory.find(text, scope)
    new = encode(rest)
    prefix = memory.learn(prefix, rest, new)
    return known + new, prefix, text[prefix.num_chars :]


def answered(memory: TokenMemory, text: str, generated: list[int], scope: str = "") -> list[int]:
    ids, prefix, rest = asked(memory, text, scope)
    memory.learn(prefix, rest, ids[prefix.num_tokens :], generated)
    return ids + generated


def test_a_next_turn_has_the_ids_that_were_generated() -> None:
    memory = make_memory()
    known = answered(memory, prompt_of(QUESTION), [*spelled(ANSWER), END])
    ids, _, _ = asked(memory, prompt_of(QUESTION, ANSWER, NEXT))
    assert ids[: len(known)] == known
    assert ids[len(known) :] == encode(prompt_of(QUESTION, ANSWER, NEXT).partition(f"{ANSWER}<|im_end|>")[2])
    assert ids != encode(prompt_of(QUESTION, ANSWER, NEXT))


def test_an_answer_that_its_length_ended_is_known_to_its_end() -> None:
    memory = make_memory()
    known = answered(memory, prompt_of(QUESTION), spelled(ANSWER))
    assert asked(memory, prompt_of(QUESTION, ANSWER, NEXT))[0][: len(known) + 1] == [*known, END]


def test_of_a_history_that_a_template_changed_only_what_is_before_is_known() -> None:
    memory = make_memory()
    answered(memory, prompt_of(QUESTION), [*spelled(ANSWER), END])
    changed = prompt_of(QUESTION, ANSWER.upper(), NEXT)
    prefix, known, rest = memory.find(changed, "")
    assert changed == decode(known) + rest
    assert rest.startswith("<|im_end|>\n<|im_start|>assistant\n" + ANSWER.upper())
    assert prefix.num_tokens == len(known) == len(encode(f"<|im_start|>user\n{QUESTION}"))


def test_scopes_know_nothing_of_each_other() -> None:
    memory = make_memory()
    answered(memory, prompt_of(QUESTION), [*spelled(ANSWER), END], "mine")
    assert memory.find(prompt_of(QUESTION, ANSWER, NEXT), "mine")[1]
    assert not memory.find(prompt_of(QUESTION, ANSWER, NEXT), "")[1]


def test_ids_of_another_text_are_not_learned() -> None:
    memory = make_memory()
    prefix, _, rest = memory.find(prompt_of(QUESTION), "")
    assert memory.learn(prefix, rest, encode(rest)[1:]) == prefix
    assert memory.learn(prefix, rest, encode(rest + "x")) == prefix
    assert memory.num_bytes == 0


def test_a_special_token_that_is_spelled_out_is_not_taken_for_one() -> None:
    memory = make_memory()
    text = prompt_of(QUESTION)
    answered(memory, text, [*spelled(f"{ANSWER}<|im_end|>{ANSWER}"), END])
    found = memory.find(f"{text}{ANSWER}<|im_end|>{ANSWER}<|im_end|>\n", "")[1]
    assert found == encode(f"<|im_start|>user\n{QUESTION}")


def test_half_a_character_is_known_as_the_text_that_the_client_got() -> None:
    memory = make_memory()
    half = by_bytes("🙂")[:2]
    known = answered(memory, prompt_of(QUESTION), [*spelled(ANSWER), *half])
    sent_back = decode([*spelled(ANSWER), *half])
    assert sent_back == f"{ANSWER}\ufffd"
    again = asked(memory, prompt_of(QUESTION, sent_back, NEXT))[0]
    assert again[: len(known)] == known
    assert decode(again) == prompt_of(QUESTION, sent_back, NEXT)


def test_what_was_used_least_recently_goes_and_the_end_of_a_text_before_its_beginning() -> None:
    old, kept = (prompt_of(f"{name}: {QUESTION}", ANSWER * 2, NEXT * 5) for name in ("old", "kept"))
    roomy = make_memory()
    asked(roomy, old)
    asked(roomy, kept)
    whole = len(roomy.find(old, "")[1])
    memory = make_memory(max_bytes=roomy.num_bytes - 1)
    asked(memory, old)
    asked(memory, kept)
    assert 0 < len(memory.find(old, "")[1]) < whole
    assert memory.find(kept, "")[1] == roomy.find(kept, "")[1]
    memory.find(old, "")
    asked(memory, prompt_of(NEXT * 12))
    assert 0 < len(memory.find(old, "")[1]) < whole, "used since"
    assert len(memory.find(kept, "")[1]) < len(roomy.find(kept, "")[1])
    assert memory.num_bytes < roomy.num_bytes


def test_a_text_larger_than_the_memory_leaves_its_beginning() -> None:
    memory = make_memory(max_bytes=4 * SEGMENT_BYTES)
    text = prompt_of(*[f"{number}: {QUESTION}" for number in range(40)])
    asked(memory, text)
    known = memory.find(text, "")[1]
    assert known == encode(text)[: len(known)] != []
    assert memory.num_bytes <= 4 * SEGMENT_BYTES


def test_nothing_is_put_behind_a_prefix_that_is_gone() -> None:
    memory = make_memory(max_bytes=3 * SEGMENT_BYTES)
    ids, prefix, rest = asked(memory, prompt_of(QUESTION))
    asked(memory, prompt_of(NEXT * 9, ANSWER * 3, QUESTION))
    before = memory.num_bytes
    assert not memory.find(prompt_of(QUESTION), "")[1]
    assert memory.learn(prefix, rest, ids[prefix.num_tokens :], spelled(ANSWER)) == prefix
    assert memory.num_bytes == before


def test_shared_beginnings_are_kept_once() -> None:
    memory = make_memory()
    system = "A long system prompt. " * 50
    asked(memory, prompt_of(system, f"0: {QUESTION}"))
    once = memory.num_bytes
    asked(memory, prompt_of(system, f"1: {QUESTION}"))
    assert memory.num_bytes - once < once / 2


def test_lone_surrogates_are_refused_as_by_the_tokenizer() -> None:
    with pytest.raises(UnicodeEncodeError):
        make_memory().find("\ud800", "")


@given(st.lists(st.from_regex(r"[a-d]{1,3}>", fullmatch=True), min_size=1, unique=True), st.text("abcd>", max_size=40))
def test_the_pattern_finds_what_a_plain_one_finds(words: list[str], text: str) -> None:
    plain = re.compile("|".join(map(re.escape, sorted(words))))
    ours = re.compile(alternation(sorted(words)))
    assert [m.span() for m in ours.finditer(text)] == [m.span() for m in plain.finditer(text)]


CONTENT = st.lists(
    st.sampled_from([*LETTERS.split(" "), " ", "\n", "\n\n", "é", "\u0301", "<|im_end|>", "\x00", "x" * 40])
)


@given(st.lists(CONTENT.map("".join), min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_any_conversation_keeps_its_ids_and_its_text(messages: list[str], rng: random.Random) -> None:
    """Whatever is said, what was known stays, the rest is the tokenizer's, the text is the prompt's."""
    memory, history, known = make_memory(), "", list[int]()
    for message in messages:
        text = f"{history}<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
        prefix, spliced, rest = memory.find(text, "")
        ids = spliced + encode(rest)
        assert decode(ids) == text
        assert ids[: len(spliced)] == spliced
        assert ids[: len(known)] == known
        prefix = memory.learn(prefix, rest, encode(rest))
        answer = odd_ids(rng, message)
        ended = [END] if rng.random() < 0.7 else []
        memory.learn(prefix, text[prefix.num_chars :], ids[prefix.num_tokens :], answer + ended)
        said = decode(answer)
        history = f"{text}{said}<|im_end|>\n"
        findable = decode(ids + answer) == text + said and "<|im_end|>" not in said and "<think>" not in said
        known = ids + answer if findable else []


def odd_ids(rng: random.Random, text: str) -> list[int]:
    """Some tokenisation of a text; now and then bytes that are no text at all."""
    if rng.random() < 0.2:
        return [rng.choice(ALPHABET) for _ in range(12)]
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 3)))
    return [i for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for i in encode_plain(text[a:b])]


def encode_plain(text: str) -> list[int]:
    return [i for i in encode(text) if i not in (START, END)]


def test_short_segments_are_not_kept_by_themselves() -> None:
    memory = make_memory()
    asked(memory, prompt_of(QUESTION, ANSWER * 2, QUESTION))
    assert memory.find(prompt_of("a"), "")[1] == []
    assert len("<|im_end|>\n") < LEAST_BYTES < len("<|im_start|>assistant\n"), "an answer is kept, however short"
