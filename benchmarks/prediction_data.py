"""Data sets of the comparison of length predictors, with their embeddings. A part of prediction.py.

Alpaca, ShareGPT and Dolly were used to choose defaults; every decision is judged on the others.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.evaluation import rows
from vllm_ext.prediction.evaluation.compare import embedded
from vllm_ext.prediction.evaluation.rows import DataSet, Examples, LocalTokenizer

TEST_SHARE = 0.3
LEAST_TO_LEARN = 400
"""Distinct prompts; smaller sets are only tested on, with all their rows."""
ALPACA = {"src": frozenset({"random9k", "subset5k"})}
"""Alpaca's uniform samples; its other rows were chosen for their quality."""

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of the shared data."""

    path: str
    tuned: bool = False
    """Whether defaults were chosen on it."""
    where: Mapping[str, frozenset[str]] = field(default_factory=dict)


SOURCES: dict[str, Source] = {
    "alpaca": Source(path="single_turn/alpaca", tuned=True, where=ALPACA),
    "sharegpt": Source(path="multi_turn/sharegpt", tuned=True),
    "dolly": Source(path="single_turn/dolly_3k", tuned=True),
    "wildchat": Source(path="single_turn/wildchat_first1445"),
    "gsm8k": Source(path="single_turn/gsm8k"),
    "halueval": Source(path="single_turn/halueval_chatgpt"),
    "alpaca_eval": Source(path="single_turn/alpaca_eval_outputs", where={"model": frozenset({"gpt4_1106_preview"})}),
    "oasst1": Source(path="multi_turn/oasst1_en"),
    "codealpaca": Source(path="single_turn/codealpaca_2k"),
    "mtbench101": Source(path="multi_turn/mtbench101"),
    "smile_zh": Source(path="multi_turn/smile_zh"),
}
PAIRS = ("alpaca", "sharegpt", "dolly", "wildchat", "gsm8k", "halueval", "alpaca_eval", "oasst1")
"""Every pair of these; the others of `SOURCES` can be named."""
QUICK = ("alpaca", "dolly")
MADE_UP = ("recipes", "tickets")
"""What is measured where no folder of data is given."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One data set, embedded and split."""

    name: str
    data: DataSet
    train: Examples | None
    """None where it has too few rows to learn from."""
    test: Examples

    @property
    def tuned(self) -> bool:
        """Whether defaults were chosen on it."""
        return self.name in SOURCES and SOURCES[self.name].tuned


class Cache:
    """Arrays that take long to compute, by what they were computed from; kept in a folder if one is given."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: Mapping[str, Any], make: Callable[[], Arrays]) -> Arrays:
        """Return what was kept under the key, or make and keep it."""
        if self._folder is None:
            return make()
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        path = self._folder / f"{digest}.npz"
        if path.is_file():
            with np.load(path, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
        made = make()
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, **made)  # type: ignore[arg-type]  # its stub takes the names for options
        temporary.replace(path)
        return made


def load(name: str, folder: Path | None, encoder: Encoder, cache: Cache, *, max_rows: int | None, seed: int) -> Part:
    """Read, embed and split a data set; of made-up ones there is no file.

    Raises:
        DatasetError: its file is missing or malformed.
    """
    tokenizer = LocalTokenizer.of(encoder)
    if folder is None:
        data = made_up(name, max_rows or 200, tokenizer, seed)
    else:
        source = SOURCES[name]
        path = folder / f"{source.path}.jsonl.gz"
        data = rows.read(path, tokenizer, where=source.where, max_rows=max_rows, seed=seed)
    examples = with_vectors(data.examples, encoder, cache, name)
    few = folder is not None and len(examples) < LEAST_TO_LEARN and (max_rows is None or max_rows >= LEAST_TO_LEARN)
    if few:
        return Part(name=name, data=data, train=None, test=examples)
    learned, tested = rows.split(len(examples), TEST_SHARE, seed)
    return Part(name=name, data=data, train=examples.take(learned), test=examples.take(tested))


def with_vectors(examples: Examples, encoder: Encoder, cache: Cache, name: str) -> Examples:
    """Embed, or take the embeddings from the cache."""
    key = {"encoder": encoder.name, "precision": encoder.precision, "texts": digest(examples.prompts.texts)}

    def embed() -> Arrays:
        started = time.perf_counter()
        found = embedded(examples, encoder).prompts.vectors
        print(f"{name}: {len(found)} prompts embedded in {time.perf_counter() - started:.0f} s", file=sys.stderr)
        return {"vectors": found}

    vectors = cache.get(key, embed)["vectors"]
    return Examples(prompts=replace(examples.prompts, vectors=vectors), lengths=examples.lengths)


def digest(texts: Sequence[str]) -> str:
    """Return a checksum of texts in order."""
    total = hashlib.sha256()
    for text in texts:
        total.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    return total.hexdigest()


def made_up(name: str, count: int, tokenizer: LocalTokenizer, seed: int) -> DataSet:
    """Make up requests whose kind and number say how long the answer is; each kind's lengths are log-normal."""
    kinds = {
        "recipes": {"Name a drink with": 6, "Give a short recipe for": 60, "Plan a week of meals with": 300},
        "tickets": {"Is this a bug or a wish:": 4, "Answer this ticket about": 90, "Write a guide on": 250},
    }[name]
    words = ("apples", "bread", "login", "printer", "rice", "invoice", "cheese", "network", "soup", "screen")
    rng = np.random.default_rng([seed, len(name)])
    texts, lengths = [], []
    for number in range(count):
        kind = str(rng.choice(list(kinds)))
        some = " and ".join(rng.choice(words, size=int(rng.integers(1, 5)), replace=False))
        texts.append(f"{kind} {some}, number {number}")
        lengths.append(max(1, round(kinds[kind] * float(np.exp(0.4 * rng.standard_normal())))))
    prompts = rows.Prompts(
        texts=tuple(texts),
        tokens=np.array([tokenizer.count(text) for text in texts], dtype=np.int64),
        vectors=np.zeros((count, 0), dtype=np.float32),
    )
    examples = Examples(prompts=prompts, lengths=np.array(lengths, dtype=np.int64))
    return DataSet(
        name=f"made up: {name}", sha256=digest(texts), tokenizer=tokenizer.name, rows=count, repeated=0,
        examples=examples,
    )  # fmt: skip
