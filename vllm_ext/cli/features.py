"""The features that `vllm-ext doctor` reports on: which hooks each needs, and what findings mean for it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from vllm_ext.cli.diagnosis import ATTENTION, HOOKS, KV_TIER, PREDICTION, Finding, State


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something a user can have, or be without."""

    hooks: tuple[str, ...]
    """What its hooks call their feature."""
    needs: tuple[str, ...] = ()
    """Features without which it is of no use."""


FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        "flags": Feature(hooks=("flags",)),
        "scheduling": Feature(hooks=("scheduling",)),
        "hints": Feature(hooks=("hints",)),
        "objectives": Feature(hooks=("objectives",)),
        "metrics": Feature(hooks=("metrics", "metrics and prediction")),
        PREDICTION: Feature(hooks=("prediction", "metrics and prediction")),
        "load shedding": Feature(hooks=("load shedding",), needs=("objectives",)),
        "token memory": Feature(hooks=("token memory",), needs=("objectives",)),
        "response store": Feature(hooks=("response store",)),
        ATTENTION: Feature(hooks=("attention",)),
        "KV in 8 bits on the device": Feature(hooks=("KV in 8 bits on the device",), needs=(ATTENTION,)),
        KV_TIER: Feature(hooks=(KV_TIER,)),
        "KV tier on disk": Feature(hooks=("KV tier on disk",), needs=(KV_TIER,)),
        "KV tier's admin endpoint": Feature(hooks=("KV tier's admin endpoint",), needs=(KV_TIER,)),
        "gaps in kept KV": Feature(hooks=("gaps in kept KV",)),
        "gaps in kept KV in one step": Feature(hooks=("gaps in kept KV in one step",), needs=("gaps in kept KV",)),
        "exit status": Feature(hooks=("exit status",)),
    }
)
"""In the order of the report."""


class Availability(enum.Enum):
    """Whether a feature can be had."""

    OK = "ok"
    OPTIONAL = "optional"
    """It works; a part that is not installed would make it better."""
    NOT_AVAILABLE = "not available"
    """Something else stands in the way."""
    CHANGED = "changed upstream"
    """vLLM's code is not what was verified."""


@dataclass(frozen=True, kw_only=True)
class FeatureReport:
    """One line of the report."""

    name: str
    state: Availability
    detail: str
    remedies: tuple[str, ...] = ()
    """What to do about it; empty when there is nothing to do, or when another line says it."""
    hooks: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a chosen feature can work."""

    feature: str
    works: bool
    reason: str
    """What stands in the way, or what to know all the same; may be empty."""


def feature_reports(findings: Sequence[Finding]) -> tuple[FeatureReport, ...]:
    """Return the state of every feature.

    Args:
        findings: All of them, those of hooks included; hooks are missing from them where vLLM can't be imported.
    """
    blocked = _names(f"{f.area}: {f.name}" for f in findings if f.state is State.FAIL and not f.feature)
    found: dict[str, FeatureReport] = {}
    for name, feature in FEATURES.items():
        hooks = tuple(f for f in findings if f.area == HOOKS and f.feature in feature.hooks)
        failed = [hook for hook in hooks if hook.state is State.FAIL]
        lacking = [need for need in feature.needs if found[need].state not in (Availability.OK, Availability.OPTIONAL)]
        notes = [f for f in findings if f.area != HOOKS and f.feature == name and f.state is not State.OK]
        if failed:
            state, detail = Availability.CHANGED, f"{len(failed)} of {len(hooks)} hooks do not fit the vLLM installed"
        elif blocked or not hooks or any(hook.state is not State.OK for hook in hooks):
            state, detail = Availability.NOT_AVAILABLE, blocked or "not checked"
        elif lacking:
            state, detail = Availability.NOT_AVAILABLE, f"needs {_names(lacking)}"
        elif notes:
            state, detail = Availability.OPTIONAL, "; ".join(note.value for note in notes)
        else:
            state, detail = Availability.OK, f"{len(hooks)} hook{'s' * (len(hooks) > 1)} as verified"
        says = failed or (notes if state is Availability.OPTIONAL else [])
        remedies = tuple(dict.fromkeys(finding.remedy for finding in says))
        found[name] = FeatureReport(name=name, state=state, detail=detail, remedies=remedies, hooks=hooks)
    return tuple(found.values())


def judge(chosen: str, findings: Sequence[Finding]) -> Verdict:
    """Say whether a feature can work.

    Args:
        chosen: A system's name, for which every hook that is not optional has to be as verified, or a feature's name.
        findings: All of them.
    """
    from vllm_ext import systems
    from vllm_ext.config import ConfigError

    failed = [finding for finding in findings if finding.state is State.FAIL]
    note = ""
    missed: list[Finding] = []
    if chosen in FEATURES:
        needed = {"", *(hooks for name in (chosen, *FEATURES[chosen].needs) for hooks in FEATURES[name].hooks)}
        failed = [finding for finding in failed if finding.feature in needed]
    else:
        try:
            if systems.resolve(chosen).oracle:
                note = "offline benchmarks only; a server refuses it"
        except ConfigError as error:
            return Verdict(feature=chosen, works=False, reason=f"{error}, or a feature: {', '.join(FEATURES)}")
        missed = [finding for finding in failed if finding.optional]
    if len(missed) < len(failed):
        reason = _names(_where(finding) for finding in failed if finding not in missed)
        return Verdict(feature=chosen, works=False, reason=reason)
    without = f"without {_names(finding.feature for finding in missed)}" if missed else ""
    return Verdict(feature=chosen, works=True, reason=", ".join(filter(None, [without, note])))


def _where(finding: Finding) -> str:
    return f"{finding.area}: {finding.feature if finding.area == HOOKS else finding.name}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))
