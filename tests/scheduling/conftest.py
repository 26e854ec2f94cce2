"""Quiet logs, as vLLM announces every configuration, pause and cache reset; and scripted policies that begin empty."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.support.steering import SCRIPT


@pytest.fixture(autouse=True)
def _quiet_vllm(vllms_log_level: None) -> None:
    import vllm.logger

    logging.getLogger(vllm.logger.__name__.partition(".")[0]).setLevel(logging.CRITICAL)


@pytest.fixture(autouse=True)
def _empty_script() -> Iterator[None]:
    SCRIPT.reset()
    yield
    SCRIPT.reset()
