"""The predictor of prompts in `engine_compare.py`: which sources a system uses, and what its predictor knows.

A part of engine_compare.py: it is run from there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine_variants
import engine_workload as workload
import numpy as np

from vllm_ext.datasets import WorkloadRow

COLD, WARM = "cold", "warm"
_HISTORY_ONLY = ["hint", "history"]
_WITH_PROMPTS = ["hint", "retrieval", "history"]


def system_of(label: str) -> str:
    """Return the system's name in ``NAME``, ``NAME:VARIANT``, ``NAME@STATE`` or ``NAME:VARIANT@STATE``."""
    return engine_variants.split(label.partition("@")[0])[0]


def variant_of(label: str) -> str | None:
    """Return the variant in a label, if there is one.

    Raises:
        ValueError: it is unknown.
    """
    return engine_variants.split(label.partition("@")[0])[1]


def state_of(label: str) -> str | None:
    """Return what the predictor knows at the start, ``cold`` or ``warm``; None for a label without a predictor.

    Raises:
        ValueError: the state is another one.
    """
    _, at, state = label.partition("@")
    if at and state not in (COLD, WARM):
        raise ValueError(f"{label}: what follows @ must be {COLD} or {WARM}")
    return state or None


def choose_sources(label: str, options: dict[str, Any]) -> None:
    """Set the sources of length predictions in ``options`` (of ``vllm_ext``), unless they are given."""
    state = state_of(label)
    sources = _HISTORY_ONLY if state is None else _WITH_PROMPTS
    options.setdefault("prediction", {}).setdefault("sources", sources)
    if state is not None:
        options.setdefault("predictor", {})


class Learned:
    """What predictors know: nothing, or what one learned once from rows that are not measured."""

    def __init__(self, model: Path, num_rows: int, seed: int) -> None:
        self._model = model
        self._num_rows = num_rows
        self._seed = seed
        self._kept: tempfile.TemporaryDirectory[str] | None = None

    def prepare(self, rows: Sequence[WorkloadRow], lots: Sequence[workload.Lots], limits: workload.Limits) -> None:
        """Learn, the first time this is called, from rows whose prompts are in no lot; lengths as they are served.

        Raises:
            ValueError: no row is left, or learning failed.
        """
        if self._kept is not None:
            return
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(self._model)
        used = {r.prompt for lot in lots for part in (lot.warmup, lot.history, lot.measured) for r in part}
        order = np.random.default_rng(self._seed).permutation(len(rows))
        found = []
        for index in order:
            if rows[index].prompt is None:
                raise ValueError("alise@warm: the workload has no texts of prompts to learn from")
            request = workload.fit(rows[index], tokenizer, limits, lambda n: (8,) * n)
            if request.prompt not in used:
                found.append({"prompt": request.prompt, "output_tokens": request.output_tokens})
            if len(found) == self._num_rows:
                break
        if not found:
            raise ValueError("alise@warm: every row of the workload is measured; none is left to learn from")
        self._kept = tempfile.TemporaryDirectory(prefix="engine_compare-learned-")
        folder = Path(self._kept.name)
        dataset = folder / "rows.jsonl"
        dataset.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
        train = [sys.executable, "-m", "vllm_ext.cli.main", "predictor", "train", "--dataset", str(dataset)]
        train += ["--model", str(self._model), "--out", str(folder / WARM), "--seed", str(self._seed)]
        done = subprocess.run(train, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"learning for alise@warm failed: {done.stderr[-2000:]}")

    @contextmanager
    def folder(self, state: str) -> Iterator[Path]:
        """Return a folder for one cell; it is gone afterwards, with what was learned in the cell."""
        with tempfile.TemporaryDirectory(prefix="engine_compare-predictor-", ignore_cleanup_errors=True) as name:
            folder = Path(name, "predictor")
            if state == WARM:
                assert self._kept is not None
                shutil.copytree(Path(self._kept.name, WARM), folder)
            yield folder
