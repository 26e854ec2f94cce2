"""Lists the reproductions: those of every ``PAPER`` that a module of `vllm_ext.experiments.papers` defines."""

from __future__ import annotations

import importlib
import pkgutil

from vllm_ext.experiments import papers as package
from vllm_ext.experiments.experiment import Experiment, Paper


def experiments() -> dict[str, Experiment]:
    """Return the reproductions by id, sorted; a module without a ``PAPER`` holds what several of them share."""
    names = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    papers: set[Paper | None] = {getattr(importlib.import_module(name), "PAPER", None) for name in names}
    found = [experiment for paper in papers if paper is not None for experiment in paper.experiments]
    return {experiment.id: experiment for experiment in sorted(found, key=lambda experiment: experiment.id)}
