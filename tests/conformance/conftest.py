"""Quiet logs: vLLM announces every pause and cache reset, thousands of times in a property test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet_vllm() -> Iterator[None]:
    import vllm.logger

    logger = logging.getLogger(vllm.logger.__name__.partition(".")[0])
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
