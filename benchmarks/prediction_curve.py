"""How fast does a predictor learn while it serves? A part of prediction.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from prediction_data import SOURCES, Cache, Part, with_vectors
from prediction_pairs import KEPT, Flat, flat

from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.evaluation import rows, tables
from vllm_ext.prediction.evaluation.online import Stretch, learning_curve
from vllm_ext.prediction.evaluation.rows import Examples, LocalTokenizer

LONG = "alpaca"
"""The set with enough rows for the last checkpoint; all of its rows are served here."""
LONG_ROWS = 11_000
COLD = "cold"
WARM = (("alpaca", "sharegpt"), ("gsm8k", "wildchat"), ("dolly", "alpaca_eval"))
"""Learned before, and served then."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """Requests in the order in which they arrive."""

    name: str
    """``cold>SET`` or ``LEARNED BEFORE>SET``."""
    requests: Examples
    warm: Examples | None = None


def streams(
    parts: Mapping[str, Part], folder: Path | None, encoder: Encoder, cache: Cache, *, quick: bool, seed: int
) -> list[Stream]:
    """Return a cold start on every set, and warm ones; of `LONG` all rows of its file."""
    found = []
    for name, part in parts.items():
        requests = everything(part, seed)
        if name == LONG and folder is not None and not quick:
            tokenizer = LocalTokenizer.of(encoder)
            path = folder / f"{SOURCES[name].path}.jsonl.gz"
            data = rows.read(path, tokenizer, max_rows=LONG_ROWS, seed=seed)
            requests = with_vectors(data.examples, encoder, cache, f"{name}, all rows")
        found.append(Stream(name=f"{COLD}>{name}", requests=requests))
    pairs = [pair for pair in WARM if set(pair) <= parts.keys()] or [tuple(parts)[:2]]
    for before, after in (pair for pair in pairs if len(pair) == 2):
        requests, warm = everything(parts[after], seed), everything(parts[before], seed)
        kept = rows.not_in(requests.prompts.texts, warm.prompts.texts)
        found.append(Stream(name=f"{before}>{after}", requests=requests.take(kept), warm=warm))
    return found


def everything(part: Part, seed: int) -> Examples:
    """Return both halves of a data set in random order."""
    if part.train is None:
        return part.test
    both = join(part.train, part.test)
    return both.take(np.random.default_rng([seed, 6]).permutation(len(both)))


def join(one: Examples, other: Examples) -> Examples:
    """Return the examples of one, then those of the other."""
    prompts = rows.Prompts(
        texts=one.prompts.texts + other.prompts.texts,
        tokens=np.concatenate((one.prompts.tokens, other.prompts.tokens)),
        vectors=np.concatenate((one.prompts.vectors, other.prompts.vectors)),
    )
    return Examples(prompts=prompts, lengths=np.concatenate((one.lengths, other.lengths)))


def measure(found: list[Stream], seed: int) -> dict[str, list[Stretch]]:
    """Serve every stream."""
    curves = {}
    for stream in found:
        curves[stream.name] = learning_curve(stream.requests, warm=stream.warm, seed=seed)
        print(f"learning curve: {stream.name}, {len(stream.requests)} requests", file=sys.stderr, flush=True)
    return curves


def table(curves: Mapping[str, list[Stretch]]) -> str:
    """Lay out all curves."""
    return "\n\n".join(f"served: {name}\n{tables.curve_table(stretches)}" for name, stretches in curves.items())


def metrics(curves: Mapping[str, list[Stretch]]) -> Flat:
    """Return the measures of every stretch."""
    return flat(
        (name, f"curve.{stream}.after_{stretch.served}.{tables.key(measure)}", round(scores[measure], 4))
        for stream, stretches in curves.items()
        for stretch in stretches
        for name, scores in stretch.scores.items()
        for measure in KEPT
    )


def facts(found: list[Stream]) -> dict[str, Any]:
    """Return what shaped the measurement."""
    return {"requests": {stream.name: len(stream.requests) for stream in found}}
