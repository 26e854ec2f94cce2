"""Lists the reproductions: every module of `vllm_ext.repro.studies` that defines a ``STUDY``."""

from __future__ import annotations

import importlib
import pkgutil

from vllm_ext.repro import studies as package
from vllm_ext.repro.study import Study


def studies() -> dict[str, Study]:
    """Return the reproductions by id, sorted; a module without a ``STUDY`` holds what several of them share."""
    names = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    found = [getattr(importlib.import_module(name), "STUDY", None) for name in names]
    return {study.id: study for study in sorted(filter(None, found), key=lambda study: study.id)}
