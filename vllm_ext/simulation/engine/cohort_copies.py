"""What a KV connector is told of the requests that a `Cohort` hides: those whose KV it might copy in the step.

Whoever fills a KV block or takes one is shown to vLLM's scheduler in that step, and so to the connector. Of the others
nothing is new, and a connector looks at them for one of these reasons only:

- a chunk is full whose copy was refused, since the host's memory was: it is asked for in each step (``early`` stores);
- the request will be preempted soon (``ahead``);
- running requests have filled the device (``ahead``): each of them may have chunks that are copied now.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.request import Request

from vllm_ext.config.kv_tier import EARLY
from vllm_ext.kv.connector.ahead_stores import AheadStores
from vllm_ext.kv.connector.scheduler import TierScheduler
from vllm_ext.simulation.engine.cohort_step import QuietOutput

Metadata = TypeVar("Metadata")


class HiddenCopies:
    """A connector's view of those who are hidden.

    Args:
        connector: vLLM's offloading connector, or ours.
    """

    def __init__(self, connector: OffloadingConnector) -> None:
        self._side: Any = connector.connector_scheduler
        self._tier = self._side if isinstance(self._side, TierScheduler) else None
        self._early = self._tier is None or self._tier.store == EARLY
        self._refused: set[str] = set()

    def build(
        self, output: Any, running: Iterable[Request], hidden: Mapping[str, Any], build: Callable[[], Metadata]
    ) -> Metadata:
        """Let the connector plan the copies of a step that vLLM, or nobody, just scheduled.

        Args:
            output: Of the step; names those who are shown, or stands for a step without any.
            running: All who ran before the step, in their order.
            hidden: Who is hidden, by id.
            build: Asks the connector, which reads the output.
        """
        scheduled = output.num_scheduled_tokens
        told = self._told({} if isinstance(output, QuietOutput) else scheduled, running, self._wanted(hidden))
        output.num_scheduled_tokens = told
        try:
            return build()
        finally:
            output.num_scheduled_tokens = scheduled
            if self._early:
                self._refused = {req_id for req_id, tokens in told.items() if self._has_chunks_left(req_id, tokens)}

    def _told(self, shown: Mapping[str, int], running: Iterable[Request], wanted: Container[str]) -> Mapping[str, int]:
        """Return the tokens of those who are shown, and of the hidden who are wanted, in vLLM's order."""
        if not wanted:
            return shown
        told = {}
        for request in running:
            req_id = request.request_id
            if req_id in shown:
                told[req_id] = shown[req_id]
            elif req_id in wanted:
                told[req_id] = 1
        return {**told, **shown}  # who joins stands last

    def _wanted(self, hidden: Mapping[str, Any]) -> Container[str]:
        if self._early:
            return self._refused & hidden.keys()
        stores = self._stores()
        return hidden if stores.looks_at_all else stores.leaving & hidden.keys()

    def _has_chunks_left(self, req_id: str, scheduled: int) -> bool:
        side = self._side
        status = side._req_status.get(req_id)
        if status is None:
            return False
        tokens = side._calc_num_offloadable_tokens(status, status.req.num_computed_tokens + scheduled)
        return any(
            status.storable_chunks(config, state, tokens) > state.next_stored_chunk_idx
            for config, state in zip(side.config.kv_group_configs, status.group_states, strict=True)
        )

    def shown(self, request: Request) -> None:
        """Let the connector know how far a request has come that is hidden no more."""
        if not self._early:
            self._stores().note_front(request.request_id, request.num_computed_tokens)

    def _stores(self) -> AheadStores:
        assert self._tier is not None
        assert self._tier.stores is not None
        return self._tier.stores
