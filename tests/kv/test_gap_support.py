"""Which engines compute across gaps, who is told, and what is evicted where they do not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from tests.support.stub import stub
from tests.support.upstream import WITH_GAPS
from vllm_ext.config import ConfigError, parse
from vllm_ext.config.kv_tier import AUTO, FUSED, IN_STEP, LEADING, OFF, RETENTION, KvTierConfig
from vllm_ext.hooks import registry
from vllm_ext.hooks.errors import UpstreamChanged
from vllm_ext.kv.partial_prefix.manager import can_have_gaps, with_gap_manager
from vllm_ext.kv.partial_prefix.support import WORKERS, crosses_gaps, obstacle
from vllm_ext.launch import features, host_memory
from vllm_ext.simulation.engine.harness import make_kv_cache_config
from vllm_ext.systems import build


def engine(**changed: Any) -> Any:
    """An engine in whose way nothing is, but for what is changed."""
    defaults = {
        "model_config__multimodal_config": None,
        "model_config__uses_mrope": False,
        "model_config__enable_prompt_embeds": False,
        "parallel_config__decode_context_parallel_size": 1,
        "parallel_config__prefill_context_parallel_size": 1,
        "parallel_config__pipeline_parallel_size": 1,
        "parallel_config__use_ubatching": False,
        "parallel_config__worker_extension_cls": "",
        "cache_config__enable_prefix_caching": True,
        "cache_config__prefix_match_unit": None,
        "compilation_config__cudagraph_mode": graphs("PIECEWISE"),
        "speculative_config": None,
        "use_v2_model_runner": False,
        "kv_transfer_config__kv_connector_extra_config": {"eviction_policy": LEADING},
        "additional_config": {},
    }
    return stub(defaults, **changed)


def graphs(mixed: str) -> Any:
    return SimpleNamespace(mixed_mode=lambda: SimpleNamespace(name=mixed))


def config(**tier: Any) -> Any:
    return parse({"system": "pensieve-published", "kv_tier": tier})


def start(found: Any, **tier: Any) -> bool:
    """Whether gaps are crossed, as the scheduler of an engine finds it that was started with such options."""
    chosen = features.let_gaps_be_crossed(config(**tier), found)
    crossed = crosses_gaps(found)
    assert build(chosen).tier(chosen.kv_tier).gaps == (FUSED if crossed else OFF)
    return crossed


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(features, "logger", logging.getLogger("told"))
    return caplog


@WITH_GAPS
@pytest.mark.parametrize("v2", [False, True])
def test_workers_are_told_and_the_scheduler_knows_by_that(v2: bool) -> None:
    found = engine(use_v2_model_runner=v2)
    assert not crosses_gaps(found)
    assert start(found, gib=1)
    assert found.parallel_config.worker_extension_cls == WORKERS[v2]
    assert found.kv_transfer_config.kv_connector_extra_config["eviction_policy"] == LEADING
    assert obstacle(found) is None, "asked again of the same engine"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cache_config__enable_prefix_caching": False}, "without prefix caching"),
        ({"cache_config__prefix_match_unit": 8}, "hashes are finer"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"model_config__uses_mrope": True}, "M-RoPE"),
        ({"model_config__multimodal_config": SimpleNamespace(language_model_only=False)}, "multimodal"),
        ({"model_config__enable_prompt_embeds": True}, "prompt embeddings"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config__use_ubatching": True}, "dual batch overlap"),
        ({"parallel_config__worker_extension_cls": "their.Extension"}, "worker-extension-cls"),
        ({"compilation_config__cudagraph_mode": graphs("FULL")}, "full CUDA graphs"),
    ],
)
def test_what_is_in_the_way_is_said_and_conversations_shrink_from_their_tails(
    changes: dict[str, Any], said: str, told: pytest.LogCaptureFixture
) -> None:
    found = engine(**changes)
    before = found.parallel_config.worker_extension_cls
    assert not start(found, gib=1, policy=LEADING)
    assert said in told.text
    assert found.parallel_config.worker_extension_cls == before
    assert found.kv_transfer_config.kv_connector_extra_config["eviction_policy"] == RETENTION


def test_a_vllm_that_was_not_verified_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    def refuse(*names: str) -> None:
        raise UpstreamChanged(f"{names[0]} is not the verified one")

    monkeypatch.setattr(registry, "verify", refuse)
    found = engine()
    assert not start(found)
    assert "kv-gaps is not the verified one" in told.text
    assert found.parallel_config.worker_extension_cls == ""


def test_what_a_system_wants_of_the_tier_and_what_the_user_says() -> None:
    def tier(system: str, **given: Any) -> KvTierConfig:
        options = parse({"system": system, "kv_tier": given})
        return build(options).tier(options.kv_tier)

    found = tier("pensieve", gib=1)
    assert (found.bits, found.policy, found.store, found.load, found.gaps) == (16, RETENTION, AUTO, AUTO, OFF)
    found = tier("pensieve-published", gib=1)
    assert (found.bits, found.policy, found.store, found.load, found.gaps) == (16, LEADING, AUTO, IN_STEP, FUSED)
    found = tier("pensieve", gib=1, gaps="off", policy="lru", load="between", bits=8)
    assert (found.bits, found.policy, found.store, found.load, found.gaps) == (8, "lru", AUTO, "between", OFF)
    found = tier("alise+pensieve", gib=1)
    assert (found.bits, found.policy, found.gaps) == (8, RETENTION, OFF)
    assert tier("fcfs", gib=1) == tier("sarathi", gib=1)
    assert tier("fcfs", gib=1).gaps == OFF


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"gaps": "fill"}, "kv_tier.gaps='fill': must be one of fused, off"),
        ({"policy": "leading"}, "kv_tier.policy='leading': needs gaps"),
        ({"gib": 1, "gaps": "fused"}, "kv_tier.load='between': must be in-step or auto with gaps"),
    ],
)
def test_what_does_not_fit_together_is_refused(tier: dict[str, Any], message: str) -> None:
    def resolve() -> KvTierConfig:
        options = parse({"system": "fcfs", "kv_tier": tier})
        return build(options).tier(options.kv_tier)

    with pytest.raises(ConfigError, match=message):
        resolve()


def test_models_that_forget_tokens_are_refused() -> None:
    plain = make_kv_cache_config(8, 16)
    assert can_have_gaps(plain)
    found = with_gap_manager(plain)
    (group,) = found.kv_cache_groups
    assert isinstance(group.kv_cache_spec, FullAttentionSpec)
    assert group.kv_cache_spec.page_size_bytes == plain.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    spec = plain.kv_cache_groups[0].kv_cache_spec
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=32, dtype=spec.dtype, sliding_window=64
    )  # fmt: skip
    for specs in ([window], [spec, window]):
        groups = [KVCacheGroupSpec([f"layer.{n}"], one) for n, one in enumerate(specs)]
        hybrid = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
        assert not can_have_gaps(hybrid)
        with pytest.raises(ValueError, match="one group of full attention"):
            with_gap_manager(hybrid)


@pytest.mark.parametrize(
    ("on_cpu", "asked", "done"),
    [
        (True, {}, (None, None, None)),
        (False, {}, ("between", "off", "retention")),
        (False, {"load": "auto", "gaps": "fused", "policy": "leading"}, ("between", "off", "retention")),
        (False, {"load": "in-step"}, ("in-step", None, None)),
        (False, {"load": "between", "gaps": "off", "policy": "tail"}, ("between", "off", "tail")),
    ],
    ids=str,
)
def test_on_cuda_loads_within_a_step_are_for_who_asks_for_them(
    on_cpu: bool,
    asked: dict[str, str],
    done: tuple[str | None, ...],
    monkeypatch: pytest.MonkeyPatch,
    told: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: on_cpu)
    tier = host_memory.load_between_steps(config(gib=1, **asked)).kv_tier
    assert (tier.load, tier.gaps, tier.policy) == done
    said = "conversations are computed again from their first missing block on" in told.text
    assert said == (not on_cpu and done[0] == "between" and asked.get("load") != "between")
    without_tier = config(**{name: value for name, value in asked.items() if name != "load"})
    assert host_memory.load_between_steps(without_tier) is without_tier, "gaps on the device need no loads"
