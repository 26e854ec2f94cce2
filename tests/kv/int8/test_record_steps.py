"""The hook around a worker's steps, which stays in a process when the engine that wanted it is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext.config.errors import ConfigError
from vllm_ext.patches import kv_record_steps


def worker(additional_config: dict[str, Any]) -> Any:
    """Of an engine whose KV memory holds blocks alone."""
    cache = SimpleNamespace(kv_cache_tensors=[], kv_cache_groups=[])
    return SimpleNamespace(
        vllm_config=SimpleNamespace(additional_config=additional_config),
        model_runner=SimpleNamespace(kv_cache_config=cache),
    )


def execute(additional_config: dict[str, Any]) -> Any:
    (hook,) = kv_record_steps.HOOKS
    return hook.replacement(lambda _, step: f"ran {step}", worker(additional_config), "step 1")


@pytest.mark.parametrize("additional_config", [{}, {"vllm_ext": {"kv_tier": {"device_int8_share": 0.0}}}])
def test_an_engine_without_records_steps_as_vllm_does_after_one_with_them(additional_config: dict[str, Any]) -> None:
    """It died in its first step, since its memory has no arena."""
    assert execute(additional_config) == "ran step 1"


def test_an_engine_with_records_and_no_room_for_them_is_refused() -> None:
    """Its memory was divided where the hook for that was not installed."""
    with pytest.raises(ConfigError, match="needs an engine core that leaves room for them"):
        execute({"vllm_ext": {"kv_tier": {"device_int8_share": 0.4}}})
