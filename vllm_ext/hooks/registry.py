"""All hooks, grouped by the feature that needs them, and what `vllm-ext doctor` reports of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vllm_ext.hooks.errors import HookError, UpstreamChanged, UpstreamMissing, installed_vllm
from vllm_ext.hooks.fingerprint import forget_sources
from vllm_ext.hooks.patch import Addition, Hook, Patch, Undo

GROUPS: dict[str, tuple[str, ...]] = {
    "base": ("cli_flags", "cli_values", "engine_config"),
    "scheduler": ("scheduler_reliances",),
    "hints": ("input_hints", "slo_accounting"),
    "http": ("http_hints",),
    "engine-core": ("engine_state",),
    "front-end": ("output_handler",),
    "exit-status": ("exit_status",),
    "tracing": ("request_span",),
    "prediction": ("prediction_service",),
    "token-memory": ("token_memory",),
    "response-store": ("response_store",),
    "shed": ("slo_shedding",),
    "kv-tier": ("kv_tier_reliances",),
    "kv-disk": ("kv_disk_reliances",),
    "admin": ("admin",),
    "kv-gaps": ("gap_reliances",),
    "kv-gaps-fused": ("gap_attention",),
    "kv-gaps-v1": ("gap_rows_v1",),
    "kv-gaps-v2": ("gap_rows_v2",),
    "kv-arena": ("kv_arena",),
    "kv-records": ("kv_record_steps",),
    "attention-slot": ("attention_slot",),
}
"""Group -> modules of `patches`; each lists its hooks in ``HOOKS``. What classes in its ``OVERRIDING`` override of
vLLM's is relied upon besides, for its ``FEATURE``. Groups are applied all or nothing."""


Status = Literal["verified", "changed", "missing", "not-checked"]


@dataclass(frozen=True, kw_only=True)
class HookStatus:
    """What is known of one hook with the vLLM installed."""

    target: str
    kind: str
    feature: str
    status: Status
    detail: str
    remedy: str
    optional: bool = False
    """Whether no system needs it."""


def group(name: str) -> tuple[Hook, ...]:
    """Return the hooks of a group.

    Raises:
        ValueError: There is no such group.
    """
    if name not in GROUPS:
        raise ValueError(f"group={name!r}: must be one of {', '.join(GROUPS)}")
    modules = [importlib.import_module(f"vllm_ext.patches.{module}") for module in GROUPS[name]]
    found = {hook.target: hook for module in modules for hook in module.HOOKS}
    for module in modules:
        for hook in module.FEATURE.overrides(module.OVERRIDING) if hasattr(module, "OVERRIDING") else ():
            found.setdefault(hook.target, hook)
    return tuple(found.values())


def hooks() -> tuple[Hook, ...]:
    """Return all hooks, group by group."""
    return tuple(hook for name in GROUPS for hook in group(name))


def verify(*names: str) -> None:
    """Check every hook of these groups.

    Raises:
        UpstreamMissing, UpstreamChanged: At least one is not as verified; the message names each of them.
    """
    failed: list[HookError] = []
    for name in names:
        for hook in group(name):
            try:
                hook.verify()
            except HookError as error:
                failed.append(error)
    forget_sources()
    if len(failed) == 1:
        raise failed[0]
    if failed:
        kind = UpstreamMissing if all(isinstance(e, UpstreamMissing) for e in failed) else UpstreamChanged
        raise kind("\n".join(map(str, failed)))


def install(name: str, *, check: bool = True) -> Undo:
    """Apply a group, all of it or nothing, and return an undo; hooks applied before are left as they are.

    Args:
        name: One of `GROUPS`.
        check: Verify first. Only the ``base`` group does without: its hooks change nothing until a feature is chosen,
            and verify then.

    Raises:
        UpstreamMissing, UpstreamChanged: Nothing was changed.
    """
    undos: list[Undo] = []

    def undo() -> None:
        while undos:
            undos.pop()()

    if check:
        verify(name)
    try:
        for hook in group(name):
            if isinstance(hook, Patch):
                undos.append(hook.apply(check=False))
            elif isinstance(hook, Addition):
                undos.append(hook.apply())
    except Exception:
        undo()
        raise
    return undo


def report(selected: Iterable[Hook] | None = None) -> tuple[HookStatus, ...]:
    """Return the state of the hooks, all of them unless selected; never raises because of vLLM."""
    vllm_there = installed_vllm() != "none"
    statuses = tuple(_status(hook, vllm_there) for hook in (hooks() if selected is None else selected))
    forget_sources()
    return statuses


def _status(hook: Hook, vllm_there: bool) -> HookStatus:
    status: Status = "verified"
    remedy = ""
    if not vllm_there:
        status, detail, remedy = "not-checked", "vLLM is not installed", "install vLLM"
    else:
        try:
            detail = hook.verify()
        except HookError as error:
            status = "missing" if isinstance(error, UpstreamMissing) else "changed"
            detail, _, remedy = str(error).partition("; ")
    return HookStatus(
        target=hook.target,
        kind=hook.kind,
        feature=hook.feature,
        status=status,
        detail=detail,
        remedy=remedy,
        optional=hook.optional,
    )
