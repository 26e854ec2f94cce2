"""Which parts of ours an engine gets, of those that depend on the model, the device and this vLLM."""

from __future__ import annotations

import logging
from typing import Any

from vllm_ext import config as ext_config
from vllm_ext.config import ExtConfig
from vllm_ext.config.kv_tier import LEADING, OFF, RETENTION
from vllm_ext.hooks import registry
from vllm_ext.hooks.errors import HookError
from vllm_ext.launch.arguments import SERVERS

logger = logging.getLogger("vllm.vllm_ext")
_HTTP = (*SERVERS, "OPENAI_BATCH_RUNNER")


def keep_records(config: ExtConfig, vllm_config: Any) -> None:
    """Let an engine keep KV in 8 bits on its device.

    Raises:
        ConfigError: It can't.
        UpstreamMissing, UpstreamChanged: This vLLM is not one for which that was verified.
    """
    from vllm.platforms import current_platform

    from vllm_ext.kv.int8.support import let_records_be_read

    registry.verify("kv-arena", "kv-records", *(["attention-slot"] if current_platform.is_cpu() else []))
    let_records_be_read(vllm_config, config.kv_tier.device_int8_share)
    registry.install("kv-arena")  # where the engine core is in this process, or is forked from it


def choose_attention_kernel(config: ExtConfig, vllm_config: Any) -> ExtConfig:
    """Have our attention backend serve an engine, if it can.

    Returns:
        The configuration with what will be done.

    Raises:
        ConfigError: Our kernel was asked for, and can't serve it.
    """
    from vllm.platforms import current_platform

    from vllm_ext.attention.support import let_own_kernel_serve

    unverified = _not_verified(("attention-slot",)) if current_platform.is_cpu() else None
    kernel = let_own_kernel_serve(vllm_config, config.attention.kernel, unverified)
    return config.changed(attention=config.attention.changed(kernel=kernel))


def let_gaps_be_crossed(config: ExtConfig, vllm_config: Any) -> ExtConfig:
    """Have gaps in kept KV computed as is wanted, or else as it can be; say so where that is not the same.

    Returns:
        The configuration with what will be done.
    """
    from vllm_ext import systems
    from vllm_ext.kv.partial_prefix import support as gap_support

    tier = systems.build(config).tier(config.kv_tier)
    if tier.gaps == OFF:
        return config
    v2 = vllm_config.use_v2_model_runner
    reason = gap_support.obstacle(vllm_config) or _not_verified(gap_support.GROUPS[v2])
    if reason is None:
        vllm_config.parallel_config.worker_extension_cls = gap_support.WORKERS[v2]
        return config
    logger.warning("conversations are computed again from their first missing block on: %s", reason)
    if config.kv_tier.gib:
        from vllm_ext.kv.connector.options import keep_from_the_front

        keep_from_the_front(vllm_config.kv_transfer_config)
    policy = RETENTION if tier.policy == LEADING else config.kv_tier.policy
    return config.changed(kv_tier=config.kv_tier.changed(gaps=OFF, policy=policy))


def objectives_in_milliseconds(config: ExtConfig, vllm_config: Any) -> ExtConfig:
    """Return the configuration with milliseconds in place of multiples of a decode step, by the engine's profile.

    Raises:
        ConfigError: There is a multiple, and no profile.
    """
    from vllm.platforms import current_platform

    from vllm_ext import systems
    from vllm_ext.step_time.profile import engine_key, load_runtime_model

    def runtime() -> Any:
        return load_runtime_model(config.profile, engine_key(vllm_config, current_platform.get_device_name()))

    return config.changed(slo=systems.in_milliseconds(config.slo, runtime))


def let_failure_show() -> None:
    """Have the server exit with status 1 if its engine dies; where that can't be had, say so and serve all the same."""
    if (reason := _not_verified(("exit-status",))) is None:
        registry.install("exit-status")
    else:
        logger.warning("if the engine dies, the server may exit with status 0, as vLLM does: %s", reason)


def explain_waits(vllm_config: Any) -> None:
    """Have spans of requests say why they waited, where there are spans; where that can't be had, say so."""
    if vllm_config.observability_config.otlp_traces_endpoint is None:
        return
    if (reason := _not_verified(("tracing",))) is None:
        registry.install("tracing")
    else:
        logger.warning("traces of requests lack the reason for a wait: %s", reason)


def _not_verified(groups: tuple[str, ...]) -> str | None:
    try:
        registry.verify(*groups)
    except HookError as error:
        return str(error)
    return None


def adds_routes(config: ExtConfig, usage_context: object) -> bool:
    """Whether a process answers administrators, or routers."""
    return usage_context in SERVERS and (bool(config.admin_parts) or config.load_report)


def needed_groups(config: ExtConfig, usage_context: object) -> tuple[str, ...]:
    """Return the hook groups that this process needs under the configuration."""
    from vllm_ext import systems

    groups = ["hints"]
    if usage_context in _HTTP:
        groups.append("http")
    if adds_routes(config, usage_context):
        groups.append("admin")
    if config.token_memory_mib:
        groups.append("token-memory")
    if config.response_store and usage_context in _HTTP:
        groups.append("response-store")
    predicts = ext_config.RETRIEVAL in config.prediction.sources and systems.build(config).use_predictions
    if predicts:
        groups.append("prediction")
    if predicts or config.metrics_interval_s > 0:
        groups.append("front-end")
    return tuple(groups)
