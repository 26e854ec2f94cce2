"""What Pensieve's reproductions are made of: settings of the paper, systems at equal bytes, claims."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ext.config import parse
from vllm_ext.experiments.papers import pensieve as base
from vllm_ext.experiments.papers import pensieve_eviction as fig14
from vllm_ext.experiments.runner import Sustained
from vllm_ext.simulation.run import build_scheduler
from vllm_ext.simulation.spec import resolve
from vllm_ext.systems import build


def spec(variant: Any, model: str = "opt-13b", **options: Any) -> Any:
    return base.spec(variant, base.Setting(model=model), 1.0, duration_s=60.0, seed=0, **options)


def test_kv_of_each_gpu_takes_40_gb() -> None:
    """OPT-13B has 819,200 bytes of KV per token; of Llama 2-70B a GPU holds 2 of 8 heads, 81,920 bytes per token."""
    for model, token_bytes in (("opt-13b", 819_200), ("llama-2-70b", 81_920)):
        made = spec(base.PREFIX, model)
        assert resolve(made).num_blocks == 40_000_000_000 // (32 * token_bytes)


@pytest.mark.parametrize("model", ["opt-13b", "opt-66b"])
def test_all_who_have_host_memory_have_as_many_bytes(model: str) -> None:
    total = 220_000_000_000 * base.MODELS[model].gpus
    sizes = {}
    for variant in base.ALL:
        engine = spec(variant, model).engine
        if engine.kv_offload is not None:
            sizes[variant.name] = engine.kv_offload.cpu_bytes
        elif "kv_tier" in engine.options:
            sizes[variant.name] = parse(engine.options).kv_tier.host_bytes
    assert list(sizes) == [c.name for c in (base.LRU, base.ARC, base.PENSIEVE, base.BY_TURNS, base.OURS, base.OURS_8)]
    assert all(abs(size - total) <= 1 for size in sizes.values())


def test_policies_differ_in_what_they_evict_alone() -> None:
    tiers = []
    for variant in fig14.SHOWN:
        engine = spec(variant).engine
        options = parse(engine.options | {"system": engine.system})
        tiers.append(vars(build(options).tier(options.kv_tier)))
    assert [tier.pop("policy") for tier in tiers] == [
        "leading",
        "lru",
        "arc",
        "tail",
        "retention",
        "leading",
        "retention",
    ]
    *others, by_turns, ours = tiers
    assert all(tier == others[0] for tier in others)
    assert by_turns == others[0] | {"returns": "turns"}
    assert ours == others[0] | {"load": "auto", "copies": "paying", "prompt_only": "auto", "gaps": "off"}
    assert (others[0]["gaps"], others[0]["store"], others[0]["load"]) == ("fused", "auto", "in-step")


def test_separate_steps_are_pensieve_with_the_schedule_of_2023() -> None:
    made = spec(base.SEPARATE)
    scheduler = build_scheduler(resolve(made))
    described = scheduler.policies.describe()
    assert "SeparateBatches" in described
    assert "WholePrompts" in described
    assert "Retention" in described
    assert scheduler.gaps is not None


# --- claims ---------------------------------------------------------------------------------------------------------


def measured(rates: dict[str, float], low: dict[tuple[float, str], float]) -> Any:
    found = {
        name: Sustained(rate_per_s=rate, crossing_per_s=rate, limited_by=(), trials=()) for name, rate in rates.items()
    }
    return base.Measured(setting=base.Setting(model="opt-13b", min_turns=5), found=found, low=low)


def test_gain_is_that_over_stateless_serving_and_better_than_todays_caches() -> None:
    names = [c.name for c in (base.VLLM_2023, base.STATELESS, base.LRU, base.PENSIEVE)]
    rates = dict(zip(names, (2.0, 2.5, 4.0, 3.0), strict=True))
    latency = {0.25: 40.0, 0.5: 38.5, 0.75: 30.0}
    low = {(load, name): 40.0 if name != base.PENSIEVE.name else ms for load, ms in latency.items() for name in names}
    over_stateless, over_lru = measured(rates, low).claims(1.3)
    assert "opt-13b, 5 turns or more" in over_stateless.name
    assert (over_stateless.value, over_stateless.met, over_stateless.headline) == (1.5, True, True)
    assert "over vLLM 0.32's 1.20" in over_stateless.note
    assert "from 0.75 of its rate on" in over_stateless.note
    assert (over_lru.value, over_lru.met) == (0.75, False)


def test_where_nothing_is_gained_it_is_said() -> None:
    names = [c.name for c in (base.VLLM_2023, base.STATELESS, base.PENSIEVE)]
    low = {(load, name): 40.0 for load in base.LOW_LOADS for name in names}
    (claim,) = measured(dict.fromkeys(names, 2.0), low).claims(1.25)
    assert claim.value == 1.0
    assert "at no load measured below it" in claim.note


def test_hit_rates_and_recomputed_tokens_are_compared_where_there_is_pressure() -> None:
    def metrics(loaded: float, computed: float) -> dict[str, float]:
        return {
            "tier_hit_tokens": loaded,
            "history_computed_tokens": computed,
            "history_found_fraction": 0.5,
            "normalised_latency_p90_ms_per_token": 20.0,
        }

    ours = {1.0: metrics(99.5, 0.5), 2.0: metrics(70.0, 30.0)}
    lru = {1.0: metrics(99.0, 1.0), 2.0: metrics(60.0, 40.0)}
    points, fewer = fig14.claims(*({rate: fig14.figures(one) for rate, one in of.items()} for of in (ours, lru)))
    assert points.value == pytest.approx(10.0)
    assert fewer.value == pytest.approx(0.25), "at 1/s LRU finds 99 %, so half as many tokens say nothing"
