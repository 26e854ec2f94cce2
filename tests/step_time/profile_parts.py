"""A measured profile, a cache of the test's own, and what was logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_ext.step_time import profile as module
from vllm_ext.step_time.fit import RegimeError, TermSupport
from vllm_ext.step_time.profile import EngineKey, Profile
from vllm_ext.step_time.runtime import Coefficients

Told = Callable[[int], list[str]]
"""The messages logged at a level."""

KEY = EngineKey("org/model", "Some GPU", "bfloat16", 2)
PROFILE = Profile(
    **KEY._asdict(),
    vllm_version="0.32.0",
    coefficients=Coefficients(1e-3, 2e-5, 3e-5, 4e-8, 5e-10),
    num_steps=100,
    median_error=0.02,
    p90_error=0.1,
    regimes=(RegimeError(name="decode", num_steps=20, median_error=0.02, p90_error=0.1),),
    terms=(TermSupport(name="base_s", num_steps=80, uncertainty=0.01),),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(module, "cache_dir", lambda: folder)
    return folder


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    """The messages of a level, as text. vLLM's loggers do not propagate once vLLM is imported."""
    logger = logging.getLogger("vllm.vllm_ext.profile")
    before = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    yield lambda level: [r.getMessage() for r in dict.fromkeys(caplog.records) if r.levelno == level]
    logger.removeHandler(caplog.handler)
    logger.setLevel(before)
