"""Quiet logs, as vLLM announces every configuration, pause and cache reset; and scripted policies that begin empty."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.support.steering import SCRIPT


@pytest.fixture(autouse=True)
def _quiet_vllm() -> Iterator[None]:
    import vllm.logger

    logger = logging.getLogger(vllm.logger.__name__.partition(".")[0])
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _empty_script() -> Iterator[None]:
    SCRIPT.reset()
    yield
    SCRIPT.reset()
