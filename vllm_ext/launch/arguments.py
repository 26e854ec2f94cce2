"""What the user asked for: which scheduler, with which options; refused in one line if it can't be had."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from vllm_ext import config as ext_config
from vllm_ext import envs
from vllm_ext.config import KEY, ConfigError, ExtConfig, flags, merge_flags
from vllm_ext.hooks import errors, registry
from vllm_ext.launch import tuned
from vllm_ext.launch.host_memory import tier_connector, with_host_memory

SCHEDULER = "vllm_ext.scheduling.scheduler.SteeredScheduler"
SERVERS = ("OPENAI_API_SERVER", "API_SERVER")
"""Usage contexts in which requests come from clients."""
NEEDED = ("base", "scheduler", "engine-core")
"""Groups of hooks that whatever is chosen needs."""
_ALIKE = 0.85


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
        additional = {**additional, KEY: merge_flags(additional.get(KEY, {}), given)}
        if settings := tuned.of(additional):
            settings.check_devices(typed.get("tensor_parallel_size") or 1)
            scheduler_cls, additional = settings.chosen(scheduler_cls, additional)
            if not is_chosen(scheduler_cls, additional):
                return None
        config, _ = validate(scheduler_cls, additional)
        registry.verify(*NEEDED)
        if serves:
            refuse_oracle(config, SERVERS[0])
        config = with_host_memory(config, typed.get("kv_transfer_config"))
        if config.kv_tier.gib:
            tier_connector(config, typed.get("kv_transfer_config"))
        if serves and config.admin_parts:
            envs.admin_key()
    except ConfigError as error:
        return flags.in_flags(error, typed)
    except (errors.HookError, ValueError) as error:  # of this vLLM, or of an environment variable
        first, *others = str(error).splitlines()
        return f"{first} ({len(others)} more: `vllm-ext doctor`)" if others else first
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
    if config.profile is None:
        systems.in_milliseconds(config.slo)  # refuses a multiple, of which there is no step
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
    if oracle and usage_context in SERVERS:
        raise ConfigError("system", config.system, "true output lengths are for offline benchmarks, never for a server")
