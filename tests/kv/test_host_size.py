"""How much host memory a tier takes where nobody said it: ``gib: auto``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from vllm_ext.config import parse
from vllm_ext.config.errors import ConfigError
from vllm_ext.config.kv_tier import KvTierConfig
from vllm_ext.kv.connector.options import transfer_config
from vllm_ext.kv.connector.spec import TierSpec
from vllm_ext.kv.connector.support import too_small
from vllm_ext.kv.host import memory as host_memory
from vllm_ext.launch.host_memory import with_host_memory

BLOCK_BYTES = 2 * 32 * 8 * 128 * 2 * 64


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda on_cpu: monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: on_cpu)


@pytest.mark.parametrize(
    ("options", "on_cpu", "gib"),
    [
        ({"system": "pensieve"}, False, "auto"),
        ({"system": "pensieve"}, True, 0.0),
        ({"system": "pensieve", "kv_tier": {"gib": 0}}, False, 0.0),
        ({"system": "pensieve", "kv_tier": {"gib": 3}}, True, 3.0),
        ({"system": "pensieve", "kv_tier": {"device_int8_share": 0.2}}, False, 0.0),
        ({"system": "fcfs"}, False, None),
        ({"system": "fcfs", "kv_tier": {"gib": "auto"}}, False, "auto"),
        ({"system": "alise"}, False, None),
        ({"system": "alise+pensieve"}, False, None),
        ({"system": "pensieve-published"}, False, None),
    ],
)
def test_pensieve_alone_takes_host_memory_unasked(
    on_device: Callable[[bool], None], options: dict[str, Any], on_cpu: bool, gib: float | str | None
) -> None:
    """On vLLM's CPU backend copies take the model's cycles; under alise a tier has not been shown to gain."""
    on_device(on_cpu)
    assert with_host_memory(parse(options), None).kv_tier.gib == gib


def test_another_connector_takes_its_place_and_that_is_said(
    on_device: Callable[[bool], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, "vllm.vllm_ext"):
        assert with_host_memory(parse({"system": "pensieve"}), object()).kv_tier.gib == 0.0
    assert "another connector" in caplog.text
    assert "--kv-tier-gib N" in caplog.text


@pytest.mark.parametrize("value", [-1, "much", True, [1], float("nan")])
def test_a_size_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_tier\.gib=.*: must be a number of GiB of at least 0, or auto"):
        KvTierConfig(gib=value)


def auto_sized(spare: int, **model: Any) -> Any:
    shape = {"use_mla": False, "dtype": torch.bfloat16, **model}
    sizes = {"get_total_num_hidden_layers": 32, "get_total_num_kv_heads": 8, "get_head_size": 128}
    config = SimpleNamespace(**shape, **{name: lambda value=value: value for name, value in sizes.items()})
    return SimpleNamespace(
        model_config=config,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=64),
        kv_transfer_config=transfer_config(KvTierConfig(gib="auto"), spare),
    )


@pytest.mark.parametrize(
    ("blocks", "model", "little"),
    [(64, {}, False), (63, {}, True), (32, {"use_mla": True}, False), (31, {"use_mla": True}, True)],
)
def test_a_tier_that_would_hold_little_is_not_worth_having(blocks: int, model: dict[str, Any], little: bool) -> None:
    reason = too_small(auto_sized(blocks * BLOCK_BYTES, **model))
    assert bool(reason) is little
    assert not reason or "fewer than 64 blocks" in reason


def test_replicas_share_0_3_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 1000)
    assert [host_memory.spare_bytes(replicas) for replicas in (0, 1, 3)] == [300, 300, 100]


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [({"gib": "auto"}, 20), ({"gib": 1.0}, None), ({"gib": "auto", "bits": 8}, 20)],
    ids=["auto", "asked-for", "auto-8-bits"],
)
def test_auto_is_twice_the_blocks_of_the_device(options: dict[str, Any], num_blocks: int | None) -> None:
    extra = transfer_config(KvTierConfig(**options), 2**30).kv_connector_extra_config
    spec = TierSpec(_offloading(extra), device_blocks=10)
    assert spec.num_chunks == (num_blocks or 2**30 // spec.geometry.chunk_bytes)


def _offloading(extra: dict[str, Any]) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=4, layer_names=("a", "b"), group_id=0),),
        worker_kv_bytes_per_block=2 * 2 * 4 * 8 * 2,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id="one",
        model=OffloadingModelConfig(name="m", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=4, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
