"""What the tier is refused for in the front end, and how much host memory it takes where nobody said it."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from vllm_ext.config import parse
from vllm_ext.config.errors import ConfigError
from vllm_ext.config.kv_tier import BLOCK_TOKENS, KvTierConfig
from vllm_ext.kernels import native
from vllm_ext.kv.connector.options import tier_of, transfer_config
from vllm_ext.kv.connector.spec import TierSpec
from vllm_ext.kv.connector.support import (
    choose_block_size,
    refuse_model,
    refuse_size,
    share_disk,
    too_small,
)
from vllm_ext.kv.host import memory as host_memory
from vllm_ext.launch.host_memory import with_host_memory

from .tier_worker_parts import offloading_config


def on_device(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: on_cpu)


def config(*, mla: bool, bits: int) -> Any:
    transfer = transfer_config(KvTierConfig(gib=2.0, bits=bits))
    return SimpleNamespace(model_config=SimpleNamespace(use_mla=mla), kv_transfer_config=transfer)


@pytest.mark.parametrize(
    ("on_cpu", "mla", "bits", "said"),
    [
        (True, True, 16, r"kv_tier.gib=2.0.*MLA"),
        (False, True, 8, "kv_tier.bits=8"),
        (True, False, 16, ""),
        (True, False, 8, ""),
        (False, True, 16, ""),
    ],
)
def test_mla_is_refused_where_it_would_go_wrong(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, mla: bool, bits: int, said: str
) -> None:
    on_device(monkeypatch, on_cpu)
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        refuse_model(config(mla=mla, bits=bits))


def sized(gib: float, **parallel: Any) -> Any:
    found = {"nnodes": 1, "distributed_executor_backend": "mp", "data_parallel_size_local": 1, **parallel}
    transfer = transfer_config(KvTierConfig(gib=gib))
    return SimpleNamespace(parallel_config=SimpleNamespace(**found), kv_transfer_config=transfer)


@pytest.mark.parametrize(
    ("gib", "parallel", "refused"),
    [
        (3.0, {}, False),
        (5.0, {}, True),
        (3.0, {"data_parallel_size_local": 2}, True),
        (5.0, {"nnodes": 2}, False),
        (5.0, {"distributed_executor_backend": "ray"}, False),
    ],
    ids=["fits", "too-much", "too-much-for-two-replicas", "several-machines", "ray"],
)
def test_more_than_is_left_for_all_workers_is_refused(
    monkeypatch: pytest.MonkeyPatch, gib: float, parallel: dict[str, Any], refused: bool
) -> None:
    """Each worker compared its own share with all that the machine had left, whatever its container allowed."""
    monkeypatch.setattr("vllm_ext.kv.connector.support.free_bytes", lambda: 4 * 2**30)
    with pytest.raises(ConfigError, match=r"kv_tier.gib=.*4 GiB are free") if refused else nullcontext():
        refuse_size(sized(gib, **parallel))


@pytest.mark.parametrize("replicas", [1, 4])
def test_replicas_share_the_disk(tmp_path: Path, replicas: int) -> None:
    """Each took all of it: vLLM tells the engines of a dense model that there is one replica."""
    tier = KvTierConfig(gib=1.0, disk_dir=str(tmp_path), disk_gib=8.0)
    transfer, parallel = transfer_config(tier), SimpleNamespace(data_parallel_size=replicas)
    whole: Any = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)
    share_disk(whole)
    shared = tier_of(transfer.kv_connector_extra_config)
    assert shared.disk_gib == 8.0 / replicas
    assert (shared.disk_dir, shared.gib) == (str(tmp_path), 1.0), "host memory is of each"


# --- the compiler -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_cpu", "bits", "refused"), [(True, 8, True), (True, 16, False), (False, 8, False)])
def test_8_bits_without_a_compiler_are_refused_with_the_remedy_where_they_need_one(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, bits: int, refused: bool
) -> None:
    def missing() -> str:
        raise native.CompilerMissing("g++ was not found on the path; install it")

    monkeypatch.setattr(native, "compiler_version", missing)
    on_device(monkeypatch, on_cpu)
    said = r"kv_tier.bits=8: needs a C\+\+ compiler: g\+\+ was not .*; or use 16"
    with pytest.raises(ConfigError, match=said) if refused else nullcontext():
        refuse_model(config(mla=False, bits=bits))


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "mla", "hybrid", "size"),
    [(False, False, False, BLOCK_TOKENS), (True, False, False, 128), (False, True, False, 128),
     (False, False, True, 128)],
    ids=["nobody said", "the user said", "mla", "hybrid"],
)  # fmt: skip
def test_blocks_are_of_the_tiers_size_where_nobody_else_chose(given: bool, mla: bool, hybrid: bool, size: int) -> None:
    cache = SimpleNamespace(block_size=128, user_specified_block_size=given)
    model = SimpleNamespace(use_mla=mla, is_hybrid=hybrid)
    choose_block_size(SimpleNamespace(cache_config=cache, model_config=model))  # type: ignore[arg-type]
    assert cache.block_size == size
    assert cache.user_specified_block_size == (given or size == BLOCK_TOKENS), "so that no worker chooses again"


# --- the size that nobody chose ------------------------------------------------------------------------------------

BLOCK_BYTES = 2 * 32 * 8 * 128 * 2 * 64


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
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], on_cpu: bool, gib: float | str | None
) -> None:
    """On vLLM's CPU backend copies take the model's cycles; under alise a tier has not been shown to gain."""
    on_device(monkeypatch, on_cpu)
    assert with_host_memory(parse(options), None).kv_tier.gib == gib


def test_another_connector_takes_its_place_and_that_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(monkeypatch, False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, "vllm.vllm_ext"):
        assert with_host_memory(parse({"system": "pensieve"}), object()).kv_tier.gib == 0.0
    assert "another connector" in caplog.text
    assert "--kv-tier-gib N" in caplog.text


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
    spec = TierSpec(offloading_config(extra), device_blocks=10)
    assert spec.num_chunks == (num_blocks or 2**30 // spec.geometry.chunk_bytes)
