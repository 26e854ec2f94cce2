"""Ours is told from vLLM's, and a renamed attribute is an error rather than another system."""

from __future__ import annotations

import pytest

from vllm_ext.scheduling.scheduler import SteeredScheduler
from vllm_ext.simulation.harness import make_scheduler
from vllm_ext.simulation.steered import Steered, steered


def test_ours_is_told_from_vllms_own() -> None:
    ours = make_scheduler(SteeredScheduler)
    assert steered(ours) is ours
    assert steered(make_scheduler()) is None


@pytest.mark.parametrize("name", list(Steered.__annotations__))
def test_attribute_that_was_renamed_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_scheduler(SteeredScheduler)
    monkeypatch.delattr(ours if name in vars(ours) else SteeredScheduler, name)
    with pytest.raises(AttributeError, match=name):
        steered(ours)
