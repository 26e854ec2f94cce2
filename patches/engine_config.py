"""Turns the name of a system into our scheduler, and refuses what can't work, before any engine process starts.

Upstream symbol: ``EngineArgs.create_engine_config``, through which the server, every API server process, ``LLM`` and
``AsyncLLM`` get their ``VllmConfig``. Seams tried: ``--scheduler-cls`` takes a qualified class name and would do for
the scheduler itself, but it is resolved only in the engine core, where an error is the failed start of another process;
nothing else checks our options in the process that the user sees.
Breaks without: ``--scheduler-cls alise`` is an unknown class.
Can go: when vLLM resolves names of scheduler plugins and validates plugin options at start.

It does nothing unless a feature is chosen: a scheduler name without dots, or the key ``vllm_ext`` in
``additional_config``. Only then are vLLM's symbols compared with the verified ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from vllm_ext import config as ext_config
from vllm_ext import envs
from vllm_ext.config import ConfigError
from vllm_ext.config.attention import STOCK
from vllm_ext.hooks import registry
from vllm_ext.hooks.patch import Patch
from vllm_ext.launch import arguments, features, host_memory, tuned
from vllm_ext.launch.arguments import SERVERS
from vllm_ext.patches.additional_config import with_options


def _create_engine_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    arguments.refuse_lookalikes(self.additional_config)
    if settings := tuned.of(self.additional_config):
        with settings.applied(self):
            vllm_config = _with_scheduler(original, self, *args, **kwargs)
        settings.check(vllm_config)
        return vllm_config
    return _with_scheduler(original, self, *args, **kwargs)


def _with_scheduler(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if not arguments.is_chosen(self.scheduler_cls, self.additional_config):
        return original(self, *args, **kwargs)
    registry.verify(*arguments.NEEDED)
    usage = inspect.signature(original).bind(self, *args, **kwargs).arguments.get("usage_context")
    config, scheduler_cls = arguments.validate(self.scheduler_cls, self.additional_config or {})
    arguments.refuse_oracle(config, usage)
    config = host_memory.load_between_steps(host_memory.with_host_memory(config, self.kv_transfer_config))
    if config.admin_parts and features.adds_routes(config, usage):
        envs.admin_key()  # refuses to start without one
    chosen, transfer = self.scheduler_cls, self.kv_transfer_config

    def built() -> Any:
        self.scheduler_cls = scheduler_cls
        if config.kv_tier.gib:
            replicas = self.data_parallel_size_local or self.data_parallel_size
            self.kv_transfer_config = host_memory.tier_connector(config, transfer, replicas)
        try:
            return original(self, *args, **kwargs)
        finally:  # the caller may build from the same arguments again
            self.scheduler_cls, self.kv_transfer_config = chosen, transfer

    vllm_config = built()
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise ConfigError("system", config.system, "not for diffusion models, which bring a scheduler of their own")
    if reason := host_memory.prepare_tier(config, vllm_config):
        config = host_memory.without_host_memory(config, reason)
        vllm_config = built()
    if config.kv_tier.device_int8_share:
        features.keep_records(config, vllm_config)
    if config.attention.kernel != STOCK:
        config = features.choose_attention_kernel(config, vllm_config)
    config = features.let_gaps_be_crossed(config, vllm_config)
    config = features.objectives_in_milliseconds(config, vllm_config)
    vllm_config.additional_config = with_options(vllm_config.additional_config, ext_config.to_dict(config))
    groups = features.needed_groups(config, usage)
    for name in groups:
        registry.install(name)
    if "prediction" in groups and getattr(vllm_config.parallel_config, "_api_process_rank", 0) < 0:
        envs.share_predictor()  # this process starts API servers, and serves nothing itself
    features.explain_waits(vllm_config)
    if usage in SERVERS:
        features.let_failure_show()
    return vllm_config


HOOKS = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
        feature="scheduling",
        why="names of systems and our options must be checked where the user sees it, not in the engine core",
        breaks_without="--scheduler-cls NAME is an unknown class",
        remove_when="vLLM resolves names of scheduler plugins and validates plugin options at start",
        replacement=_create_engine_config,
    ),
)
