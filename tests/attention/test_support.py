"""What our kernel can't serve is refused, or with auto left to vLLM's, with the reason, before an engine starts."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_ext.attention import slot, support
from vllm_ext.config import parse
from vllm_ext.config.errors import ConfigError
from vllm_ext.kernels import native
from vllm_ext.launch import features
from vllm_ext.patches import attention_slot


def engine(**changes: Any) -> Any:
    """A configuration that our kernel can serve, but for the changes: ``part_field=value``."""
    parts: dict[str, dict[str, Any]] = {
        "model": {
            "use_mla": False, "is_hybrid": False, "is_attention_free": False, "is_encoder_decoder": False,
            "runner_type": "generate", "head_size": 64, "heads": 8, "kv_heads": 2, "is_mm_prefix_lm": False,
            "rswa_window": None, "dtype": torch.bfloat16,
        },
        "parallel": {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1},
        "cache": {"cache_dtype": "auto", "block_size": 32, "user_specified_block_size": True},
        "attention": {"backend": None, "backend_per_kind": {}, "use_non_causal": False},
        "kv_transfer": {},
    }  # fmt: skip
    for name, value in changes.items():
        part, _, field = name.partition("_")  # no change of kv_transfer is needed
        assert field in parts[part]
        parts[part][field] = value
    model = parts["model"]
    model["get_head_size"] = lambda: model["head_size"]
    model["get_num_attention_heads"] = lambda _: model["heads"]
    model["get_num_kv_heads"] = lambda _: model["kv_heads"]
    model["get_sliding_window"] = lambda: None
    return SimpleNamespace(**{f"{name}_config": SimpleNamespace(**fields) for name, fields in parts.items()})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_use_mla": True}, "MLA"),
        ({"model_is_hybrid": True}, "hybrid, Mamba"),
        ({"model_is_attention_free": True}, "hybrid, Mamba"),
        ({"model_is_encoder_decoder": True}, "encoder"),
        ({"model_runner_type": "pooling"}, "no generation"),
        ({"attention_use_non_causal": True}, "what comes later"),
        ({"model_is_mm_prefix_lm": True}, "within images"),
        ({"model_rswa_window": 128}, "R-SWA"),
        ({"cache_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 is quantised"),
        ({"model_head_size": 80}, "heads of 80 numbers"),
        ({"model_head_size": 1024}, "heads of 1024 numbers"),
        ({"model_heads": 130, "model_kv_heads": 1}, "130 query heads share a KV head"),
        ({"cache_block_size": 16}, "--block-size 16 is no multiple of 32"),
        ({"parallel_decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_prefill_context_parallel_size": 2}, "context parallelism"),
        ({"attention_backend": AttentionBackendEnum.FLASHINFER}, "--attention-backend FLASHINFER was given"),
        ({"attention_backend_per_kind": {"full_attention": 1}}, "backend_per_kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_serve_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    config = engine(**changes)
    before = config.attention_config.backend
    with pytest.raises(ConfigError) as caught:
        support.let_own_kernel_serve(config, "own")
    assert str(caught.value).startswith("vllm_ext.attention.kernel='own': must be stock or auto: ")
    assert reason in str(caught.value)
    assert config.attention_config.backend is before


@pytest.mark.parametrize("backend", [None, AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM])
@pytest.mark.parametrize("kernel", ["own", "auto"])
def test_backend_is_chosen_where_it_can_serve(backend: Any, kernel: str) -> None:
    config = engine(attention_backend=backend)
    assert support.let_own_kernel_serve(config, kernel) == kernel
    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM


def test_auto_leaves_to_vllm_what_it_cannot_serve_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    config = engine(model_use_mla=True)
    logger = logging.getLogger("vllm.vllm_ext")
    logger.addHandler(caplog.handler)
    assert support.let_own_kernel_serve(config, "auto") == "stock"
    logger.removeHandler(caplog.handler)
    assert config.attention_config.backend is None
    assert "vLLM's kernel serves all steps: the model has no keys and values (MLA)" in caplog.text


def test_auto_leaves_to_vllm_what_was_not_verified(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = [dataclasses.replace(hook, verified={"0.0.1": "0" * 16}) for hook in attention_slot.HOOKS]
    monkeypatch.setattr(attention_slot, "HOOKS", changed)
    monkeypatch.setattr(support, "logger", logging.getLogger("told"))
    config = engine()
    chosen = features.choose_attention_kernel(parse({"attention": {"kernel": "auto"}}), config)
    assert chosen.attention.kernel == "stock"
    assert config.attention_config.backend is None
    assert "vLLM's kernel serves all steps: vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls is not" in caplog.text
    with pytest.raises(ConfigError, match=r"kernel='own': must be stock or auto: .*get_attn_backend_cls is not"):
        features.choose_attention_kernel(parse({"attention": {"kernel": "own"}}), config)


class Flash:
    """In the place of vLLM's backend: takes heads of up to 256 numbers, in 16 bits."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def validate_configuration(*, head_size: int, dtype: torch.dtype, **_: Any) -> list[str]:
        found = {"head_size not supported": head_size > 256, "dtype not supported": dtype == torch.float32}
        return [reason for reason, is_so in found.items() if is_so]


