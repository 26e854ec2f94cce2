"""Lists the reproductions: those of every ``PAPER`` that a module of `vllm_ext.repro.studies` defines."""

from __future__ import annotations

import importlib
import pkgutil

from vllm_ext.repro import studies as package
from vllm_ext.repro.study import Paper, Study


def studies() -> dict[str, Study]:
    """Return the reproductions by id, sorted; a module without a ``PAPER`` holds what several of them share."""
    names = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    papers: set[Paper | None] = {getattr(importlib.import_module(name), "PAPER", None) for name in names}
    found = [study for paper in papers if paper is not None for study in paper.studies]
    return {study.id: study for study in sorted(found, key=lambda study: study.id)}
