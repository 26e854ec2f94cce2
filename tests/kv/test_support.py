"""What the tier is refused for, in the front end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.kv_tier import KvTierConfig
from vllm_ext.kernels import native
from vllm_ext.kv.connector.options import tier_of, transfer_config
from vllm_ext.kv.connector.support import (
    BLOCK_TOKENS,
    choose_block_size,
    refuse_missing_compiler,
    refuse_model,
    refuse_size,
    share_disk,
)


def config(*, mla: bool, bits: int) -> Any:
    transfer = transfer_config(KvTierConfig(gib=2.0, bits=bits))
    return SimpleNamespace(model_config=SimpleNamespace(use_mla=mla), kv_transfer_config=transfer)


@pytest.mark.parametrize(
    ("on_cpu", "bits", "said"), [(True, 16, r"kv_tier.gib=2.0.*MLA"), (False, 8, "kv_tier.bits=8")]
)
def test_mla_is_refused_where_it_would_go_wrong(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, bits: int, said: str
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: on_cpu)
    with pytest.raises(ConfigError, match=said):
        refuse_model(config(mla=True, bits=bits))


@pytest.mark.parametrize(("on_cpu", "mla", "bits"), [(True, False, 16), (True, False, 8), (False, True, 16)])
def test_others_are_taken(monkeypatch: pytest.MonkeyPatch, on_cpu: bool, mla: bool, bits: int) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: on_cpu)
    refuse_model(config(mla=mla, bits=bits))
    assert config(mla=mla, bits=bits).model_config.use_mla is mla


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
    if not refused:
        refuse_size(sized(gib, **parallel))
        return
    with pytest.raises(ConfigError, match=r"kv_tier.gib=.*4 GiB are free"):
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


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise native.CompilerMissing("g++ was not found on the path; install it")

    monkeypatch.setattr(native, "compiler_version", missing)


@pytest.mark.usefixtures("no_compiler")
def test_8_bits_without_a_compiler_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: True)
    with pytest.raises(ConfigError, match=r"kv_tier.bits=8: needs a C\+\+ compiler: g\+\+ was not .*; or use 16"):
        refuse_missing_compiler(config(mla=False, bits=8))


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(("on_cpu", "bits"), [(True, 16), (False, 8)])
def test_what_needs_no_compiler_is_taken_without(monkeypatch: pytest.MonkeyPatch, on_cpu: bool, bits: int) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: on_cpu)
    asked = config(mla=False, bits=bits)
    refuse_missing_compiler(asked)
    assert tier_of(asked.kv_transfer_config.kv_connector_extra_config).bits == bits


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