class Cuda:
    """A platform that says it is CUDA, on Hopper; for all else ask the one that is there."""

    capability = DeviceCapability(9, 0)

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cpu(self) -> bool:
        return False

    def get_device_capability(self) -> DeviceCapability:
        return self.capability


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    platform = Cuda(vllm.platforms.current_platform)
    monkeypatch.setattr(vllm.platforms, "current_platform", platform, raising=False)
    monkeypatch.setattr(slot, "stock_cuda_backend", lambda: Flash)
    return platform


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_dtype": torch.float32}, "FLASH_ATTN, .* dtype not supported (--dtype float32, heads of 64 numbers)"),
        ({"model_head_size": 512}, "FLASH_ATTN, .* head_size not supported (--dtype bfloat16, heads of 512 numbers)"),
        ({"cache_block_size": 48}, "--block-size 48 is no power of two"),
        ({"attention_backend": AttentionBackendEnum.FLASHINFER}, "--attention-backend FLASHINFER was given"),
    ],
    ids=["fp32", "heads", "block", "backend"],
)
def test_on_cuda_what_vllms_own_backend_cannot_serve_is_refused_in_one_line(changes: Any, reason: str) -> None:
    config = engine(**changes)
    with pytest.raises(ConfigError, match=r"^vllm_ext\.attention\.kernel='own': must be stock or auto: ") as caught:
        support.let_own_kernel_serve(config, "own")
    first, _, rest = reason.partition(" .* ")
    assert first in str(caught.value)
    assert str(caught.value).endswith(rest)


def test_on_a_device_older_than_ampere_ours_is_refused(on_cuda: Cuda) -> None:
    on_cuda.capability = DeviceCapability(7, 5)
    assert "of compute capability 7.5, and 8.0 is the least" in (support.obstacle(engine()) or "")


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    "changes", [{}, {"model_dtype": torch.float32}, {"model_use_mla": True}], ids=["", "fp32", "MLA"]
)
def test_on_cuda_auto_takes_no_slot_so_that_vllm_chooses_its_own_backend(changes: Any) -> None:
    """As with ours in the slot it would have no full graphs of decode, and nothing in return."""
    config = engine(**changes)
    assert support.let_own_kernel_serve(config, "auto") == "stock"
    assert config.attention_config.backend is None
    assert support.let_own_kernel_serve(engine(), "own") == "own"


def test_batch_invariance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "batch invariance" in (support.obstacle(engine()) or "")


def test_missing_compiler_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    monkeypatch.setattr(support, "compiler_version", native.compiler_version.__wrapped__)
    assert "install it" in (support.obstacle(engine()) or "")


def test_plugin_that_holds_the_slot_is_named_and_left_there() -> None:
    member = AttentionBackendEnum.CUSTOM
    before = member.get_path() if member.is_overridden() else None
    register_backend(member, "theirs.Backend")
    try:
        slot.take_slot()
        assert member.get_path() == "theirs.Backend"
        assert "slot for attention backends: theirs.Backend" in (support.obstacle(engine()) or "")
    finally:
        member.clear_override()
        if before is not None:
            register_backend(member, before)
    assert slot.other_holder() is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"alibi": True}, "ALiBi"),
        ({"sinks": True}, "sinks"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ({"attn_type": "encoder"}, "encoder"),
    ],
)
def test_layers_it_cannot_serve(changes: dict[str, Any], reason: str) -> None:
    fine: dict[str, Any] = {"alibi": False, "sinks": False, "kv_cache_dtype": "auto", "attn_type": "decoder"}
    assert support.layer_obstacle(**fine) is None
    assert reason in (support.layer_obstacle(**{**fine, **changes}) or "")
