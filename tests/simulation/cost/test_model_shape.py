"""Shapes: parameters, work and KV bytes by hand, dense, with experts and with latent attention."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest

from vllm_ext.simulation.cost.model_shape import Experts, LatentAttention, ModelShape
from vllm_ext.simulation.cost.models import MODELS


def experts(**changes: int) -> Experts:
    return Experts(**{"layers": 2, "routed": 4, "per_token": 2, "ffn": 6, **changes})


DENSE = ModelShape(
    name="dense", layers=3, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=10, gated=True, vocab=100,
    tied_embeddings=False, max_positions=64,
)  # fmt: skip
MIXED = replace(DENSE, experts=experts(shared_ffn=5))
LATENT = replace(DENSE, kv_heads=2, head_dim=5, latent=LatentAttention(kv_rank=7, rope_dim=2, nope_dim=3, value_dim=4))


def test_kv_bytes_shrink_with_the_group_until_heads_are_copied() -> None:
    model = MODELS["llama-3.1-8b"]  # 8 KV heads
    kib = [model.kv_bytes_per_token(2, split) // 1024 for split in (1, 2, 8, 16)]
    assert kib == [128, 64, 16, 16]
    assert model.kv_bytes_per_token(1) == 64 * 1024


def test_work_follows_from_the_shape() -> None:
    model = MODELS["llama-3.1-8b"]
    assert model.linear_parameters == pytest.approx(6.98e9, rel=0.001)
    assert model.head_parameters == 128_256 * 4096
    assert model.attention_flops_per_pair == 4 * 32 * 4096  # the 2 L d T^2 of a prompt, with T^2 / 2 pairs
    assert model.decode_flops_per_pair == model.attention_flops_per_pair
    assert model.active_parameters == model.parameters


@pytest.mark.parametrize(("name", "split"), [("opt-2.7b", 3), ("llama-2-13b-gqa10", 4), ("yi-34b", 16)])
def test_a_split_the_heads_do_not_allow_is_refused(name: str, split: int) -> None:
    with pytest.raises(ValueError, match=rf"tensor_parallel={split}: must divide .* heads of {name}"):
        MODELS[name].check_tensor_parallel(split)


def test_parameters_of_experts_by_hand() -> None:
    """One dense layer and two mixtures: attention of 8 x 4 x 6 heads, a router of 8 x 4, experts of 3 x 8 x 6."""
    linear = 3 * 192 + 3 * 8 * 10 + 2 * (32 + 3 * 8 * 5)
    assert MIXED.linear_parameters == linear
    assert MIXED.expert_parameters == 2 * 144
    assert MIXED.parameters == linear + 4 * 288 + 2 * 800
    assert MIXED.active_parameters == linear + 2 * 288 + 2 * 800
    assert MIXED.weight_bytes(2) == MIXED.parameters  # all of them in 2 bytes, on two devices


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-3.1-8b", 8.03e9, 8.03e9),
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("qwen3-30b-a3b", 30.5e9, 3.35e9),  # its card cuts the second to 3.3
        ("deepseek-v3", 671e9, 37.55e9),  # its paper says 37, without the embedding table of 0.93e9
    ],
)
def test_total_and_active_parameters_are_those_published(name: str, total: float, active: float) -> None:
    model = MODELS[name]
    assert (model.parameters, model.active_parameters) == (
        pytest.approx(total, rel=0.01),
        pytest.approx(active, rel=0.01),
    )


def test_experts_reached_are_the_mean_over_all_choices() -> None:
    """Every way in which two tokens can each choose two of four experts, counted."""
    choices = list(combinations(range(4), 2))
    distinct = [len({*one, *other}) for one, other in product(choices, repeat=2)]
    assert experts().reached(2) == pytest.approx(sum(distinct) / len(distinct)) == pytest.approx(3.0)


def test_experts_reached_go_from_those_of_one_token_to_all() -> None:
    mixture = experts(routed=128, per_token=8)
    reached = [mixture.reached(tokens) for tokens in range(2000)]
    assert (reached[0], reached[1]) == (0.0, pytest.approx(8.0))
    assert reached == sorted(reached)
    assert reached[-1] == pytest.approx(128.0)
    assert experts(per_token=4).reached(1) == 4.0


@pytest.mark.parametrize("per_token", [0, 5])
def test_a_token_chooses_at_least_one_expert_and_at_most_all(per_token: int) -> None:
    with pytest.raises(ValueError, match=rf"per_token={per_token}: must be between 1 and routed=4"):
        experts(per_token=per_token)


def test_latent_attention_by_hand() -> None:
    """Queries of 2 heads x 5, 9 elements cached per token and layer, keys and values of 2 heads x 7, output 2 x 4."""
    assert LATENT.attention_parameters == 8 * 10 + 8 * 9 + 7 * 14 + 8 * 8
    assert LATENT.attention_flops_per_pair == 2 * 3 * 2 * (5 + 4)
    assert LATENT.decode_flops_per_pair == 2 * 3 * 2 * (9 + 7)
    assert [LATENT.kv_bytes_per_token(2, split) for split in (1, 2)] == [3 * 9 * 2] * 2  # not split over devices


def test_compressed_queries_go_through_two_matrices() -> None:
    latent = LatentAttention(kv_rank=7, rope_dim=2, nope_dim=3, value_dim=4, query_rank=6)
    compressed = replace(LATENT, latent=latent)
    assert compressed.attention_parameters - LATENT.attention_parameters == 8 * 6 + 6 * 10 - 8 * 10


def test_the_widest_activation_is_that_of_the_largest_block() -> None:
    wide = replace(MIXED, experts=experts(layers=3, ffn=50))
    assert (DENSE.widest_activation(), DENSE.widest_activation(2)) == (30, 15)
    assert wide.widest_activation() == 2 * (3 * 50 + 8)
    assert wide.widest_activation(2) == 2 * (3 * 25 + 8)  # each device holds the experts' whole outputs
    assert replace(MIXED, experts=experts(layers=3, ffn=1, shared_ffn=40)).widest_activation() == 120
    without_dense = replace(MIXED, ffn=1000, experts=experts(layers=3))
    assert without_dense.widest_activation() == 2 * (3 * 6 + 8)
