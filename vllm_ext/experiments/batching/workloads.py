"""Sentences, pairs of sentences and parse trees: made up here, or read from the public data sets.

What is made up follows what the paper says of its data: WMT-15 Europarl has sentences of 24 words on average, 99 %
below 100, at most 330 (section 2.7.1, figure 2.10); Stanford TreeBank has binary trees of some 19 leaves.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext.report.results import Workload

LONGEST = 330
_SIGMA, _MEAN = 0.72, 24.0
_RATIO_SIGMA = 0.2
_LEAVES_MEAN, _LEAVES_SIGMA, _MOST_LEAVES = 19.0, 0.5, 52
Tree = Any
"""A word, or a list of two trees."""


class DataError(ValueError):
    """A data file that cannot be read; the message names file, line and what was expected."""


@dataclass(frozen=True)
class Data:
    """Requests of one kind, in the order in which they are drawn."""

    name: str
    rows: Sequence[Any]

    @cached_property
    def workload(self) -> Workload:
        """Name, number and checksum."""
        text = json.dumps(self.rows).encode()
        return Workload(name=self.name, rows=len(self.rows), sha256=hashlib.sha256(text).hexdigest())


def pairs(count: int, seed: int) -> Data:
    """Return made-up lengths of sentences and of their translations."""
    rng = np.random.default_rng(seed)
    source = rng.lognormal(np.log(_MEAN) - _SIGMA**2 / 2, _SIGMA, count)
    target = source * rng.lognormal(0.0, _RATIO_SIGMA, count)
    lengths = np.clip(np.rint(np.stack((source, target), 1)), 1, LONGEST).astype(int)
    return Data(f"made-up sentence pairs, mean {_MEAN:.0f}", lengths.tolist())


def clipped(data: Data, longest: int) -> Data:
    """Return the pairs whose sentences have at most so many words."""
    return Data(f"{data.name}, at most {longest}", [pair for pair in data.rows if max(pair) <= longest])


def trees(count: int, seed: int) -> Data:
    """Return made-up trees; a phrase is cut near one of its ends, as right- and left-branching syntax has it."""
    rng = np.random.default_rng(seed)
    draws = rng.lognormal(np.log(_LEAVES_MEAN) - _LEAVES_SIGMA**2 / 2, _LEAVES_SIGMA, count)
    leaves = np.clip(np.rint(draws), 2, _MOST_LEAVES).astype(int)
    return Data("made-up trees", [_grown(int(number), rng) for number in leaves])


def complete(leaves: int) -> Tree:
    """Return the complete tree of so many leaves, a power of two."""
    return 0 if leaves == 1 else [complete(leaves // 2), complete(leaves // 2)]


def read_pairs(path: Path) -> Data:
    """Read tab-separated pairs of sentences with a header line, gzipped or not, as of WMT.

    Raises:
        DataError: a line has not two sentences with words.
    """
    found = []
    for number, line in _lines(path):
        if number == 1:
            continue
        sentences = [len(sentence.split()) for sentence in line.rstrip("\n").split("\t")]
        if len(sentences) != 2:
            raise DataError(f"{path.name}, line {number}: {len(sentences)} fields, must be two sentences and a tab")
        if min(sentences) > 0:
            found.append(sentences)
    return _some(path, found)


def read_trees(path: Path) -> Data:
    """Read binary trees in Penn TreeBank brackets, a line each, gzipped or not, as of SST; words become numbers.

    Raises:
        DataError: a line is no binary tree.
    """
    words: dict[str, int] = {}
    return _some(path, [_parsed(line, f"{path.name}, line {number}", words) for number, line in _lines(path)])


def _grown(leaves: int, rng: np.random.Generator) -> Tree:
    if leaves == 1:
        return int(rng.integers(1 << 14))
    cut = min(int(rng.geometric(0.35)), leaves - 1)
    if rng.random() < 0.3:
        cut = leaves - cut
    return [_grown(cut, rng), _grown(leaves - cut, rng)]


def _parsed(line: str, where: str, words: dict[str, int]) -> Tree:
    """Return the tree of a line such as ``(3 (2 a) (2 (1 bad) (3 film)))``; labels are left out."""
    stack: list[list[Any]] = [[]]
    parts = iter(line.replace("(", " ( ").replace(")", " ) ").split())
    for part in parts:
        if part == "(":
            next(parts, None)
            stack.append([])
        elif part == ")" and len(stack) > 1:
            done = stack.pop()
            if len(done) not in (1, 2):
                raise DataError(f"{where}: a node with {len(done)} parts, must be a word or two trees")
            stack[-1].append(done[0] if len(done) == 1 else done)
        else:
            stack[-1].append(words.setdefault(part, len(words)))
    if len(stack) != 1 or len(stack[0]) != 1:
        raise DataError(f"{where}: must be one tree in brackets")
    return stack[0][0]


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path.name}: cannot be read: {error}") from error


def _some(path: Path, found: list[Any]) -> Data:
    if not found:
        raise DataError(f"{path.name}: holds nothing")
    return Data(path.name, found)
