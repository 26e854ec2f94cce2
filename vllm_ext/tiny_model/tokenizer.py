"""A byte-level BPE tokenizer of which every ordinary token is printable ASCII.

A random model emits every token of its vocabulary. A lone byte of a UTF-8 sequence decodes to the empty string
until its neighbours arrive, so a server would stream no chunk for it and clients would measure wrong gaps between
tokens. Here the vocabulary holds no byte above 0x7e; other characters become "?" before tokenization.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from vllm_ext.tiny_model.corpus import training_text

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
"""Beginning, end and padding; their ids are their places here."""

BOS_ID, EOS_ID, PAD_ID = range(len(SPECIAL_TOKENS))

MAX_VOCAB_SIZE = 2048
"""Tokens asked for; the model's vocabulary is exactly as large as what training returns."""

_PRINTABLE = "\n\t" + "".join(chr(code) for code in range(0x20, 0x7F))

_CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def train() -> Tokenizer:
    """Train the tokenizer on the package's own text; the result is the same on every call."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.Replace(Regex(r"\p{Mn}"), ""), normalizers.Replace(Regex(r"[^\n\t -~]"), "?")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=_byte_level_alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` for Hugging Face's fast tokenizer into `directory`."""
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    bos, eos, pad = SPECIAL_TOKENS
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _byte_level_alphabet() -> list[str]:
    """Return the stand-ins that byte-level BPE uses for the printable ASCII characters, newline and tab."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [splitter.pre_tokenize_str(char)[0][0] for char in _PRINTABLE]
