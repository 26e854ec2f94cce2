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

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from vllm_ext import config as ext_config
from vllm_ext import envs
from vllm_ext.config import KEY, ConfigError, ExtConfig, flags, merge_flags
from vllm_ext.config.attention import STOCK
from vllm_ext.config.kv_tier import AUTO, BETWEEN, IN_STEP, LEADING, OFF, RETENTION
from vllm_ext.hooks import registry
from vllm_ext.hooks.errors import HookError
from vllm_ext.hooks.patch import Patch
from vllm_ext.patches.additional_config import with_options

logger = logging.getLogger("vllm.vllm_ext")
SCHEDULER = "vllm_ext.scheduling.scheduler.SteeredScheduler"
_ALIKE = 0.85
_SERVERS = ("OPENAI_API_SERVER", "API_SERVER")
_HTTP = (*_SERVERS, "OPENAI_BATCH_RUNNER")


def _create_engine_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    refuse_lookalikes(self.additional_config)
    if not is_chosen(self.scheduler_cls, self.additional_config):
        return original(self, *args, **kwargs)
    registry.verify("base", "scheduler", "engine-core")
    usage = inspect.signature(original).bind(self, *args, **kwargs).arguments.get("usage_context")
    config, scheduler_cls = validate(self.scheduler_cls, self.additional_config or {})
    refuse_oracle(config, usage)
    config = load_between_steps(with_host_memory(config, self.kv_transfer_config))
    if _opens_admin(config, usage):
        envs.admin_key()  # refuses to start without one
    chosen, transfer = self.scheduler_cls, self.kv_transfer_config

    def built() -> Any:
        self.scheduler_cls = scheduler_cls
        if config.kv_tier.gib:
            replicas = self.data_parallel_size_local or self.data_parallel_size
            self.kv_transfer_config = tier_connector(config, transfer, replicas)
        try:
            return original(self, *args, **kwargs)
        finally:  # the caller may build from the same arguments again
            self.scheduler_cls, self.kv_transfer_config = chosen, transfer

    vllm_config = built()
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise ConfigError("system", config.system, "not for diffusion models, which bring a scheduler of their own")
    if reason := prepare_tier(config, vllm_config):
        config = without_host_memory(config, reason)
        vllm_config = built()
    if config.kv_tier.device_int8_share:
        keep_records(config, vllm_config)
    if config.attention.kernel != STOCK:
        config = choose_attention_kernel(config, vllm_config)
    config = let_gaps_be_crossed(config, vllm_config)
    vllm_config.additional_config = with_options(vllm_config.additional_config, ext_config.to_dict(config))
    groups = needed_groups(config, usage)
    for name in groups:
        registry.install(name)
    if "prediction" in groups and getattr(vllm_config.parallel_config, "_api_process_rank", 0) < 0:
        envs.share_predictor()  # this process starts API servers, and serves nothing itself
    if usage in _SERVERS:
        let_failure_show()
    return vllm_config


def refused_arguments(args: Any, *, serves: bool) -> str | None:
    """Return what is wrong with the command line of an engine, in one line and by its flags; None if nothing is.

    Args:
        args: Parsed arguments of ``vllm serve``, ``vllm bench`` and so on.
        serves: Whether clients will be served.
    """
    typed = vars(args)
    given, additional = flags.given(typed), typed.get("additional_config") or {}
    scheduler_cls = typed.get("scheduler_cls")
    if "scheduler_cls" not in typed:
        return None  # no engine's arguments
    try:
        refuse_lookalikes(additional)
        if not (given or is_chosen(scheduler_cls, additional)):
            return None
        config, _ = validate(scheduler_cls, {**additional, KEY: merge_flags(additional.get(KEY, {}), given)})
        if serves:
            refuse_oracle(config, _SERVERS[0])
        config = with_host_memory(config, typed.get("kv_transfer_config"))
        if config.kv_tier.gib:
            tier_connector(config, typed.get("kv_transfer_config"))
        if serves and config.kv_tier.admin:
            envs.admin_key()
    except ConfigError as error:
        return flags.in_flags(error, typed)
    except ValueError as error:  # of an environment variable
        return str(error)
    return None


def is_chosen(scheduler_cls: object, additional_config: object) -> bool:
    """Whether the user asked for anything of ours."""
    if isinstance(scheduler_cls, str) and "." not in scheduler_cls:
        return True
    return isinstance(additional_config, Mapping) and KEY in additional_config


