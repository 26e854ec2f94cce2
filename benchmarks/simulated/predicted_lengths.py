"""Files of requests with what the shipped predictor said of them beforehand. A part of tuning.py.

Half of a file's conversations, drawn at random, are learned; of the others' first turns the lengths are predicted. The
second file has the predictions of the first one shuffled: each is another request's.

    python benchmarks/simulated/predicted_lengths.py multi_turn/sharegpt.jsonl.gz --data DIR --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext.config.prediction import PredictorConfig
from vllm_ext.contract.length_distribution import LengthDistribution
from vllm_ext.files import replaced
from vllm_ext.prediction import evaluate
from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.learned import LearnedPredictor
from vllm_ext.prediction.rows import Rows, read
from vllm_ext.prediction.text import PromptText

MOST = 12_000
"""Rows of a file that are read, half of which are learned."""
_AT_ONCE = 64


def make(path: Path, folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write both files, unless they are there; returns their paths.

    Args:
        path: Prompts with their answers.
        folder: Where the files go.
        seed: Of the halves and of the shuffle.
    """
    stem = path.name.split(".")[0]
    own, others = (folder / f"{stem}-{kind}-{seed}.jsonl" for kind in ("predicted", "anothers"))
    if not (own.exists() and others.exists()):
        encoder = Encoder(max_tokens=128)
        rows = read(
            path, encoder.count_tokens, counter="word pieces", model="m", text=PromptText(max_tokens=128),
            where=None, max_rows=MOST, turns=False, seed=seed,
        )  # fmt: skip
        distributions, asked = _predicted(rows, encoder, seed)
        lengths = [(prompt, tokens) for prompt, tokens in asked]
        shuffled = [distributions[at] for at in np.random.default_rng(seed).permutation(len(distributions))]
        _write(own, lengths, distributions)
        _write(others, lengths, shuffled)
    return own, others


def _predicted(rows: Rows, encoder: Encoder, seed: int) -> tuple[list[LengthDistribution], list[tuple[int, int]]]:
    learned, tested = evaluate.split(rows.finished, 0.5, seed)
    distributions: list[LengthDistribution] = []
    with tempfile.TemporaryDirectory(prefix="tuning-") as place:
        predictor = LearnedPredictor(PredictorConfig(batch_size=512, seed=seed), Path(place), encoder)
        evaluate.learn(predictor, learned)
        predictor.fit()
        for start in range(0, len(tested), _AT_ONCE):
            found = predictor.predict([done.prompt for done in tested[start : start + _AT_ONCE]])
            distributions += [LengthDistribution.point(1) if one is None else one.distribution for one in found]
        predictor.close()
    return distributions, [(done.prompt.prompt_tokens, done.tokens) for done in tested]


def _write(path: Path, lengths: Sequence[tuple[int, int]], distributions: Sequence[LengthDistribution]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        for (prompt, output), distribution in zip(lengths, distributions, strict=True):
            row: dict[str, Any] = {
                "prompt_tokens": max(1, prompt), "output_tokens": output, "output_quantiles": distribution.quantiles(),
            }  # fmt: skip
            file.write((json.dumps(row) + "\n").encode())


def main(argv: Sequence[str]) -> None:
    """Make the files of one source."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", help="file of prompts with answers, below --data")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(argv)
    for path in make(args.data / args.source, args.out):
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
