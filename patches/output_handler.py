"""Starts our tasks of the front end once its event loop runs: to fetch the scheduler's state, to bring it predictions.

Upstream symbol: ``AsyncLLM._run_output_handler``, which vLLM calls with the first request, or at construction if a loop
runs already. Seams tried: stat-logger plugins are constructed before the loop and get neither it nor the engine client;
endpoint plugins get the client, but are loaded only if the user names them in ``VLLM_PLUGINS``.
Breaks without: no ``vllm_ext:*`` metrics, no request log, and no predictions from prompts.
Can go: when a plugin is told that the front end is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ext.hooks.patch import Patch
from vllm_ext.patches.prediction_service import guarded


def _run_output_handler(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    from vllm_ext.metrics.frontend import ensure_poller

    ensure_poller(self)
    guarded(_serve_predictions, self)
    return result


def _serve_predictions(engine: Any) -> None:
    from vllm_ext.predictor.attach import serve

    serve(engine)


HOOKS = (
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM._run_output_handler",
        feature="metrics and prediction",
        why="no plugin is told when the front end's event loop runs, or gets its engine client unasked",
        breaks_without="no vllm_ext:* metrics, no request log, and no predictions from prompts",
        remove_when="a plugin is told that the front end is ready",
        replacement=_run_output_handler,
        leave_out="metrics and predictions with --ext-metrics-interval-s 0 --ext-prediction-sources hint,history",
    ),
)
