"""The profile of step times in `engine_compare.py`: measured once with the engine's settings, as an operator would.

A part of engine_compare.py: it is run from there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engine_process

MEASURE, NONE = "measure", "none"
_SETTINGS = ("dtype", "load_format", "max_model_len", "max_num_seqs", "block_size", "gpu_memory_utilization")


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
            self._folder = tempfile.TemporaryDirectory(prefix="engine_compare-profile-")
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
        from vllm_ext.prediction import profile

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