def refuse_lookalikes(additional_config: object) -> None:
    """Raise ConfigError for a key that can only be a misspelt ``vllm_ext``: nobody would look at what is in it."""
    given = additional_config if isinstance(additional_config, Mapping) else {}
    for key in given:
        if key != KEY and difflib.SequenceMatcher(None, str(key).lower(), KEY).ratio() >= _ALIKE:
            allowed = f"unknown key of --additional-config; did you mean {KEY!r}?"
            raise ConfigError("", given[key], allowed, root=str(key))


def validate(scheduler_cls: object, additional_config: Mapping[str, Any]) -> tuple[ExtConfig, object]:
    """Return the resolved configuration and the scheduler class to give to vLLM.

    Args:
        scheduler_cls: A system's name, a qualified class name, a class, or ``None``.
        additional_config: As the user gave it; our options are under ``vllm_ext``.

    Raises:
        ConfigError: An option is wrong, the system is unknown, or no system was named.
    """
    from vllm_ext import systems

    raw = additional_config.get(KEY, {})
    if not isinstance(raw, Mapping):
        raise ConfigError("", raw, "must be an object")
    name = scheduler_cls if isinstance(scheduler_cls, str) and "." not in scheduler_cls else None
    named = raw.get("system")
    if name is None and named is None and raw.get("policies"):
        named = "fcfs"  # the row of defaults, in which a policy of the user's own stands alone
    if name is None and named is None:
        known = ", ".join(systems.known())
        raise ConfigError("", dict(raw), f"options need a system: add --scheduler-cls NAME, one of {known}")
    if name is not None and named is not None and name != named:
        raise ConfigError("system", named, f"contradicts --scheduler-cls {name}; leave one of them out")
    config = ext_config.parse({**raw, "system": name if named is None else named})
    systems.build(config)
    if name is not None or scheduler_cls is None:
        return config, SCHEDULER
    refuse_foreign_scheduler(config, scheduler_cls)
    return config, scheduler_cls


