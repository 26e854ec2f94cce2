"""Quiet logs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quiet(quiet_vllm: None) -> None: ...
