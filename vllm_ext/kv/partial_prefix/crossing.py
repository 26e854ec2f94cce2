"""What a scheduler does to continue a conversation although KV in front of what was kept is gone.

vLLM's lookup ends at the first block that is missing. Here it goes on: what lies behind a gap is kept, the gap is
computed again together with the new prompt, in one forward pass (Pensieve, section 4.4). The number of computed tokens
that vLLM is told is virtual, see `kv.partial_prefix.layout`; the workers are told where a step's tokens really lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_ext.kv.connector.options import keep_from_the_front
from vllm_ext.kv.eviction.free_queue import RetentionQueue
from vllm_ext.kv.eviction.worth import LINEAR_TOKENS
from vllm_ext.kv.partial_prefix.layout import ATTRIBUTE
from vllm_ext.kv.partial_prefix.manager import GapManager, can_have_gaps
from vllm_ext.kv.partial_prefix.search import GapSearch
from vllm_ext.kv.partial_prefix.support import crosses_gaps

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.vllm_ext.gaps")


def can_cross(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Return whether gaps are crossed: not where the model's layers keep too little; what keeps KV is told then."""
    wanted = crosses_gaps(vllm_config)
    if not wanted or can_have_gaps(kv_cache_config):
        return wanted
    logger.warning(
        "conversations are computed again from their first missing block on: not all layers of this model keep the KV "
        "of all tokens"
    )
    if vllm_config.kv_transfer_config is not None:
        keep_from_the_front(vllm_config.kv_transfer_config)
    return False


class GapCrossing:
    """One scheduler's steps across gaps, where the workers can compute across them.

    Attributes:
        search: Finds gaps and counts them.
        anybody: Whether anybody has gaps now.
    """

    def __init__(self, engine: Scheduler, *, clock: Callable[[], float], told: Callable[[], None]) -> None:
        """Take vLLM's scheduler, with the block manager of `with_gap_manager`.

        Args:
            engine: The scheduler.
            clock: Returns the time, in seconds.
            told: Called when `anybody` changes.
        """
        (manager,) = engine.kv_cache_manager.coordinator.single_type_managers
        assert isinstance(manager, GapManager)
        self._engine, self._told = engine, told
        self.anybody = False
        manager.told = self._mind
        self.search = GapSearch(manager, lambda new, context: new * (1.0 + context / LINEAR_TOKENS))
        self.search.rows_left = self._rows_left
        RetentionQueue.serve(engine.kv_cache_manager.block_pool, clock, self.search.block_cost_s)

    def _mind(self, anybody: bool) -> None:
        self.anybody = anybody
        self._told()

    def step(self, output: SchedulerOutput) -> None:
        """Say where the tokens of a scheduled step's requests with gaps lie."""
        requests = self._engine.requests
        layouts = self.search.layouts(output, lambda req_id: requests[req_id].num_computed_tokens)
        if layouts:
            setattr(output, ATTRIBUTE, layouts)

    def chunk(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many tokens of a request a step computes, of those that vLLM would give it."""
        req_id = request.request_id
        if request.status is not RequestStatus.RUNNING and self._rows_left(req_id) < 0:
            return 0  # it joins when gaps before it are computed
        if num_new_tokens == 1 and self.search.is_within(req_id, num_computed_tokens):
            return 0  # it would look like a decode, for which a graph may be replayed that knows nothing of pieces
        return num_new_tokens

    def ends(self, request: Request) -> None:
        """Have a request end: whoever looks at its count from here on takes it for that of the first tokens."""
        request.num_computed_tokens = self.search.front(request.request_id, request.num_computed_tokens)

    def _rows_left(self, req_id: str) -> int:
        """Return how many rows of attention are left for gaps of a request that waits, if it joins this step.

        Each gap makes a row of its own, and the kernels' tables have one for each request that may run.
        """
        engine = self._engine
        taken = self.search.extra_rows(lambda other: engine.requests[other].num_computed_tokens, without=req_id)
        rows: int = engine.scheduler_config.max_num_seqs - engine.get_request_counts()[0]
        return rows - 1 - taken
