"""What records are refused for before anything starts, and what is chosen where they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.stub import stub
from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.int8 import support
from vllm_ext.kv.int8.support import let_records_be_read, obstacle
from vllm_ext.patches import kv_record_steps


def graphs(mixed: str) -> Any:
    return SimpleNamespace(mixed_mode=lambda: SimpleNamespace(name=mixed))


def engine(**changed: Any) -> Any:
    """A configuration that can be had, but for what is changed."""
    defaults = {
        "model_config__use_mla": False,
        "model_config__is_hybrid": False,
        "model_config__is_attention_free": False,
        "parallel_config__decode_context_parallel_size": 1,
        "parallel_config__prefill_context_parallel_size": 1,
        "cache_config__enable_prefix_caching": True,
        "cache_config__cache_dtype": "auto",
        "cache_config__prefix_match_unit": None,
        "attention_config__backend": None,
        "attention_config__backend_per_kind": {},
        "compilation_config__cudagraph_mode": graphs("PIECEWISE"),
        "kv_transfer_config": None,
        "speculative_config": None,
    }
    return stub(defaults, **changed)


REFUSED = {
    "mla": ({"model_config__use_mla": True}, "no keys and values"),
    "hybrid": ({"model_config__is_hybrid": True}, "state besides keys and values"),
    "mamba": ({"model_config__is_attention_free": True}, "state besides keys and values"),
    "no-cache": ({"cache_config__enable_prefix_caching": False}, "without prefix caching nothing is kept"),
    "fp8": ({"cache_config__cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3 is quantised already"),
    "dcp": ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
    "pcp": ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
    "fine-hashes": ({"cache_config__prefix_match_unit": 8}, "finer than blocks"),
    "flashinfer": ({"attention_config__backend": SimpleNamespace(name="FLASHINFER")}, "--attention-backend FLASHINFER"),
    "by-kind": ({"attention_config__backend_per_kind": {"full_attention": 1}}, "backend_per_kind"),
    "drafts": ({"speculative_config": SimpleNamespace(method="eagle")}, "drafts outside of a step"),
    "full-graphs": ({"compilation_config__cudagraph_mode": graphs("FULL")}, "use --cudagraph-mode PIECEWISE"),
    "connector": (
        {"kv_transfer_config": SimpleNamespace(kv_connector_module_path="vllm_ext.kv.connector.tiered")},
        "--kv-transfer-config names a connector, and none knows records",
    ),
}


def test_nothing_is_in_the_way_of_a_plain_engine() -> None:
    chosen = SimpleNamespace(name="CUSTOM")
    assert obstacle(engine()) is None
    assert obstacle(engine(attention_config__backend=chosen)) is None


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_the_reason(name: str) -> None:
    changed, why = REFUSED[name]
    with pytest.raises(ConfigError, match=r"kv_tier\.device_int8_share=0\.3: must be 0: .*") as caught:
        let_records_be_read(engine(**changed), 0.3)
    assert why in str(caught.value)


def test_batch_invariance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.envs, "VLLM_BATCH_INVARIANT", True)
    assert "batch invariance" in str(obstacle(engine()))


def test_another_plugin_s_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "other_holder", lambda: "their.Backend")
    assert str(obstacle(engine())).endswith("their.Backend")


def test_the_backend_that_reads_records_is_chosen() -> None:
    config = engine()
    let_records_be_read(config, 0.3)
    assert config.attention_config.backend.name == "CUSTOM"


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5])
def test_a_share_is_a_fraction(share: float) -> None:
    from vllm_ext.config.kv_tier import KvTierConfig

    with pytest.raises(ConfigError, match=r"device_int8_share=.*: must be (less than 1|greater than or equal to 0)"):
        KvTierConfig(device_int8_share=share)


@pytest.mark.parametrize("bits", [8, 16])
def test_records_beside_a_host_tier_are_refused(bits: int) -> None:
    """They paid nothing there: P90 latency was 26.6 ms with both, and 16.2 ms with the host tier alone."""
    from vllm_ext.config import parse

    with pytest.raises(ConfigError, match=r"kv_tier\.device_int8_share=0\.3: not beside kv_tier\.gib: ") as caught:
        parse({"kv_tier": {"device_int8_share": 0.3, "gib": 4, "bits": bits}})
    assert "\n" not in str(caught.value)


# --- the hook around a worker's steps, which stays in a process when the engine that wanted it is gone --------------


def worker(additional_config: dict[str, Any]) -> Any:
    """Of an engine whose KV memory holds blocks alone."""
    cache = SimpleNamespace(kv_cache_tensors=[], kv_cache_groups=[])
    return SimpleNamespace(
        vllm_config=SimpleNamespace(additional_config=additional_config),
        model_runner=SimpleNamespace(kv_cache_config=cache),
    )


def execute(additional_config: dict[str, Any]) -> Any:
    (hook,) = kv_record_steps.HOOKS
    return hook.replacement(lambda _, step: f"ran {step}", worker(additional_config), "step 1")


@pytest.mark.parametrize("additional_config", [{}, {"vllm_ext": {"kv_tier": {"device_int8_share": 0.0}}}])
def test_an_engine_without_records_steps_as_vllm_does_after_one_with_them(additional_config: dict[str, Any]) -> None:
    """It died in its first step, since its memory has no arena."""
    assert execute(additional_config) == "ran step 1"


def test_an_engine_with_records_and_no_room_for_them_is_refused() -> None:
    """Its memory was divided where the hook for that was not installed."""
    with pytest.raises(ConfigError, match="needs an engine core that leaves room for them"):
        execute({"vllm_ext": {"kv_tier": {"device_int8_share": 0.4}}})
