"""Joins the accounting of objectives, and load shedding, to vLLM's two engines."""

from __future__ import annotations

from typing import Any

from vllm_ext.config import KEY, parse
from vllm_ext.hooks import registry
from vllm_ext.slo.account import Account, attach
from vllm_ext.slo.metrics import SloMetrics


def account_for(engine: Any) -> None:
    """Let the requests of an engine be judged, and shed if that was chosen; nothing if it has no options of ours.

    Args:
        engine: vLLM's ``AsyncLLM`` or ``LLMEngine``, fully made.

    Raises:
        UpstreamMissing, UpstreamChanged: Requests are to be shed, and this vLLM is not one that was verified.
    """
    options = (engine.vllm_config.additional_config or {}).get(KEY)
    if not options:
        return
    config = parse(options)
    served = engine.vllm_config.model_config.served_model_name
    metrics = SloMetrics(served if isinstance(served, str) else served[0], config.slo.classes)
    attach(engine, Account(config.slo, metrics))
    if not config.slo.shed or config.metrics_interval_s == 0:
        return
    from vllm_ext.slo.shedding import ATTRIBUTE, Shedder

    if hasattr(engine.engine_core, "_call_utility_async"):  # offline, there is nobody to answer 503
        registry.install("shed")
        setattr(engine, ATTRIBUTE, Shedder(engine, config.slo, config.metrics_interval_s, metrics))
