"""What `vllm-ext predictor train` and `merge` say they did."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_ext.observability import results
from vllm_ext.prediction import seeding

if TYPE_CHECKING:
    from vllm_ext.prediction.decoder import Decoder
    from vllm_ext.prediction.decoder_train import TrainingReport

_TRAINING_METRICS = {"epochs": "epochs", "best_epoch": "best_epoch", "train_loss": "train_loss_nats",
                     "validation_loss": "validation_loss_nats", "constant_loss": "constant_loss_nats",
                     "skill": "skill", "p90_coverage": "p90_coverage", "num_validation": "held_out_rows",
                     "median_relative_error": "median_relative_error"}  # fmt: skip
"""Field of `TrainingReport` -> name in the report."""


class Trained(NamedTuple):
    """What came of the training."""

    decoder: Decoder | None
    report: TrainingReport | None
    why_none: str
    """Why there is no decoder; empty if there is one."""


class Clock:
    """Wall-clock seconds of the parts of a command."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started_s = self._last_s = time.monotonic()

    def note(self, part: str) -> None:
        """End a part, which began where the one before ended."""
        now_s = time.monotonic()
        self.seconds[part], self._last_s = now_s - self._last_s, now_s

    def all(self) -> dict[str, float]:
        """Return the parts and the total."""
        return {**self.seconds, "total_s": time.monotonic() - self._started_s}


def report(
    name: str,
    args: argparse.Namespace,
    command: str,
    folder: Path,
    workload: results.Workload,
    config: dict[str, Any],
    metrics: Mapping[str, float],
    trained: Trained,
    clock: Clock,
) -> None:
    """Print a table and notes on stderr, and the result as the last line of stdout.

    Args:
        name: Of the result.
        args: Flags of `predictor._store_flags` and `predictor._training_flags`.
        command: To repeat it.
        folder: What was written.
        workload: What was learned from.
        config: What is peculiar to the command; the flags are added.
        metrics: The same for numbers; losses and times are added.
        trained: The decoder.
        clock: Its parts so far.
    """
    shown = {name: float(value) for name, value in metrics.items()}
    if (training := trained.report) is not None:
        shown |= {key: float(getattr(training, field)) for field, key in _TRAINING_METRICS.items()}
    shown |= clock.all()
    config = {
        **config,
        "folder": folder.name,
        "decoder": f"none: {trained.why_none}" if trained.decoder is None else "written",
        "keep_prompts": args.keep_prompts,
        "capacity": args.capacity,
        "hidden": list(args.hidden),
        "epochs": args.epochs,
        "patience": args.patience,
        "threads": args.threads,
    }
    result = results.Result(
        name=name, command=command, config=config, seed=args.seed, workload=workload, metrics=shown
    )  # fmt: skip
    notes = [f"{count} lengths counted in: {what}" for what, count in config.get("lengths_counted_in", {}).items()]
    if seeding.OF_ENCODER in config.get("lengths_counted_in", {}):
        notes.append("the served model's tokens may be more or fewer: give --tokenizer for its own")
    if training is None:
        notes.append(f"no decoder written: {trained.why_none}")
    else:
        notes.append(
            "losses, skill and coverage are of prompts held out of the training, which also end it and, 50 or more, "
            "calibrate P90; `vllm-ext predictor eval` judges by others"
        )
    table = results.format_table([name.replace("_", " "), ""], [[key, value] for key, value in shown.items()])
    results.emit(result, [] if args.quiet else [table, *notes, f"written to {folder}"])
