"""What does a predicted output length cost: time per question, per search, per finished request, and memory?

Method: one process, as the predictor's is: the default encoder on one thread, a store of made-up unit vectors around
some centres, and questions of so many words that were never asked. Each part is timed alone, in wall-clock time; memory
is the process's resident set when all of it is loaded.

Output: milliseconds of a question alone and in a batch of 16, of a search among all entries and its recall, of a commit
of 16 finished requests, seconds of loading the store and of fitting the regression; MiB in memory and on disk; goals.

    python benchmarks/prediction/prediction_cost.py --quick
    python benchmarks/prediction/prediction_cost.py --out benchmarks/results/prediction_cost.json
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from vllm_ext.config.prediction import PredictorConfig
from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.folder import STORE
from vllm_ext.prediction.learned import LearnedPredictor
from vllm_ext.prediction.neighbours import Neighbours
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt
from vllm_ext.prediction.store import NewEntry, Store
from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table

ENTRIES, QUICK_ENTRIES = 100_000, 5_000
_BATCH = 16
_AROUND = 2000
"""Centres of the made-up vectors."""
_SPREAD = 0.6
_MIB = 2**20


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--entries", type=int, help=f"in the store (default: {ENTRIES})")
    args = parser.parse_args(argv)
    entries = args.entries or (QUICK_ENTRIES if args.quick else ENTRIES)
    with tempfile.TemporaryDirectory(prefix="prediction_cost-") as name:
        folder = Path(name) / "p"
        encoder = Encoder(max_tokens=128)
        vectors = _vectors(entries + _BATCH, encoder.dim, args.seed)
        metrics = _store_costs(folder, encoder, vectors[:entries])
        metrics["store_mib"] = sum(file.stat().st_size for file in folder.glob(f"{STORE}*")) / _MIB
        del vectors
        started = time.perf_counter()
        predictor = LearnedPredictor(PredictorConfig(capacity=entries, seed=args.seed), folder, encoder)
        metrics["load_s"] = time.perf_counter() - started  # and the regression's first fit
        metrics |= _search_costs(predictor._neighbours, _vectors(entries + _BATCH, encoder.dim, args.seed))
        metrics |= _question_costs(predictor)
        started = time.perf_counter()
        predictor._fit(predictor._store.inserted())
        metrics["fit_s"] = time.perf_counter() - started
        predictor.close()
    metrics["resident_mib"] = _resident(args.seed, entries)
    result = Result(
        name="prediction_cost", command=command(argv, __file__), seed=args.seed,
        config={"entries": entries, "encoder": encoder.name, "precision": encoder.precision},
        workload=Workload(name="made up", rows=entries, sha256=hashlib.sha256(str(entries).encode()).hexdigest()),
        metrics=metrics,
        claims=[
            _claim("search_ms", metrics["search_ms"], 0.5),
            _claim("resident_mib", metrics["resident_mib"], 600.0),
            _claim("commit_16_ms", metrics["commit_16_ms"], 5.0),
        ],
    )  # fmt: skip
    emit(result, [Table(["cost", ""], list(metrics.items()))], args.out)


def _store_costs(folder: Path, encoder: Encoder, vectors: Any) -> dict[str, float]:
    store = Store(folder, encoder.dim, encoder=encoder.name, capacity=10**7, max_mib=4096)
    rng = np.random.default_rng(0)
    tokens = np.exp(rng.normal(4.5, 1, len(vectors))).astype(int).clip(1).tolist()
    rows = [NewEntry(f"text {n}", vectors[n], tokens[n], "m", prompt_tokens=20 + n % 200) for n in range(len(vectors))]
    for start in range(0, len(rows) - 20 * _BATCH, 4096):
        store.add(rows[start : min(start + 4096, len(rows) - 20 * _BATCH)])
    last = [rows[len(rows) - (n + 1) * _BATCH : len(rows) - n * _BATCH] for n in range(20)]
    commit = _median_ms([lambda some=some: store.add(some) for some in last])
    started = time.perf_counter()
    read = sum(map(len, store.since(0)))
    took = time.perf_counter() - started
    if read != len(rows):
        raise SystemExit(f"{read} of {len(rows)} entries were read")
    store.close()
    return {"commit_16_ms": commit, "read_s": took}


def _search_costs(neighbours: Neighbours, vectors: Any) -> dict[str, float]:
    """Alone, in batches, and the share of the ten nearest that is found."""
    known, asked = vectors[:-_BATCH], vectors[-_BATCH:]
    key = ("m", b"")
    alone = _median_ms(
        [lambda row=row: neighbours.search(key, asked[row][None], 10, [""]) for row in range(_BATCH)] * 5
    )
    together = _median_ms([lambda: neighbours.search(key, asked, 10, [""] * _BATCH)] * 15) / _BATCH
    near = neighbours.search(key, asked, 10, [""] * _BATCH)
    true = np.sort(asked @ known.T, axis=1)[:, :-11:-1]
    found = [(one.similarities >= least - 1e-3).mean() for one, least in zip(near, true[:, -1], strict=True)]
    return {"search_ms": alone, "search_in_16_ms": together, "recall_at_10": float(np.mean(found))}


def _question_costs(predictor: LearnedPredictor) -> dict[str, float]:
    metrics = {}
    for words in (12, 50, 100):
        texts = [_text(words, number) for number in range(16 + 10 * _BATCH)]
        asked = [Prompt(text, 1000, "m", words) for text in texts]
        alone = [lambda one=one: predictor.predict([one]) for one in asked[:16]]
        batches = [
            lambda some=asked[16 + n * _BATCH : 16 + (n + 1) * _BATCH]: predictor.predict(some) for n in range(10)
        ]
        metrics[f"question_of_{words}_words_ms"] = _median_ms(alone)
        metrics[f"question_of_{words}_words_in_16_ms"] = _median_ms(batches) / _BATCH
    known = [Prompt(_text(12, number), 1000, "m", 12) for number in range(_BATCH)]
    metrics["question_without_encoder_in_16_ms"] = _median_ms([lambda: predictor.predict(known)] * 10) / _BATCH
    predictor.learn([FinishedPrompt(prompt, 30, 0.0) for prompt in known])
    return metrics


def _resident(seed: int, entries: int) -> float:
    """Return the memory of a process that does nothing but predict, in MiB."""
    import subprocess

    return float(subprocess.check_output([sys.executable, __file__, "--child", str(seed), str(entries)]).split()[-1])


def _child(seed: int, entries: int) -> None:
    """Fill a store, load it in a process of its own, and say how large that is."""
    import os

    with tempfile.TemporaryDirectory(prefix="prediction_cost-") as name:
        folder = Path(name) / "p"
        if (pid := os.fork()) == 0:
            store = Store(folder, 384, encoder=Encoder(max_tokens=128).name, capacity=10**7, max_mib=4096)
            vectors = _vectors(entries, 384, seed)
            store.add([NewEntry(f"text {n}", vectors[n], 1 + n % 500, "m") for n in range(entries)])
            store.close()
            os._exit(0)
        os.waitpid(pid, 0)
        predictor = LearnedPredictor(PredictorConfig(capacity=entries), folder)
        for start in range(0, 256, _BATCH):
            prompts = [Prompt(_text(100, start + n), 1000, "m") for n in range(_BATCH)]
            predictor.predict(prompts)
            predictor.learn([FinishedPrompt(prompt, 30, 0.0) for prompt in prompts])
        predictor.fit()
        print(psutil.Process().memory_info().rss / _MIB)
        predictor.close()


def _vectors(count: int, dim: int, seed: int) -> Any:
    """Return unit vectors that crowd around centres, as prompts do; [count, dim]."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((_AROUND, dim), dtype=np.float32)
    vectors = centres[rng.integers(_AROUND, size=count)] + _SPREAD * rng.standard_normal((count, dim), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _text(words: int, number: int) -> str:
    rng = np.random.default_rng([words, number])
    return " ".join(("".join(chr(97 + c) for c in rng.integers(26, size=5))) for _ in range(words))


def _median_ms(calls: Sequence[Callable[[], object]]) -> float:
    times = []
    for call in calls:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * float(np.median(times))


def _claim(name: str, value: float, most: float) -> Claim:
    return Claim(name=name, value=value, op="<=", goal=most, facts="" if value <= most else "not reached")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main(sys.argv[1:])
