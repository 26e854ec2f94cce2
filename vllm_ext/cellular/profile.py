"""How long a cell takes by batch, and where larger batches stop being free."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vllm_ext.cellular.cells import Cell
from vllm_ext.cellular.executor import Compute
from vllm_ext.cellular.models import Model

FLAT = 1.25
"""A batch that takes at most so many times as long as a batch of one is as good as free."""
SHARE = 0.9
"""The largest batch worth waiting for has this share of the best throughput."""


class ProfileError(ValueError):
    """A profile that cannot be used; the message names the file and what is wrong."""


@dataclass(frozen=True, kw_only=True)
class CellProfile:
    """Times of one cell."""

    seconds: Mapping[int, float]
    """Batch -> seconds."""

    @property
    def knee(self) -> int:
        """The largest batch measured that is as good as free."""
        least = self.seconds[min(self.seconds)]
        return max(batch for batch, seconds in self.seconds.items() if seconds <= FLAT * least)

    @property
    def best(self) -> int:
        """The smallest batch measured with nearly the best throughput."""
        rates = {batch: batch / seconds for batch, seconds in self.seconds.items()}
        return min(batch for batch, rate in rates.items() if rate >= SHARE * max(rates.values()))


def measure(cell: Cell, batches: Sequence[int], *, repeats: int = 7, compute: Compute = Cell.call) -> CellProfile:
    """Return the time of a cell for each batch; what is done once per shape is not counted.

    On a CPU that is the least CPU time of the thread, which foreign load hardly changes; on other devices the median.
    """
    found = {}
    with torch.inference_mode():
        for batch in sorted(batches):
            inputs = cell.random_inputs(batch)
            _, *times = (_seconds(cell, inputs, compute) for _ in range(repeats + 1))
            found[batch] = min(times) if inputs[0].device.type == "cpu" else statistics.median(times)
    return CellProfile(seconds=found)


def _seconds(cell: Cell, inputs: list[torch.Tensor], compute: Compute) -> float:
    on_cpu = inputs[0].device.type == "cpu"
    clock = time.thread_time if on_cpu else time.perf_counter
    begin = clock()
    compute(cell, inputs)
    if not on_cpu:
        torch.cuda.synchronize()
    return clock() - begin


def save(model: Model, profiles: Mapping[str, CellProfile], path: Path) -> None:
    """Write profiles of a model's cells."""
    cells = {name: asdict(profile) | {"knee": profile.knee, "best": profile.best} for name, profile in profiles.items()}
    text = json.dumps({"model": model.kind, "sizes": model.config, "cells": cells}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def load(model: Model, path: Path) -> dict[str, CellProfile]:
    """Read the profiles of a model's cells.

    Raises:
        ProfileError: the file is none, or of another model.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if (found["model"], found["sizes"]) != (model.kind, model.config):
            raise ProfileError(f"{path.name}: is of {found['model']} {found['sizes']}, not {model.kind} {model.config}")
        seconds = {name: {int(b): float(s) for b, s in one["seconds"].items()} for name, one in found["cells"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{path.name}: is no profile of `vllm-ext cellular profile`: {error!r}") from error
    if missing := {cell.name for cell in model.cells} - seconds.keys():
        raise ProfileError(f"{path.name}: has no times of {', '.join(sorted(missing))}; profile the model again")
    if any(not times or min(times) < 1 or not min(times.values()) > 0 for times in seconds.values()):
        raise ProfileError(f"{path.name}: batches and times must be greater than 0")
    return {name: CellProfile(seconds=times) for name, times in seconds.items()}
