"""The roofline: physical floors hold, work never gets cheaper, and papers' observations come out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.simulation.cost.devices import DEVICES, Device
from vllm_ext.simulation.cost.models import MODELS
from vllm_ext.simulation.cost.roofline import Roofline, pivot_tokens
from vllm_ext.simulation.cost.step_shape import StepShape


def roofline(model: str, device: str | Device, split: int = 1) -> Roofline:
    return Roofline(MODELS[model], DEVICES[device] if isinstance(device, str) else device, split)


decode, prefill = StepShape.of_decodes, StepShape.of_chunk


@pytest.mark.parametrize(
    ("batch", "context", "floor_ms"), [(1, 1024, 3.15), (64, 2048, 6.7), (256, 1024, 10.3), (256, 4096, 31.8)]
)
def test_decode_of_an_8b_model_on_an_h200_lies_above_the_floor_of_its_memory(
    batch: int, context: int, floor_ms: float
) -> None:
    """Floor = (weights + KV) / peak bandwidth, worked by hand."""
    floor = (15.0e9 + batch * context * 131_072) / 4.8e12
    assert floor == pytest.approx(floor_ms / 1e3, rel=0.03)
    assert 1.15 < roofline("llama-3.1-8b", "h200").device_s(decode(batch, context)) / floor < 1.6


@pytest.mark.parametrize(("tokens", "measured_ms"), [(256, 7.2), (2048, 40.0), (8192, 192.6)])
def test_prefill_of_an_8b_model_on_an_h200_takes_about_what_was_measured(tokens: int, measured_ms: float) -> None:
    """By `benchmarks/results/device/token_budget.json`."""
    time_ms = roofline("llama-3.1-8b", "h200").device_s(prefill(tokens)) * 1e3
    assert time_ms == pytest.approx(measured_ms, rel=0.12)


def test_a_decode_step_by_hand() -> None:
    """OPT-13B, one request with 1000 tokens of context, on a device whose peaks are all reached."""
    device = replace(
        DEVICES["a100-40"], memory_efficiency=1.0, weight_efficiency=1.0, unhidden=0.0, layer_gap_s=0.0,
        step_launch_s=0.0, memory_bytes_per_s=1e12,
    )  # fmt: skip
    weights = 2 * (40 * 12 * 5120**2 + 50_272 * 5120)
    elements = 40 * (8 * 5120 + 2 * 2 * 5120 + 2 * 20_480)
    traffic = weights + 1000 * 819_200 + 819_200 + 2 * elements + 10 * 50_272
    assert roofline("opt-13b", device).device_s(decode(1, 1000)) == pytest.approx(traffic / 1e12)


@pytest.mark.parametrize(
    ("model", "device", "split", "low", "high"),
    [
        # AccelGen: throughput nearly saturates at 768 tokens.
        ("opt-13b", "a100-80", 1, 0.8 * 768, 1.2 * 768),
        # AccelGen measured 1280; narrower matrix products of a split model, which are not modelled, would explain it.
        ("opt-175b", "a100-80", 8, 512, 1280),
    ],
)
def test_the_pivot_forward_size_is_near_or_below_accelgens(
    model: str, device: str, split: int, low: float, high: float
) -> None:
    assert low <= pivot_tokens(roofline(model, device, split)) <= high


A100 = "a100-80"


@pytest.mark.parametrize(
    ("more", "less", "low", "high"),
    [
        # Sarathi-Serve: in some cases 257 tokens take 32 % longer than 256.
        ((("llama-2-70b", A100, 4), prefill(257)), (("llama-2-70b", A100, 4), prefill(256)), 1.2, 1.45),
        # Sarathi-Serve, figure 5: the linear cost of one decode token is nearly that of 128 prefill tokens.
        ((("mistral-7b", A100), prefill(128)), (("mistral-7b", A100), decode(1, 128)), 1.0, 1.3),
        ((("mistral-7b", A100), prefill(1024)), (("mistral-7b", A100), decode(1, 128)), 5, 99),
        # Linear time is flat up to the balance point, and then grows with the tokens.
        ((("opt-13b", A100), decode(16, 1)), (("opt-13b", A100), decode(1, 1)), 1.0, 1.05),
        ((("opt-13b", A100), decode(2048, 1)), (("opt-13b", A100), decode(1024, 1)), 1.8, 2.1),
        # A split gains where weights or tokens are many.
        ((("opt-13b", A100, 2), decode(1, 100)), (("opt-13b", A100), decode(1, 100)), 0.5, 0.65),
        ((("opt-13b", A100, 2), prefill(2048)), (("opt-13b", A100), prefill(2048)), 0.5, 0.65),
    ],
)
def test_steps_compare_as_papers_saw(more: Any, less: Any, low: float, high: float) -> None:
    (cost, shape), (other_cost, other_shape) = more, less
    assert low < roofline(*cost).device_s(shape) / roofline(*other_cost).device_s(other_shape) < high


def test_graphs_spare_small_decodes_the_launches_and_prefill_pays_them() -> None:
    device = replace(DEVICES["h200"], layer_launch_s=1e-3, graph_max_requests=8)
    cost, eager = roofline("opt-2.7b", device), roofline("opt-2.7b", replace(device, graph_max_requests=0))
    launches = 32 * 1e-3 + device.step_launch_s
    assert cost.device_s(decode(8, 10)) < launches / 2
    assert cost.device_s(decode(9, 10)) == pytest.approx(launches)
    assert cost.device_s(prefill(8)) == pytest.approx(launches)
    assert eager.device_s(decode(8, 10)) == pytest.approx(launches)


def test_launches_that_do_not_run_ahead_add_up() -> None:
    device = replace(DEVICES["cpu"], layer_launch_s=0.0)
    slow = replace(device, layer_launch_s=1e-3)
    shape = prefill(64)
    difference = roofline("opt-2.7b", slow).device_s(shape) - roofline("opt-2.7b", device).device_s(shape)
    assert difference == pytest.approx(32e-3)


def test_parallel_attention_spares_one_of_two_all_reduces() -> None:
    device = replace(DEVICES["a100-80"], link_latency_s=1e-3)
    twice = replace(MODELS["pythia-12b"], parallel_attention=False)
    once_s = Roofline(MODELS["pythia-12b"], device, 2).device_s(decode(1, 1))
    assert Roofline(twice, device, 2).device_s(decode(1, 1)) - once_s == pytest.approx(36e-3, rel=0.02)


def test_an_all_reduce_takes_the_ring_of_its_bytes() -> None:
    """2 x 40 all-reduces over two devices: each moves 2 * 1/2 of 1000 x 5120 x 2 bytes; 100 GB/s against none."""
    device = replace(DEVICES["a100-80"], link_efficiency=1.0, link_bytes_per_s=100e9)
    free = replace(device, link_bytes_per_s=1e30)
    shape = prefill(1000)
    extra = roofline("opt-13b", device, 2).device_s(shape) - roofline("opt-13b", free, 2).device_s(shape)
    assert extra == pytest.approx(80 * 1000 * 5120 * 2 / 100e9)


def test_a_short_chunk_after_a_long_context_pays_for_reading_it() -> None:
    """Two tokens after 100k: the KV of 800 KiB per token, read once, outweighs the flops of the pairs."""
    device = replace(DEVICES["a100-80"], memory_efficiency=1.0)
    cost = roofline("opt-13b", device)
    nothing = prefill(2)._replace(prefill_context_tokens=0, prefill_pairs=0.0)
    extra = cost.device_s(prefill(2, 100_000)) - cost.device_s(nothing)
    assert extra == pytest.approx(100_002 * 819_200 / 2039e9)


IDEAL = replace(
    DEVICES["a100-80"], memory_efficiency=1.0, weight_efficiency=1.0, gemm_efficiency=1.0, attention_efficiency=1.0,
    unhidden=0.0, layer_gap_s=0.0, layer_launch_s=0.0, step_launch_s=0.0, peak_flops=1e14, memory_bytes_per_s=1e12,
)  # fmt: skip
"""All peaks are reached, and nothing is launched."""
FAST_MEMORY, FAST_COMPUTE = replace(IDEAL, memory_bytes_per_s=1e30), replace(IDEAL, peak_flops=1e30)
MIXTRAL_LINEAR = 32 * (4096 * 128 * 80 + 4096 * 8)
MIXTRAL_EXPERT = 32 * 3 * 4096 * 14_336


def test_a_decode_step_reads_the_experts_that_it_reaches() -> None:
    """Mixtral, two requests with 1000 tokens of context: each token chooses 2 of 8, together 3.5 are expected."""
    weights = 2 * (MIXTRAL_LINEAR + 8 * (1 - 0.75**2) * MIXTRAL_EXPERT + 32_000 * 4096)
    assert 8 * (1 - 0.75**2) == 3.5
    activation = 3 * 2 * 14_336 + 3 * 4096  # of two experts, and the sum of their outputs
    elements = 32 * (8 * 4096 + 2 * 40 * 128 + activation)
    traffic = weights + 2 * (1001 * 131_072 + 2 * elements + 10 * 32_000)
    assert roofline("mixtral-8x7b", FAST_COMPUTE).device_s(decode(2, 1000)) == pytest.approx(traffic / 1e12)


def test_a_long_prompt_reads_every_expert_once() -> None:
    device = replace(FAST_COMPUTE, memory_bytes_per_s=1e12)
    none = replace(MODELS["mixtral-8x7b"], experts=replace(MODELS["mixtral-8x7b"].experts, routed=2))  # type: ignore[type-var]
    shape = prefill(2048)
    extra = roofline("mixtral-8x7b", device).device_s(shape) - Roofline(none, device).device_s(shape)
    assert extra == pytest.approx(2 * (6 * MIXTRAL_EXPERT + 32 * 4096 * 6) / 1e12)  # and six columns of the router


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        (8192, 2 * 8192),  # 2048 rows for each of the eight experts: whole tiles
        (60, 8 * 16),  # 15 for each, padded to 16 by itself
        (1, 2 * 16),
    ],
)
def test_compute_is_that_of_the_active_experts_with_their_own_tiles(tokens: int, rows: int) -> None:
    model = MODELS["mixtral-8x7b"]
    tile = -(-tokens // 16) * 16
    head = 32_000 * 4096 * 16
    flops = 2 * (MIXTRAL_LINEAR * tile + MIXTRAL_EXPERT * rows + head)
    flops += model.attention_flops_per_pair * tokens * (tokens + 1) / 2
    assert roofline(model.name, FAST_MEMORY).device_s(prefill(tokens)) == pytest.approx(flops / 1e14, rel=1e-5)


def test_without_tiles_just_the_rows_of_the_active_experts_are_computed() -> None:
    device = replace(FAST_MEMORY, tile_tokens=1)
    shape = decode(3, 1)._replace(num_sampled=0, decode_context_tokens=0)
    flops = 2 * 3 * (MIXTRAL_LINEAR + 2 * MIXTRAL_EXPERT)
    assert roofline("mixtral-8x7b", device).device_s(shape) == pytest.approx(flops / 1e14)


def test_a_large_batch_of_a_mixture_costs_more_than_its_active_parameters_say() -> None:
    """Qwen3-30B-A3B: one token reads 8 of 128 experts, and 64 tokens nearly all of them."""
    cost = roofline("qwen3-30b-a3b", "h100")
    assert 5 < cost.device_s(decode(64, 100)) / cost.device_s(decode(1, 100)) < 12


def test_decode_of_latent_attention_reads_the_compressed_vectors_and_computes_on_them() -> None:
    model, shape = MODELS["deepseek-v3"], StepShape(0, 0, 0, 0, 1000, 0, 0.0)
    assert roofline(model.name, FAST_COMPUTE, 8).device_s(shape) - roofline(model.name, FAST_COMPUTE, 8).device_s(
        shape._replace(decode_context_tokens=0)
    ) == pytest.approx(1000 * 61 * 576 * 2 / 1e12)  # all of it on each of the eight devices
    compute = roofline(model.name, FAST_MEMORY, 8)
    extra = compute.device_s(shape) - compute.device_s(shape._replace(decode_context_tokens=0))
    assert extra == pytest.approx(1000 * 2 * 61 * 128 * (576 + 512) / 8e14)


@pytest.mark.parametrize("shape", [decode(8, 500), prefill(300, 2000), decode(8, 500).plus(prefill(300, 2000))])
def test_operators_are_told_as_a_step_counts_them(shape: StepShape) -> None:
    """Each is what a step is shorter by where that operator costs nothing."""
    model, device = MODELS["yi-34b"], replace(DEVICES["a100-80"], unhidden=0.0, layer_launch_s=0.0)
    cost = Roofline(model, device, 2)
    alone = shape._replace(decode_context_tokens=0, prefill_context_tokens=0, prefill_pairs=0.0)
    assert cost.attention_s(shape) == pytest.approx(cost.device_s(shape) - cost.device_s(alone))
    free = Roofline(model, replace(device, link_latency_s=0.0, link_bytes_per_s=1e30), 2)
    assert cost.all_reduce_s(shape.num_tokens) == pytest.approx(cost.device_s(shape) - free.device_s(shape))
    twice = Roofline(replace(model, weight_bytes_per_parameter=4.0), device, 2)
    reads = twice.linear_s(1) - cost.linear_s(1)
    assert reads == pytest.approx(2 * model.linear_parameters / 2 / (2039e9 * 0.75))
    assert cost.linear_s(4096) == pytest.approx(2 * model.linear_parameters * 4096 / (2 * 312e12 * 0.73))


def test_host_time_grows_with_the_requests() -> None:
    cost = Roofline(MODELS["opt-13b"], DEVICES["v100"], host_base_s=1e-3, host_per_request_s=1e-5)
    assert cost.host_s(decode(100, 5)) == pytest.approx(2e-3)


def test_a_chunk_without_a_sampled_row_skips_the_output_layer() -> None:
    cost = roofline("llama-3.1-8b", "h200")
    inner = prefill(512)._replace(num_sampled=0)
    head_floor = 2 * 128_256 * 4096 / 4.8e12
    assert cost.device_s(prefill(512)) - cost.device_s(inner) > head_floor


@st.composite
def shapes(draw: st.DrawFn) -> StepShape:
    shape = decode(draw(st.integers(0, 600)), draw(st.integers(1, 4000)))
    least = not shape.num_requests
    for tokens, held in draw(
        st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 5000)), min_size=least, max_size=4)
    ):
        shape = shape.plus(prefill(tokens, held, sampled=draw(st.booleans())))
    return shape


COSTS = st.sampled_from(
    [
        roofline("opt-13b", "a100-40"),
        roofline("llama-3.1-8b", "h200"),
        roofline("yi-34b", "a100-80", 2),
        roofline("opt-2.7b", "cpu"),
        roofline("mixtral-8x7b", "l40s", 4),
        roofline("qwen3-30b-a3b", "cpu"),
        roofline("deepseek-v3", "mi300x", 8),
    ]
)


@given(shapes(), COSTS)
def test_steps_take_a_positive_time(shape: StepShape, cost: Roofline) -> None:
    assert cost.device_s(shape) > 0


@given(
    shapes(),
    COSTS,
    st.one_of(
        st.builds(decode, st.just(1), st.integers(1, 2000)),
        st.builds(prefill, st.integers(1, 700), st.integers(0, 3000), sampled=st.just(False)),
        st.integers(0, 5000).map(lambda context: StepShape(0, 0, 0, 0, context, context, float(context))),
    ),
)
def test_more_work_never_makes_a_step_cheaper(shape: StepShape, cost: Roofline, more: StepShape) -> None:
    """Another decode, another chunk, more context."""
    assert cost.device_s(shape.plus(more)) >= cost.device_s(shape)


@given(
    shapes(),
    st.sampled_from(
        [
            ("a100-40", "a100-80"),
            ("a100-80", "h100"),
            ("h100", "h200"),
            ("v100", "a100-40"),
            ("h200", "b200"),
            ("l4", "a10"),
            ("a10", "l40s"),
        ]
    ),
)
def test_a_bigger_device_is_never_slower(shape: StepShape, pair: tuple[str, str]) -> None:
    small, big = pair
    assert roofline("opt-13b", big).device_s(shape) <= roofline("opt-13b", small).device_s(shape)


@given(
    shapes(),
    st.sampled_from(
        [
            "peak_flops",
            "memory_bytes_per_s",
            "link_bytes_per_s",
            "gemm_efficiency",
            "memory_efficiency",
            "weight_efficiency",
        ]
    ),
    st.floats(1.0, 1.15),
)
def test_a_better_peak_or_efficiency_never_slows_down(shape: StepShape, field: str, factor: float) -> None:
    device = DEVICES["a100-80"]
    better = replace(device, **{field: getattr(device, field) * factor})
    slower = roofline("yi-34b", device, 2).device_s(shape)
    assert roofline("yi-34b", better, 2).device_s(shape) <= slower * (1 + 1e-12)


@given(shapes(), st.sampled_from([2, 4, 8]))
def test_a_split_gains_at_most_its_devices(shape: StepShape, split: int) -> None:
    whole = roofline("llama-3.1-8b", "a100-80").device_s(shape)
    assert roofline("llama-3.1-8b", "a100-80", split).device_s(shape) >= whole / split * (1 - 1e-12)
