"""Start a predictor from recorded prompts and answers: read, count, embed, fill a store, train, write.

What the service would have learned had it served the rows of a dataset: the same text of a prompt, the same encoder,
the same store, the same training. Entries get no time (0), since nobody served them: a merge puts them first.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_ext import datasets
from vllm_ext.datasets import Dataset, DatasetError, WorkloadRow
from vllm_ext.prediction import decoder_file, store_files
from vllm_ext.prediction.decoder import Decoder
from vllm_ext.prediction.folder import DECODER, STORE
from vllm_ext.prediction.prompt_text import PromptText
from vllm_ext.prediction.store_rows import Entries
from vllm_ext.prediction.vector_store import VectorStore

OF_DATASET = "tokens as the dataset states them"
"""What lengths are counted in where a row says how many tokens it had."""
OF_ENCODER = "word pieces of the encoder"
"""What they are counted in where nobody names the served model's tokenizer."""
_TEXTS_AT_ONCE = 64
Floats = npt.NDArray[np.float32]
Lengths = npt.NDArray[np.int64]
TokenCounter = Callable[[str], int]


class TextEncoder(Protocol):
    """What is needed of `encoder.Encoder`."""

    dim: int

    def encode(self, texts: Sequence[str]) -> Floats:
        """Return unit vectors, [len(texts), dim]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a dataset that can be learned from."""

    dataset: Dataset
    """As it was read."""
    rows: tuple[WorkloadRow, ...]
    """Those with a prompt's text, or a sample of them, in file order."""
    without_text: int
    """Rows that state only how long their prompt was."""


def read_rows(
    path: Path,
    *,
    format: str = "auto",
    where: Mapping[str, frozenset[str]] | None = None,
    max_rows: int | None = None,
    seed: int = 0,
) -> Rows:
    """Read prompts with their answers.

    Args:
        path: As of `datasets.load`, with ``format`` and ``where``.
        max_rows: Take a sample of so many rows, at least 1; None for all.
        seed: Of the sample.

    Raises:
        ValueError: ``max_rows`` is below 1.
        DatasetError: the file can't be read, or none of its rows has a prompt's text.
    """
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows={max_rows!r}: must be at least 1")
    dataset = datasets.load(path, format, where)
    rows = [row for row in dataset.rows if row.prompt is not None]
    if not rows:
        raise DatasetError(
            f"{dataset.name}: the {dataset.format} format gives lengths only; a predictor learns from texts of prompts"
        )
    without_text = len(dataset.rows) - len(rows)
    if max_rows is not None and max_rows < len(rows):
        picked = np.sort(np.random.default_rng(seed).choice(len(rows), max_rows, replace=False))
        rows = [rows[index] for index in picked]
    return Rows(dataset=dataset, rows=tuple(rows), without_text=without_text)


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


def _encodable(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates, which JSON may hold and no tokenizer takes."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def lengths_of(rows: Sequence[WorkloadRow], count: TokenCounter, name: str) -> tuple[Lengths, dict[str, int]]:
    """Return output lengths in tokens, at least 1, [n], and how many of them are counted in what.

    Args:
        rows: n rows; a stated number of tokens goes before a text.
        count: Counts the tokens of a text.
        name: What it counts.
    """
    lengths = np.empty(len(rows), np.int64)
    counted = Counter[str]()
    for index, row in enumerate(rows):
        stated = row.output_tokens
        lengths[index] = max(1, count(row.output_text or "") if stated is None else stated)
        counted[name if stated is None else OF_DATASET] += 1
    return lengths, dict(counted)


def prompt_tokens_of(rows: Sequence[WorkloadRow], count: TokenCounter) -> Lengths:
    """Return the lengths of the rows' prompts in tokens, [n]: as a row states it, else counted."""
    stated = (row.prompt_tokens for row in rows)
    return np.array(
        [count(row.prompt or "") if n is None else n for row, n in zip(rows, stated, strict=True)], np.int64
    )


def texts_of(rows: Sequence[WorkloadRow], prompt_text: PromptText) -> list[str]:
    """Return the text that stands for each row's prompt, as the service makes it from a completion prompt."""
    return [prompt_text.from_rendered(row.prompt or "") for row in rows]


def embed(encoder: TextEncoder, texts: Sequence[str], on_done: Callable[[int], None] | None = None) -> Floats:
    """Embed texts, each different one once, so that equal texts have equal vectors; [len(texts), dim].

    Args:
        encoder: The encoder.
        texts: n texts.
        on_done: Told how many texts are done, equal ones included. What it raises is passed on.
    """
    copies = Counter(texts)
    vectors = np.empty((len(copies), encoder.dim), np.float32)
    # Texts of like length share a batch, so that little is padded; the longest first, so that no one waits in vain.
    longest_first = sorted(copies, key=lambda text: (-len(text), text))
    place = {text: index for index, text in enumerate(longest_first)}
    done = 0
    for start in range(0, len(longest_first), _TEXTS_AT_ONCE):
        some = longest_first[start : start + _TEXTS_AT_ONCE]
        vectors[start : start + len(some)] = encoder.encode(some)
        done += sum(copies[text] for text in some)
        if on_done is not None:
            on_done(done)
    return vectors[[place[text] for text in texts]]


def filled(
    before: Entries | None,
    added: Entries,
    *,
    encoder: str,
    capacity: int,
    keep_prompts: bool,
    seed: int = 0,
) -> VectorStore:
    """Return a store of the entries that were there and those that come after them.

    Args:
        before: Entries of an older store of the same encoder; None for a new one.
        added: What is learned now.
        encoder: `Encoder.name`.
        capacity: Entries kept, at most; ageing chooses.
        keep_prompts: Keep the texts that ``before`` and ``added`` have.
        seed: Of the index.

    Raises:
        ValueError: ``capacity`` is below 1, or the two differ in width.
    """
    parts = [part for part in (before, added) if part is not None]
    fits = sum(map(len, parts)) <= capacity
    store = VectorStore(
        added.vectors.shape[1],
        capacity=capacity,
        # A store that ages searches for what is redundant; one that doesn't is only written, and needs no index.
        index="flat" if fits else "auto",
        seed=seed,
        encoder=encoder,
        keep_prompts=keep_prompts,
    )
    for part in parts:
        store.add(
            part.vectors,
            part.lengths,
            part.models,
            part.times_s,
            prompts=part.prompts,
            prompt_tokens=part.prompt_tokens,
        )
    return store


def commit(folder: Path, store: VectorStore, decoder: Decoder | None, *, keep_decoder: bool, max_bytes: int) -> int:
    """Write store and decoder into a folder; each is replaced whole.

    If the decoder can't be written, the new store is there with the old decoder. Call it within `uninterrupted`.

    Args:
        folder: The predictor's folder; made if it is not there.
        store: What was learned.
        decoder: Trained from it; None if there is none worth keeping.
        keep_decoder: Without a decoder, whether the one that is there stays.
        max_bytes: As of `store_files.save`.

    Returns:
        Entries written.

    Raises:
        OSError: something can't be written.
        ValueError: as of `store_files.save`.
    """
    written = store_files.save(store, folder / STORE, max_bytes=max_bytes)
    if decoder is not None:
        decoder_file.save(decoder, folder / DECODER)
    elif not keep_decoder:
        (folder / DECODER).unlink(missing_ok=True)
    return written


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C for the moment that two files take. Only the main thread may say so; others never see it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
