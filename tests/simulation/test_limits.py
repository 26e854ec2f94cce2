"""Limits that a description leaves open are those that vLLM takes on the simulated device."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from vllm_ext.simulation.cost.devices import DEVICES, Device
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.spec import EngineSpec, Limits, limits_of


def vllms(
    monkeypatch: pytest.MonkeyPatch, device: Device, tensor_parallel: int, max_model_len: int, **given: int
) -> Limits:
    """What vLLM's own function sets for its API server, told that it runs on a device."""
    platform = Mock()
    platform.get_device_total_memory.return_value = device.memory_bytes
    platform.get_device_name.return_value = f"NVIDIA {device.name.upper()}"
    platform.is_tpu.return_value = False
    platform.is_cpu.return_value = device.name == "cpu"
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    args = EngineArgs(model="m", tensor_parallel_size=tensor_parallel, enable_chunked_prefill=True, **given)
    args._set_default_max_num_seqs_and_batched_tokens_args(
        UsageContext.OPENAI_API_SERVER,
        SimpleNamespace(max_model_len=max_model_len, is_multimodal_model=False),
        SimpleNamespace(use_batched_dp_moe=False),
    )
    return Limits(max_model_len, args.max_num_seqs, args.max_num_batched_tokens)


@pytest.mark.parametrize("tensor_parallel", [1, 4])
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize(
    "given",
    [{}, {"max_num_seqs": 4}, {"max_num_batched_tokens": 100}, {"max_num_seqs": 9, "max_num_batched_tokens": 77}],
    ids=str,
)
def test_limits_are_those_of_vllms_own_function(
    monkeypatch: pytest.MonkeyPatch, device: Device, tensor_parallel: int, given: dict[str, int]
) -> None:
    hardware = HardwareSpec(model="llama-3.1-8b", device=device.name, tensor_parallel=tensor_parallel)
    for context in (64, 4096):
        ours = limits_of(EngineSpec(max_model_len=context, **given), hardware.resolve())
        assert ours == vllms(monkeypatch, device, tensor_parallel, context, **given)


@pytest.mark.parametrize(
    ("model", "device", "expected"),
    [
        ("opt-13b", "a100-40", (2048, 256, 2048)),
        ("llama-2-7b", "a100-80", (4096, 256, 2048)),
        ("llama-3.1-8b", "h100", (131_072, 1024, 8192)),
        ("mistral-7b", "cpu", (32_768, 128, 2048)),
    ],
)
def test_context_is_the_models_and_the_rest_the_devices(
    model: str, device: str, expected: tuple[int, int, int]
) -> None:
    assert limits_of(EngineSpec(), HardwareSpec(model=model, device=device).resolve()) == expected