def refuse_foreign_scheduler(config: ExtConfig, scheduler_cls: object) -> None:
    """Raise ConfigError unless the class, given itself or by its qualified name, is a subclass of our scheduler."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    ours = resolve_obj_by_qualname(SCHEDULER)
    found = resolve_obj_by_qualname(scheduler_cls) if isinstance(scheduler_cls, str) else scheduler_cls
    if not (isinstance(found, type) and issubclass(found, ours)):
        allowed = f"needs a subclass of {SCHEDULER}, not --scheduler-cls {scheduler_cls}; leave one of them out"
        raise ConfigError("system", config.system, allowed)


def refuse_oracle(config: ExtConfig, usage_context: object) -> None:
    """Raise ConfigError if true output lengths would be read where requests come from clients."""
    from vllm_ext import systems

    oracle = systems.resolve(config.system).oracle or "oracle" in config.prediction.sources
    if oracle and usage_context in _SERVERS:
        raise ConfigError("system", config.system, "true output lengths are for offline benchmarks, never for a server")


def with_host_memory(config: ExtConfig, given: object) -> ExtConfig:
    """Decide whether there is host memory for KV, where that is left to the system.

    Args:
        config: As the user has it.
        given: Another connector that was asked for, or None: an engine has one.

    Returns:
        The configuration with a number of GiB, ``auto``, or nothing.
    """
    from vllm.platforms import current_platform

    from vllm_ext import systems

    tier, by_name = config.kv_tier, config.kv_tier.gib is not None
    gib = tier.gib if by_name else systems.build(config).residency.tier_options.get("gib", 0.0)
    if gib == AUTO:
        if current_platform.is_cpu():
            return without_host_memory(config, "on vLLM's CPU backend copies take the model's cycles")
        if not by_name and (given is not None or tier.device_int8_share):
            return without_host_memory(config, "another connector, or kv_tier.device_int8_share, was asked for")
    return config.changed(kv_tier=tier.changed(gib=gib)) if gib else config


def without_host_memory(config: ExtConfig, reason: str) -> ExtConfig:
    """Return the configuration without a host tier, where its size was left to the system, and say why."""
    logger.info("no host memory is taken for KV: %s; --kv-tier-gib N has it all the same", reason)
    return config.changed(kv_tier=config.kv_tier.changed(gib=0.0))


def tier_connector(config: ExtConfig, given: object, replicas: int = 1) -> Any:
    """Return the connector of the host tier, as vLLM's configuration names it.

    Args:
        config: With a tier.
        given: Another connector that was asked for, or None.
        replicas: Engines that share this machine's memory.

    Raises:
        ConfigError: Another connector was asked for.
    """
    if given is not None:
        raise ConfigError("kv_tier.gib", config.kv_tier.gib, "not beside --kv-transfer-config; leave one of them out")
    registry.verify("kv-tier", *(["kv-disk"] if config.kv_tier.disk_dir else []))
    from vllm_ext import systems
    from vllm_ext.kv.connector.options import transfer_config
    from vllm_ext.kv.host.memory import spare_bytes

    return transfer_config(systems.build(config).tier(config.kv_tier), spare_bytes(replicas))


def prepare_tier(config: ExtConfig, vllm_config: Any) -> str:
    """Fit an engine to its host tier.

    Returns:
        Why what ``gib: auto`` may take is too little, to be built again without; else nothing.

    Raises:
        ConfigError: The model's KV, or this machine, does not go with it.
    """
    if not config.kv_tier.gib:
        return ""
    from vllm_ext.kv.connector import support

    support.refuse_model(vllm_config)
    support.refuse_missing_compiler(vllm_config)
    support.refuse_size(vllm_config)
    support.choose_block_size(vllm_config)
    if config.kv_tier.gib == AUTO and (reason := support.too_small(vllm_config)):
        return reason
    if config.kv_tier.disk_dir:
        from vllm_ext.kv.disk.identity import note_model

        support.share_disk(vllm_config)
        note_model(vllm_config, config.kv_tier.disk_dir)
    return ""


def load_between_steps(config: ExtConfig) -> ExtConfig:
    """Have KV loaded between steps where loads within a step hold all of it up, unless those were asked for.

    On CUDA the host waits for them before the forward pass, and a step can't be a graph. Without them nothing can be
    loaded behind a missing block, so conversations are looked up from their front.

    Returns:
        The configuration with what will be done.
    """
    from vllm.platforms import current_platform

    from vllm_ext import systems

    if not config.kv_tier.gib or current_platform.is_cpu() or config.kv_tier.load == IN_STEP:
        return config
    tier = systems.build(config).tier(config.kv_tier)
    if tier.load == BETWEEN:
        return config
    unasked = config.kv_tier.load is None and tier.gaps == OFF  # nothing is lost that anybody named
    logger.log(
        logging.INFO if unasked else logging.WARNING,
        "KV is loaded between steps%s: on this device loads within a step would hold the whole step up; "
        "kv_tier.load=in-step has them all the same",
        "" if tier.gaps == OFF else ", and conversations are computed again from their first missing block on",
    )
    policy = RETENTION if tier.policy == LEADING else tier.policy
    return config.changed(kv_tier=config.kv_tier.changed(load=BETWEEN, gaps=OFF, policy=policy))


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
        UpstreamMissing, UpstreamChanged: This vLLM is not one for which it was verified.
    """
    from vllm.platforms import current_platform

    from vllm_ext.attention.support import let_own_kernel_serve

    if current_platform.is_cpu():
        registry.verify("attention-slot")
    kernel = let_own_kernel_serve(vllm_config, config.attention.kernel)
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


def let_failure_show() -> None:
    """Have the server exit with status 1 if its engine dies; where that can't be had, say so and serve all the same."""
    if (reason := _not_verified(("exit-status",))) is None:
        registry.install("exit-status")
    else:
        logger.warning("if the engine dies, the server exits with vLLM's own status, which may be 0: %s", reason)


def _not_verified(groups: tuple[str, ...]) -> str | None:
    try:
        registry.verify(*groups)
    except HookError as error:
        return str(error)
    return None


def _opens_admin(config: ExtConfig, usage_context: object) -> bool:
    return usage_context in _SERVERS and config.kv_tier.admin


def needed_groups(config: ExtConfig, usage_context: object) -> tuple[str, ...]:
    """Return the hook groups that this process needs under the configuration."""
    from vllm_ext import systems

    groups = ["hints"]
    if usage_context in _HTTP:
        groups.append("http")
    if _opens_admin(config, usage_context):
        groups.append("kv-admin")
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
