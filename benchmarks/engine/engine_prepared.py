"""What systems of `engine_compare.py` have before they start: a predictor that learned, a profile of step times.

Both are made once, as an operator would. A part of engine_compare.py: it is run from there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine_process
import engine_workload as workload
import numpy as np
from engine_rows import WARM

from vllm_ext.datasets import WorkloadRow

MEASURE, NONE = "measure", "none"
_SETTINGS = ("dtype", "load_format", "max_model_len", "max_num_seqs", "block_size", "gpu_memory_utilization")


class Learned:
    """What predictors know: nothing, or what one learned once from rows that are not measured."""

    def __init__(self, model: Path, num_rows: int, seed: int) -> None:
        self._model = model
        self._num_rows = num_rows
        self._seed = seed
        self._kept: tempfile.TemporaryDirectory[str] | None = None

    def prepare(
        self,
        rows: Sequence[WorkloadRow],
        measured: Sequence[Sequence[workload.BenchRequest]],
        limits: workload.Limits,
    ) -> None:
        """Learn, the first time this is called, from rows that are not measured; lengths as they are served.

        Raises:
            ValueError: no row is left, or learning failed.
        """
        if self._kept is not None:
            return
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(self._model)
        used = {request.prompt for requests in measured for request in requests}
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
        self._kept = tempfile.TemporaryDirectory(prefix="engine_cell-learned-")
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
        with tempfile.TemporaryDirectory(prefix="engine_cell-predictor-", ignore_cleanup_errors=True) as name:
            folder = Path(name, "predictor")
            if state == WARM:
                assert self._kept is not None
                shutil.copytree(Path(self._kept.name, WARM), folder)
            yield folder


class StepTimes:
    """The file given to ``--ext-profile``, if any."""

    def __init__(self, choice: str, model: Path, engine_args: Mapping[str, Any], *, rounds: int) -> None:
        """Take the choice: ``measure``, ``none``, or a file that `vllm-ext profile` wrote.

        Raises:
            ValueError: it is a file that is not there.
        """
        self._choice = choice
        self._model = model
        self._engine_args = engine_args
        self._rounds = rounds
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._used: Path | None = None
        if choice not in (MEASURE, NONE) and not Path(choice).is_file():
            raise ValueError(f"--profile={choice!r}: must be {MEASURE}, {NONE}, or a file of `vllm-ext profile`")

    def path(self) -> Path | None:
        """Return the file; the first call measures it, where that was chosen.

        Raises:
            engine_process.CellFailed: `vllm-ext profile` failed.
        """
        if self._choice == NONE:
            return None
        if self._used is None and self._choice != MEASURE:
            self._used = Path(self._choice).resolve()
        elif self._used is None:
            self._folder = tempfile.TemporaryDirectory(prefix="engine_cell-profile-")
            out = Path(self._folder.name, "profile.json")
            engine_process.run("vllm-ext profile", self.command(out))
            self._used = out
        return self._used

    def command(self, out: Path) -> list[str]:
        """Return the command that measures the profile."""
        args = self._engine_args
        command = [sys.executable, "-m", "vllm_ext.cli.main", "profile", "--model", str(self._model)]
        command += ["--out", str(out), "--rounds", str(self._rounds)]
        for name in _SETTINGS:
            command += [f"--{name.replace('_', '-')}", str(args[name])]
        command += ["--num-gpu-blocks-override", str(args["num_gpu_blocks_override"])]
        if args["enforce_eager"]:
            command.append("--enforce-eager")
        if args["hf_overrides"]:
            command += ["--hf-overrides", json.dumps(args["hf_overrides"])]
        return command

    def facts(self) -> dict[str, Any] | None:
        """Return what the profile says, for the configuration of a result; None where none was used."""
        from vllm_ext.step_time import profile

        if self._used is None:
            return None
        found = profile.load(self._used)
        return {
            "coefficients": found.coefficients._asdict(),
            "num_steps": found.num_steps,
            "median_error": found.median_error,
            "pivot_tokens": found.pivot_tokens,
            "pivot_s": found.pivot_s,
        }
