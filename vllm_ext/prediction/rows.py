"""Recorded prompts with their answers, as requests that a server would have seen: to learn from, and to judge by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_ext import datasets
from vllm_ext.datasets import Dataset, DatasetError, WorkloadRow
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt
from vllm_ext.prediction.text import Message, PromptText

AS_STATED = "tokens as the dataset states them"
"""What lengths are counted in where a row says how many tokens it had."""
UNBOUNDED = 2**31 - 1
"""Stands for no ``max_tokens``."""
TokenCounter = Callable[[str], int]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a file holds that can be learned from."""

    dataset: Dataset
    """As it was read."""
    finished: tuple[FinishedPrompt, ...]
    """In file order, a conversation's turns one after another. Without a time (0): nobody served them."""
    without_text: int
    """Rows left out because they lack the prompt's text or an answer."""
    counted_in: Mapping[str, int]
    """What output lengths are counted in -> how many."""


def read(
    path: Path,
    count: TokenCounter,
    *,
    counter: str,
    model: str,
    text: PromptText,
    format: str = "auto",
    where: Mapping[str, frozenset[str]] | None = None,
    max_rows: int | None = None,
    turns: bool = True,
    seed: int = 0,
) -> Rows:
    """Read prompts with their answers.

    Args:
        path: As of `datasets.load`, with ``format`` and ``where``.
        count: Counts the tokens of a text; a number that a row states goes first.
        counter: What it counts in.
        model: Name of the model that the answers are said to be of.
        text: How a request becomes one text; the service's.
        max_rows: A sample of so many conversations or single requests, at least 1; None for all.
        turns: Whether a conversation's later turns count, or only its first.
        seed: Of the sample.

    Raises:
        DatasetError: the file can't be read, or none of its rows has a prompt's text and an answer.
        ValueError: ``max_rows`` is below 1.
    """
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows={max_rows!r}: must be at least 1")
    dataset = datasets.load(path, format, where)
    rows = list(dataset.rows)
    if max_rows is not None and max_rows < len(rows):
        picked = np.sort(np.random.default_rng(seed).choice(len(rows), max_rows, replace=False))
        rows = [rows[at] for at in picked]
    counted: Counter[str] = Counter()
    finished: list[FinishedPrompt] = []
    without = 0
    for number, row in enumerate(rows):
        messages: list[Message] = []
        seen = 0
        for turn, each in enumerate((row, *row.later) if turns else (row,)):
            answer = _answer_tokens(each, count)
            if each.prompt is None or answer is None:
                without += 1
                break  # what follows a turn that is not known is not known either
            counted[counter if each.output_tokens is None else AS_STATED] += 1
            messages.append({"role": "user", "content": each.prompt})
            seen += count(each.prompt) if each.prompt_tokens is None else each.prompt_tokens
            said = text.of(prompt=each.prompt) if not turn else text.of(messages=messages)
            prompt = Prompt(
                said or "", UNBOUNDED, model, prompt_tokens=seen, turn=turn,
                conversation=f"{dataset.sha256[:16]}/{number}" if turns and row.later else "",
            )  # fmt: skip
            finished.append(FinishedPrompt(prompt, answer, 0.0))
            messages.append({"role": "assistant", "content": each.output_text or ""})
            seen += answer
    if not finished:
        raise DatasetError(f"{dataset.name}: no row has a prompt's text and an answer, which a predictor learns from")
    return Rows(dataset=dataset, finished=tuple(finished), without_text=without, counted_in=dict(counted))


def token_counter(tokenizer: Path) -> TokenCounter:
    """Return a counter of a tokenizer's tokens, special ones left out.

    Args:
        tokenizer: A ``tokenizer.json``, or a folder with one.

    Raises:
        ValueError: there is none, or it can't be read.
    """
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not file.is_file():
        raise ValueError(f"tokenizer={str(tokenizer)!r}: must be a tokenizer.json, or a folder with one")
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"tokenizer={str(tokenizer)!r}: {file.name} can't be read ({error})") from error
    return lambda text: len(loaded.encode(_encodable(text), add_special_tokens=False).ids)


def _answer_tokens(row: WorkloadRow, count: TokenCounter) -> int | None:
    if row.output_tokens is not None:
        return max(1, row.output_tokens)
    return max(1, count(row.output_text)) if row.output_text and row.output_text.strip() else None


def _encodable(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates, which JSON may hold and no tokenizer takes."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
