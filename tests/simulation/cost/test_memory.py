"""KV blocks: what the weights leave, near what was published, and a remedy where nothing is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.simulation.cost.models import MODELS
from vllm_ext.simulation.cost.spec import HardwareSpec, activation_bytes
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec, limits_of, resolve


def hardware(model: str = "opt-13b", device: str = "a100-40", split: int = 1, **more: object) -> HardwareSpec:
    return HardwareSpec.model_validate({"model": model, "device": device, "tensor_parallel": split, **more})


def num_kv_blocks(spec: HardwareSpec, block_size: int, *, tokens: int = 2048, seats: int = 256) -> int:
    return spec.resolve().num_kv_blocks(block_size, max_num_batched_tokens=tokens, max_num_seqs=seats)


@pytest.mark.parametrize(
    ("model", "device", "split", "slots"),
    [("opt-13b", "a100-40", 1, 15_700), ("opt-66b", "a100-40", 4, 9_700), ("opt-175b", "a100-80", 8, 60_100)],
)
def test_slots_lie_near_and_below_those_vllms_paper_had(model: str, device: str, split: int, slots: int) -> None:
    """Its table 1; what today's engine reserves for graphs and libraries comes off."""
    ours = 16 * num_kv_blocks(hardware(model, device, split), 16)
    assert 0.75 * slots < ours <= slots


def test_blocks_by_hand() -> None:
    spec = hardware(gpu_memory_utilization=0.9)
    weights = 2 * (40 * 12 * 5120**2 + 50_272 * 5120 + 2050 * 5120)
    reserve = (512 << 20) + 2048 * (3 * 5120 + 2 * 20_480) * 2 + 8 * 256 * 50_272
    free = 0.9 * 40_536 * 2**20 - weights - reserve
    assert num_kv_blocks(spec, 16) == int(free // (16 * 819_200))


def test_blocks_of_a_mixture_are_what_all_its_experts_leave() -> None:
    """Qwen3-30B-A3B on an H200: 61.06 GB of weights, though a token uses a ninth of them."""
    spec = hardware("qwen3-30b-a3b", "h200")
    weights = 2 * (48 * (2048 * 128 * 72 + 2048 * 128 + 128 * 3 * 2048 * 768) + 2 * 151_936 * 2048)
    reserve = (512 << 20) + 2048 * (3 * 2048 + 8 * (3 * 768 + 2048)) * 2 + 8 * 256 * 151_936
    free = 0.9 * 143_771 * 2**20 - weights - reserve
    assert num_kv_blocks(spec, 16) == int(free // (16 * 98_304))


def test_blocks_of_latent_attention_hold_compressed_vectors_on_every_device() -> None:
    spec = hardware("deepseek-v3", "h200", 8, kv_memory_bytes=10**10)
    assert spec.resolve().kv_bytes_per_block(64) == 64 * 61 * (512 + 64) * 2
    assert num_kv_blocks(spec, 64) == 10**10 // (64 * 70_272)


def test_kv_memory_that_is_given_counts_alone() -> None:
    """AccelGen gives OPT-13B 12 GB of KV."""
    assert num_kv_blocks(hardware(kv_memory_bytes=12 * 10**9), 16) == 12 * 10**9 // (16 * 819_200)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (hardware(kv_memory_bytes=1000), "kv_memory_bytes=1000: one block needs 13107200 bytes"),
        (hardware("opt-66b"), "opt-66b does not fit on a100-40 .* GiB per device are missing .* that fits is 4"),
        # Five devices would hold it, but 96 heads in 5 parts are not allowed.
        (hardware("opt-175b", "a100-80", 4), "the smallest tensor_parallel that fits is 6"),
        (hardware("mixtral-8x7b", "h100"), r"weights \(87.0 GiB\).* the smallest tensor_parallel that fits is 2"),
        (hardware("opt-13b", gpu_memory_utilization=0.01), "no tensor_parallel is enough"),
    ],
    ids=["kv memory", "smallest split", "allowed split", "experts", "no split"],
)
def test_what_does_not_fit_says_what_is_missing_and_what_would_help(spec: HardwareSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        num_kv_blocks(spec, 16)
    if spec.model == "opt-66b":
        assert num_kv_blocks(hardware("opt-66b", split=4), 16) > 0


def test_the_missing_bytes_are_those_of_weights_reserve_and_a_block_beyond_the_memory() -> None:
    """OPT-66B with 0.2 of an A100-40: 131.4 GB of weights, 0.9 GB of reserve, 38 MB of block, 8.5 GB to use."""
    needed = MODELS["opt-66b"].weight_bytes() + activation_bytes(MODELS["opt-66b"], 2048, 256) + 16 * 2304 * 1024
    missing = (needed - 0.2 * 40_536 * 2**20) / 2**30
    assert missing == pytest.approx(115.3, abs=0.2)
    with pytest.raises(ValueError, match=f": {missing:.1f} GiB per device are missing"):
        num_kv_blocks(hardware("opt-66b", gpu_memory_utilization=0.2), 16)


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size=0"):
        num_kv_blocks(hardware(), 0)


def test_quantised_weights_leave_more_blocks() -> None:
    assert num_kv_blocks(hardware(weight_dtype_bytes=1.0), 16) > 1.9 * num_kv_blocks(hardware(), 16)


def test_larger_steps_leave_fewer_blocks() -> None:
    assert num_kv_blocks(hardware(), 16, tokens=8192) < num_kv_blocks(hardware(), 16)
    assert activation_bytes(MODELS["opt-13b"], 2048, 512) > activation_bytes(MODELS["opt-13b"], 2048, 256)


@pytest.mark.parametrize(
    "limits", [{"max_num_batched_tokens": 8192}, {"max_num_batched_tokens": 512}, {"max_num_seqs": 1024}], ids=str
)
def test_an_engine_has_the_blocks_that_its_own_limits_leave(limits: dict[str, int]) -> None:
    engine = EngineSpec(**limits)
    spec = SimulationSpec(engine=engine, hardware=hardware())
    full = limits_of(engine, hardware().resolve())
    expected = num_kv_blocks(hardware(), 16, tokens=full.max_num_batched_tokens, seats=full.max_num_seqs)
    assert resolve(spec).num_blocks == expected != num_kv_blocks(hardware(), 16)
    assert resolve(spec.model_copy(update={"engine": EngineSpec(**limits, num_blocks=700)})).num_blocks == 700


@given(st.floats(0.8, 0.99), st.floats(0.0, 0.01), st.sampled_from([1, 8, 16, 32]))
def test_more_memory_never_means_fewer_blocks(share: float, more: float, block_size: int) -> None:
    less = num_kv_blocks(hardware(gpu_memory_utilization=share), block_size)
    assert num_kv_blocks(hardware(gpu_memory_utilization=share + more), block_size) >= less
