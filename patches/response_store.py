"""Bounds the store of the Responses API.

Upstream symbol: ``OpenAIServingResponses.__init__``, whose dictionary of responses is replaced by one with a bound.
Seams tried: ``VLLM_ENABLE_RESPONSES_API_STORE`` switches the store on, which vLLM itself calls a memory leak; it has no
bound, and no way to put another store in its place.
Breaks without: responses, their messages and events are kept until the server ends.
Can go: when vLLM's store has a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ext.hooks.patch import Patch
from vllm_ext.patches.additional_config import options_of


def _init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if most := options_of(self.engine_client.vllm_config).response_store:
        from vllm_ext.token_memory.response_store import BoundedResponses

        self.response_store = BoundedResponses(most, self.msg_store, self.event_store)


HOOKS = (
    Patch(
        target="vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.__init__",
        feature="response store",
        why="the store of previous responses has no bound, and no other can be chosen",
        breaks_without="responses are kept until the server ends",
        remove_when="vLLM's store has a bound",
        replacement=_init,
        leave_out="--ext-response-store",
        optional=True,
    ),
)
