"""What Pensieve's reproductions are made of: settings of the paper, systems at equal bytes, claims."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ext.config import parse
from vllm_ext.experiments.papers import pensieve as base
from vllm_ext.experiments.papers import pensieve_eviction as fig14
from vllm_ext.experiments.papers import pensieve_rates as rates_of
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
    for variant in (*base.SHOWN, base.BY_TURNS, base.OURS_8):
        engine = spec(variant, model).engine
        if engine.kv_offload is not None:
            sizes[variant.name] = engine.kv_offload.cpu_bytes
        elif "kv_tier" in engine.options:
            sizes[variant.name] = parse(engine.options).kv_tier.host_bytes
    assert list(sizes) == [c.name for c in (base.LRU, base.PENSIEVE, base.OURS, base.BY_TURNS, base.OURS_8)]
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

NAMES = [c.name for c in (base.VLLM_2023, base.STATELESS, base.LRU, base.PENSIEVE, base.OURS)]


def measured(
    rates: dict[str, float], low: dict[tuple[float, str], float], trials: dict[str, list[tuple[float, float]]]
) -> Any:
    found = {
        name: Sustained(
            rate_per_s=rate,
            crossing_per_s=rate,
            limited_by=(),
            trials=tuple((at, {base.P90: ms}) for at, ms in trials.get(name, [])),
        )
        for name, rate in rates.items()
    }
    return rates_of.Measured(setting=base.Setting(model="opt-13b", min_turns=5), found=found, low=low)


def test_gain_is_that_over_stateless_serving_and_ours_is_held_against_the_best_of_today() -> None:
    rates = dict(zip(NAMES, (2.0, 2.5, 4.0, 2.64, 5.0), strict=True))
    low = {(load, name): 40.0 for load in rates_of.LOW_LOADS for name in NAMES}
    claim = measured(rates, low, {}).claim(1.3)
    assert "opt-13b, 5 turns or more" in claim.name
    assert (claim.value, claim.verdict, claim.headline) == (1.32, "matched", True)
    assert (claim.ours, claim.tuned) == (2.5, 1.25)
    assert "vLLM 0.32, stateless: 1.06" in claim.facts


def test_rates_are_compared_at_every_limit_that_both_curves_pass() -> None:
    """The model's limit, 100 ms, is five times its idle latency; both curves double from turn to turn."""
    low = {(load, name): 20.0 for load in rates_of.LOW_LOADS for name in NAMES}
    trials = {base.VLLM_2023.name: [(2.0, 40.0), (4.0, 160.0)], base.PENSIEVE.name: [(3.0, 40.0), (5.0, 80.0)]}
    one = measured(dict.fromkeys(NAMES, 2.0), low, trials)
    assert one.curve(base.VLLM_2023) == [(0.5, 20.0), (1.0, 20.0), (1.5, 20.0), (2.0, 40.0), (4.0, 160.0)]
    assert one.by_limit() == {2.0: (3.0, 2.0), 3.0: pytest.approx((4.17, 2.58), abs=0.01)}
    assert one.rate_at(base.VLLM_2023, 4.0) == pytest.approx(3.0)
    assert one.rate_at(base.PENSIEVE, 5.0) is None


def test_latency_is_compared_at_loads_of_the_stateless_server_over_all_settings() -> None:
    p90 = dict(zip(NAMES, (40.0, 40.0, 25.0, 20.0, 10.0), strict=True))
    settings = [
        measured(
            dict.fromkeys(NAMES, 2.0), {(load, n): p90[n] * scale for load in rates_of.LOW_LOADS for n in NAMES}, {}
        )
        for scale in (1.0, 2.0)
    ]
    claims = list(rates_of.latency(settings))
    assert [(c.value, c.ours, c.tuned) for c in claims] == [(0.5, 0.75, pytest.approx(0.6))] * 3
    assert [c.headline for c in claims] == [False, True, False]
    assert {c.verdict for c in claims} == {"matched"}
    assert list(rates_of.latency([])) == []


def at_rate(loaded: float, computed: float, p90_ms: float = 20.0) -> dict[str, float]:
    return fig14.figures(
        {
            "tier_hit_tokens": loaded,
            "history_computed_tokens": computed,
            "history_found_fraction": 0.5,
            "normalised_latency_p90_ms_per_token": p90_ms,
        }
    )


def test_hit_rates_and_recomputed_tokens_are_compared_where_there_is_pressure_and_no_queue() -> None:
    judged = {1.0: at_rate(99.5, 0.5), 2.0: at_rate(90.0, 10.0), 3.0: at_rate(70.0, 30.0)}
    lru = {1.0: at_rate(99.0, 1.0), 2.0: at_rate(85.0, 15.0), 3.0: at_rate(50.0, 50.0, p90_ms=101.0)}
    points, fewer, *missed = fig14.claims(judged, lru, lru)
    assert (points.value, points.ours) == (pytest.approx(5.0), 0.0), "at 3/s LRU passes the latency limit"
    assert fewer.value == pytest.approx(1 / 3), "at 1/s LRU finds 99 %, so half as many tokens say nothing"
    assert [claim.value for claim in missed] == pytest.approx([2.5, 2 + 1 / 7])


def test_a_policy_that_always_finds_more_has_no_rate_from_which_it_misses() -> None:
    always = {1.0: at_rate(99.0, 1.0), 2.0: at_rate(90.0, 10.0)}
    assert fig14.below(always, 0.8) is None
    assert len(fig14.claims(always, always, always)) == 2
