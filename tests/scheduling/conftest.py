"""Quiet logs, and scripted policies that begin empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.steering import SCRIPT


@pytest.fixture(autouse=True)
def _quiet(quiet_vllm: None) -> None: ...


@pytest.fixture(autouse=True)
def _empty_script() -> Iterator[None]:
    SCRIPT.reset()
    yield
    SCRIPT.reset()
