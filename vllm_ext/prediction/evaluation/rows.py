"""Prompts with the output lengths they had: read, counted in tokens of a stated tokenizer, sampled, kept apart.

Two prompts are the same if they are equal after case and blanks are normalised. Within a file the first of them stays;
between what is learned from and what is tested on, the tested one goes. Both are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_ext import datasets
from vllm_ext.datasets import DatasetError
from vllm_ext.prediction.encoder import Encoder

Ints = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]

RECORDED = "as recorded"
"""Stands for the tokenizer of lengths that a file states itself."""


class EvaluationError(ValueError):
    """What was asked for cannot be compared; the message says why and what would do."""


class Tokenizer(Protocol):
    """Counts the tokens of texts."""

    @property
    def name(self) -> str:
        """What lengths are said to be counted in."""
        ...

    def count(self, text: str) -> int:
        """Return the number of tokens, without special ones."""
        ...


@dataclass(frozen=True)
class LocalTokenizer:
    """A Hugging Face tokenizer of a local folder with a ``tokenizer.json``."""

    name: str
    count: Callable[[str], int]

    @classmethod
    def of(cls, encoder: Encoder) -> LocalTokenizer:
        """Return an encoder's own, under the encoder's name."""
        return cls(encoder.name.partition(":")[0], encoder.count_tokens)

    @classmethod
    def load(cls, folder: Path) -> LocalTokenizer:
        """Read it.

        Raises:
            EvaluationError: there is none that can be read.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise EvaluationError(f"tokenizer={folder.name!r}: must be a folder with a tokenizer.json")
        from tokenizers import Tokenizer as Library

        try:
            loaded = Library.from_file(str(file))
        except Exception as error:
            raise EvaluationError(f"tokenizer={folder.name!r}: its tokenizer.json cannot be read ({error})") from error
        return cls(folder.resolve().name, lambda text: len(loaded.encode(text, add_special_tokens=False).ids))


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompts:
    """What a predictor may know of n requests before they run."""

    texts: tuple[str, ...]
    tokens: Ints
    """[n], prompt lengths."""
    vectors: Vectors
    """[n, dim], L2-normalised embeddings; [n, 0] where nobody embedded them."""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, picked: npt.NDArray[np.intp]) -> Prompts:
        """Return the picked ones in the order of ``picked``."""
        return Prompts(
            texts=tuple(self.texts[i] for i in picked), tokens=self.tokens[picked], vectors=self.vectors[picked]
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """Prompts and the true output lengths, which only training and measures may read."""

    prompts: Prompts
    lengths: Ints
    """[n], output tokens, at least 1."""

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, picked: npt.NDArray[np.intp]) -> Examples:
        """Return the picked ones in the order of ``picked``."""
        return Examples(prompts=self.prompts.take(picked), lengths=self.lengths[picked])


@dataclass(frozen=True, kw_only=True, eq=False)
class DataSet:
    """The rows of one file, with their provenance."""

    name: str
    sha256: str
    """Of the stored file."""
    tokenizer: str
    """What lengths are counted in."""
    rows: int
    """Usable rows of the file, before repeated prompts were left out and a sample was drawn."""
    repeated: int
    """Rows left out because an earlier one has the same prompt."""
    examples: Examples

    def __len__(self) -> int:
        return len(self.examples)


def read(
    path: Path,
    tokenizer: Tokenizer,
    *,
    format: str = "auto",
    where: Mapping[str, frozenset[str]] | None = None,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    keep_repeated: bool = False,
    seed: int = 0,
) -> DataSet:
    """Read a file of prompts with answers or with their lengths; nothing is embedded yet.

    Args:
        path: In a format of `vllm_ext.datasets` that has prompts; of conversations the first turn is taken.
        tokenizer: Counts texts; of rows that state ``output_tokens`` or ``prompt_tokens`` these are taken as they are.
        format: One of `datasets.FORMATS`.
        where: Keep rows whose field is, or is a list containing, one of the values.
        max_rows: At most so many, drawn at random; None for all.
        max_tokens: Longer outputs are cut to this, as a server with that bound would; None: none is.
        keep_repeated: Keep rows whose prompt occurred before, as real traffic has them.
        seed: Of the draw, which also is the order of the rows returned.

    Raises:
        DatasetError: the file can't be read, is malformed, or has no usable row.
        EvaluationError: it has no prompts, or no output lengths.
    """
    found = datasets.load(path, format, where)
    texts: list[str] = []
    asked: list[str | int] = []
    answers: list[str | int] = []
    for row in found.rows:
        answer = row.output_tokens if row.output_tokens is not None else row.output_text
        if row.prompt is None or answer is None:
            missing = "text of the prompt" if row.prompt is None else "output"
            raise EvaluationError(f"{found.name}: {row.source_id}: has no {missing}, which a predictor learns from")
        if isinstance(answer, str) and not answer.strip():
            continue
        texts.append(row.prompt)
        asked.append(row.prompt if row.prompt_tokens is None else row.prompt_tokens)
        answers.append(answer)
    if not texts:
        raise DatasetError(f"{found.name}: no row has an answer that is not empty")
    kept = list(range(len(texts))) if keep_repeated else first_of_each(texts)
    drawn = np.random.default_rng(seed).permutation(len(kept))[:max_rows]
    picked = [kept[i] for i in drawn]
    lengths = np.array([_tokens(answers[i], tokenizer) for i in picked], dtype=np.int64)
    units = sorted({tokenizer.name if isinstance(answers[i], str) else RECORDED for i in picked})
    return DataSet(
        name=found.name,
        sha256=found.sha256,
        tokenizer=" and ".join(units),
        rows=len(texts),
        repeated=len(texts) - len(kept),
        examples=Examples(
            prompts=Prompts(
                texts=tuple(texts[i] for i in picked),
                tokens=np.array([_tokens(asked[i], tokenizer) for i in picked], dtype=np.int64),
                vectors=np.zeros((len(picked), 0), dtype=np.float32),
            ),
            lengths=np.clip(lengths, 1, max_tokens),
        ),
    )


def normalised(prompt: str) -> str:
    """Return what two prompts share that count as the same: lower case, single blanks."""
    return " ".join(prompt.lower().split())


def first_of_each(texts: Sequence[str]) -> list[int]:
    """Return the positions of texts that no earlier one equals after normalisation."""
    seen: dict[str, int] = {}
    for position, text in enumerate(texts):
        seen.setdefault(normalised(text), position)
    return list(seen.values())


def not_in(tested: Sequence[str], learned: Sequence[str]) -> npt.NDArray[np.intp]:
    """Return the positions of tested prompts that were not learned from."""
    known = {normalised(text) for text in learned}
    return np.array([i for i, text in enumerate(tested) if normalised(text) not in known], dtype=np.intp)


def split(count: int, test_share: float, seed: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Divide so many rows at random into those to learn from and those to test on, at least one each.

    Raises:
        EvaluationError: fewer than two rows, or a share that is not between 0 and 1.
    """
    if not 0 < test_share < 1:
        raise EvaluationError(f"test_share={test_share!r}: must be above 0 and below 1")
    if count < 2:
        raise EvaluationError(f"{count} rows: at least 2 are needed to learn from some and test on others")
    order = np.random.default_rng([seed, 1]).permutation(count)
    tested = min(max(1, round(test_share * count)), count - 1)
    return np.sort(order[tested:]), np.sort(order[:tested])


def _tokens(said: str | int, tokenizer: Tokenizer) -> int:
    return said if isinstance(said, int) else max(1, tokenizer.count(said))
