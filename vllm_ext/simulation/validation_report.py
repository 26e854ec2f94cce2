"""What a validation adds up to: medians over repeats, goals, the result and its table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ext.observability.results import Goal, Result, Workload, format_table, machine, versions
from vllm_ext.simulation import agreement, recording
from vllm_ext.simulation.recording import Run
from vllm_ext.simulation.validation import Fit, Validation, fit, floors, medians, validate

if TYPE_CHECKING:
    from vllm_ext.simulation.replay import Replay

GOALS = {"e2e_error_median": 0.07, "ttft_error_median": 0.15}
"""Metric -> how large it may be for all requests together, and for those of every system and load."""
ALL = "all"
"""Instead of a system and load: all judged requests together."""
MEASURED, REPEAT = "measured", "another run of the real engine"
"""Baselines: what the real engine measured, and how far two of its runs with the same requests differ."""
EQUAL_STEPS = "replayed_equal_steps_fraction"
_COLUMNS = {
    "e2e_error_median": "e2e error",
    "e2e_error_p90": "P90",
    "ttft_error_median": "ttft error",
    "ttft_error_p90": "P90",
    "tbt_mean_error_median": "tbt error",
    "e2e_mean_error": "mean e2e",
    "ttft_mean_error": "mean ttft",
    "normalised_latency_mean_error": "mean norm",
    "batch_jaccard_mean": "same batch",
    EQUAL_STEPS: "replayed equal",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """A recording beside its predictions."""

    validations: Sequence[Validation]
    replays: Sequence[Replay]
    """One per validation, or none at all."""
    floors: Mapping[tuple[str, float], Mapping[str, float]]

    def groups(self) -> dict[tuple[str, float], dict[str, float]]:
        """Return the metrics by system and load: medians over repeats."""
        return {key: medians([self._metrics(i) for i in members]) for key, members in self._members().items()}

    def measured(self) -> dict[tuple[str, float], dict[str, float]]:
        """Return the measured aggregates by system and load: medians over repeats."""
        return {
            key: medians([self.validations[i].baseline for i in members]) for key, members in self._members().items()
        }

    def pooled(self) -> dict[str, float]:
        """Return the errors over the requests of all runs together, so that each request counts the same."""
        predicted = [timeline for one in self.validations for timeline in one.predicted.timelines]
        measured = [timeline for one in self.validations for timeline in one.measured.timelines]
        return agreement.request_errors(predicted, measured)

    def divergences(self) -> list[str]:
        """Return what differed first in each replay that was not equal, in words."""
        return [str(replay.divergence) for replay in self.replays if replay.divergence is not None]

    def _members(self) -> dict[tuple[str, float], list[int]]:
        members: dict[tuple[str, float], list[int]] = {}
        for index, one in enumerate(self.validations):
            members.setdefault((one.run.header.system, one.run.header.load), []).append(index)
        return members

    def _metrics(self, index: int) -> dict[str, float]:
        metrics = dict(self.validations[index].metrics)
        if self.replays:
            replay = self.replays[index]
            metrics[EQUAL_STEPS] = replay.steps / max(1, replay.total_steps)
        return metrics


def make_report(runs: Sequence[Run], fit_on: Sequence[Run] | None = None, *, replays: bool = True) -> Report:
    """Validate every run.

    Args:
        fit_on: Runs of another recording to fit on, those of the same system where there are any; None: see `validate`.
        replays: Also repeat every run exactly and compare all decisions.

    Raises:
        RecordingError, ValueError: a run can't be replayed, simulated or judged, or the fit has too little to go by.
    """
    from vllm_ext.simulation.replay import replay  # imports vLLM

    fits: dict[str, Fit] = {}
    if fit_on is not None:
        for system in dict.fromkeys(run.header.system for run in runs):
            own = [run for run in fit_on if run.header.system == system]
            fits[system] = fit(own or fit_on)
    return Report(
        validations=[validate(run, fits.get(run.header.system)) for run in runs],
        replays=[replay(run) for run in runs] if replays else [],
        floors=floors(runs),
    )


def make_result(
    report: Report, path: Path, fit_path: Path | None, *, name: str, command: str, seed: int = 0, note: str = ""
) -> Result:
    """Return the result; a goal that is missed says what the real engine itself differs by.

    Args:
        path: The recording, for its checksum.
        fit_path: The recording that was fitted, if another one.
        note: Why a goal is missed, if one is; put before the facts.
    """
    runs = [one.run for one in report.validations]
    judged = {ALL: (report.pooled(), list(report.floors.values()))}
    for (system, load), values in report.groups().items():
        floor = report.floors.get((system, load))
        judged[f"{system}.load_{load:g}"] = (values, [] if floor is None else [floor])
    metrics = {f"{prefix}.{key}": value for prefix, (values, _) in judged.items() for key, value in values.items()}
    goals = [
        Goal(
            metric=f"{prefix}.{metric}",
            value=values[metric],
            op="<=",
            goal=limit,
            note=f"{note} {_noise_in_words(noise, metric)}".strip(),
        )
        for prefix, (values, noise) in judged.items()
        for metric, limit in GOALS.items()
    ]
    return Result(
        name=name,
        command=command,
        config=_config(runs, fit_path),
        seed=seed,
        workload=Workload(
            name=path.name,
            rows=sum(len(run.requests) for run in runs),
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        ),
        metrics=metrics,
        baselines={
            MEASURED: _flat(report.measured()),
            **({REPEAT: _flat(report.floors)} if report.floors else {}),
        },
        goals=goals,
        versions=versions(),
        machine=machine(),
    )


def make_table(report: Report) -> str:
    """Return a line per system and load, errors in percent, and one for all requests together.

    Below each system and load stands the distance of two runs of the real engine, where there are repeats.
    """
    rows: list[list[object]] = []
    for (system, load), values in report.groups().items():
        rows.append([f"{load:g}", system, *(_percent(values.get(key)) for key in _COLUMNS)])
        floor = report.floors.get((system, load))
        if floor is not None:
            rows.append(["", "  real engine, again", *(_percent(floor.get(key)) for key in _COLUMNS)])
    pooled = report.pooled()
    rows.append([ALL, "", *(_percent(pooled.get(key)) for key in _COLUMNS)])
    text: str = format_table(["load", "system (%)", *_COLUMNS.values()], rows)
    return text


def load(path: Path, system: str | None = None) -> list[Run]:
    """Read a recording, perhaps only the runs of one system; raises as `recording.read` and `recording.pick`."""
    return recording.pick(recording.read(path), system=system)


def _config(runs: Sequence[Run], fit_path: Path | None) -> dict[str, Any]:
    return {
        "fitted_on": fit_path.name if fit_path is not None else "the first half of each run, in time",
        "judged": "all measured requests" if fit_path is not None else "requests due in the second half",
        "recorded_with": runs[0].header.versions,
        "model": runs[0].header.model,
        "runs": [
            {
                "system": run.header.system,
                "load": run.header.load,
                "repeat": run.header.repeat,
                "requests": len(run.requests),
                "settings": run.header.settings.model_dump(),
                "facts": run.header.facts,
            }
            for run in runs
        ],
    }


def _noise_in_words(floors: Sequence[Mapping[str, float]], metric: str) -> str:
    found = [floor[metric] for floor in floors]
    if not found:
        return "The recording holds no repeats of the same requests to tell the noise of the machine from."
    apart = "Two runs of the real engine with the same requests differ by"
    if len(found) == 1:
        return f"{apart} {found[0]:.1%} in this metric."
    return f"{apart} {min(found):.1%} to {max(found):.1%} in this metric, by system and load."


def _flat(groups: Mapping[tuple[str, float], Mapping[str, float]]) -> dict[str, float]:
    return {
        f"{system}.load_{load:g}.{key}": value
        for (system, load), values in groups.items()
        for key, value in values.items()
    }


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 1)
