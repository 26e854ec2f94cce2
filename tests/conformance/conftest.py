"""Quiet logs: vLLM announces every pause and cache reset, thousands of times in a property test."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _quiet_vllm(vllms_log_level: None) -> None:
    import vllm.logger

    logging.getLogger(vllm.logger.__name__.partition(".")[0]).setLevel(logging.CRITICAL)
