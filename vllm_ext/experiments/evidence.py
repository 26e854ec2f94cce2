"""What decided a result: modules, by which a later commit tells whether it still stands, and one run to repeat."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_ext.experiments.experiment import Experiment
from vllm_ext.report.provenance import RESULTS
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.sources import all_files, checksums, digest_of, loaded_modules
from vllm_ext.simulation.sweep.store import Outcome
from vllm_ext.simulation.workloads.synthetic import preset

DECIDED_BY, SAMPLE = "decided_by", "sample"
_OWN = ("vllm_ext.experiments.", "vllm_ext.cellular.")
"""What an experiment runs in its own process."""


class Evidence:
    """Takes note of every run of an experiment."""

    def __init__(self) -> None:
        self._modules: set[str] = set()
        self._sample: tuple[SimulationSpec, Mapping[str, float]] | None = None

    def add(self, spec: SimulationSpec, outcome: Outcome) -> None:
        """Note what a run depended on; of those without files that of the fewest steps is kept, to be repeated."""
        self._modules.update(outcome.modules)
        found, parts = outcome.metrics, spec.workload.mix or (spec.workload,)
        if not all(preset(part.source) for part in parts):
            return
        if found and "steps" in found and (self._sample is None or found["steps"] < self._sample[1]["steps"]):
            self._sample = spec, found

    def config(self, experiment: Experiment) -> dict[str, Any]:
        """Return what a result keeps: names of modules with their checksum, and the run."""
        names = sorted({*(self._modules or loaded_modules()), *imported(experiment.run.__module__)})
        kept: dict[str, Any] = {DECIDED_BY: {"sources": digest_of(names, _now()), "modules": names}}
        if self._sample is not None:
            spec, metrics = self._sample
            kept[SAMPLE] = {"spec": spec.model_dump(mode="json", exclude_defaults=True), "metrics": dict(metrics)}
        return kept


def imported(module: str) -> set[str]:
    """Return the files of a module and of what it imports of experiments and models of cells, directly or not."""
    files, found, ahead = all_files(), set(), [module]
    while ahead:
        name = ahead.pop()
        path = name.removeprefix("vllm_ext.").replace(".", "/")
        file = next((one for one in (f"{path}.py", f"{path}/__init__.py") if one in files), None)
        if file is None or file in found:
            continue
        found.add(file)
        for node in ast.walk(ast.parse(files[file].read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith(_OWN):
                ahead += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def stale(result: Mapping[str, Any]) -> bool | None:
    """Whether modules that decided a result have changed since; None where it does not say which they are."""
    decided = result["config"].get(DECIDED_BY)
    return None if decided is None else decided["sources"] != digest_of(decided["modules"], _now())


def kept_results(root: Path) -> list[Path]:
    """Return the files of the papers' figures in a checkout, sorted."""
    return sorted((root / RESULTS / "repro").glob("*.json"))


def _now() -> dict[str, str]:
    return checksums(all_files())
