"""GapScheduler: vLLM's scheduler, which continues a conversation although KV in front of what was kept is gone.

vLLM's lookup ends at the first block that is missing. Here it goes on: what lies behind a gap is kept, the gap is
computed again together with the new prompt, in one forward pass (Pensieve, section 4.4). The number of computed tokens
that vLLM is told is virtual, see `kv.gaps.layout`; the workers are told where the tokens of a step really lie. Where
they can't make use of that, gaps are computed one after the other, see `kv.gaps.phases`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_ext.config.kv_tier import OFF, PHASED
from vllm_ext.kv.free_queue import RetentionQueue
from vllm_ext.kv.gaps.layout import ATTRIBUTE, PHASES
from vllm_ext.kv.gaps.manager import GapManager, can_have_gaps, with_gap_manager
from vllm_ext.kv.gaps.phases import send_positions
from vllm_ext.kv.gaps.search import GapSearch
from vllm_ext.kv.gaps.support import gaps_mode
from vllm_ext.kv.keeping.worth import LINEAR_TOKENS
from vllm_ext.kv.options import keep_from_the_front

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.vllm_ext.gaps")
_LAST_WORD = "_reserve_prefill_lookahead"
"""Of vLLM's methods the one that has the last word about the size of a piece."""


class GapScheduler(AsyncScheduler):
    """vLLM's scheduler with lookups that go on behind gaps, where the workers can compute across them.

    Attributes:
        gaps: Finds and counts them; None where lookups end at the first one.
        clock: Returns the time, in seconds.
    """

    clock: Callable[[], float]
    _has_gaps = False
    _chunk_cap: int | None = None

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        """Take vLLM's arguments."""
        mode = gaps_mode(vllm_config)
        wanted = mode != OFF
        if wanted and not can_have_gaps(kv_cache_config):
            logger.warning(
                "conversations are computed again from their first missing block on: not all layers of this model keep "
                "the KV of all tokens"
            )
            wanted = False
            if vllm_config.kv_transfer_config is not None:
                keep_from_the_front(vllm_config.kv_transfer_config)
        super().__init__(vllm_config, self._managed(kv_cache_config, with_gaps=wanted), *args, **kwargs)
        self.gaps: GapSearch | None = None
        self._in_phases = mode == PHASED
        if wanted:
            (manager,) = self.kv_cache_manager.coordinator.single_type_managers
            assert isinstance(manager, GapManager)
            manager.told = self._mind_gaps
            self.gaps = GapSearch(manager, lambda new, context: new * (1.0 + context / LINEAR_TOKENS))
            if not self._in_phases:
                self.gaps.rows_left = self._rows_left
            RetentionQueue.serve(
                self.kv_cache_manager.block_pool,
                lambda: self.clock(),  # noqa: PLW0108 - simulations replace the clock
                self.gaps.block_cost_s,
            )

    def _managed(self, kv_cache_config: KVCacheConfig, *, with_gaps: bool) -> KVCacheConfig:
        """Return the configuration with the block manager that is needed."""
        return with_gap_manager(kv_cache_config) if with_gaps else kv_cache_config

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """As vLLM's; says where the tokens of requests with gaps lie."""
        output = super().schedule(throttle_prefills)
        if self.gaps is not None:
            layouts = self.gaps.layouts(output, lambda req_id: self.requests[req_id].num_computed_tokens)
            if layouts:
                setattr(output, PHASES if self._in_phases else ATTRIBUTE, layouts)
            if self._in_phases and self.gaps.placements:
                send_positions(output, self.gaps.placements, self._as_new if self.use_v2_model_runner else None)
        return output

    def _get_local_prefix_cache_hit(self, request: Request, *limit: int | None) -> tuple[KVCacheBlocks, int, int, bool]:
        blocks, num_tokens, boundary, diverged = super()._get_local_prefix_cache_hit(request, *limit)
        if self.gaps is not None and limit in ((), (None,)):  # from 0.33 on; what is behind it is wanted computed
            num_tokens = self.gaps.kept_tokens(request, num_tokens)
        return blocks, num_tokens, boundary, diverged

    def _mind_gaps(self, anybody: bool) -> None:
        self._has_gaps = anybody
        self._have_the_last_word()

    def cap_chunks(self, tokens: int | None) -> None:
        """Give no running prompt more than so many tokens in the next steps; None: there is no bound."""
        if tokens != self._chunk_cap:
            self._chunk_cap = tokens
            self._have_the_last_word()

    def _have_the_last_word(self) -> None:
        """Be asked for the size of pieces only while that matters: vLLM asks for each request in each step."""
        if self._has_gaps:
            setattr(self, _LAST_WORD, self._up_to_a_gap)
        elif self._chunk_cap is not None:
            setattr(self, _LAST_WORD, self._within_the_cap)
        else:
            self.__dict__.pop(_LAST_WORD, None)

    def _within_the_cap(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        # With Mamba layers vLLM has aligned the piece to blocks already.
        if (
            self._chunk_cap is not None
            and request in self._inflight_prefills
            and not self.need_mamba_block_aligned_split
        ):
            num_new_tokens = min(num_new_tokens, self._chunk_cap)
        return int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))

    def _up_to_a_gap(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        num_tokens = self._within_the_cap(request, num_computed_tokens, num_new_tokens)
        if self._in_phases and self.gaps is not None:
            return self.gaps.room(request.request_id, num_computed_tokens, num_tokens)
        if request.status is not RequestStatus.RUNNING and self._rows_left(request.request_id) < 0:
            return 0  # it joins when gaps before it are computed
        if num_tokens == 1 and self.gaps is not None and self.gaps.is_within(request.request_id, num_computed_tokens):
            return 0  # it would look like a decode, for which a graph may be replayed that knows nothing of pieces
        return num_tokens

    def _rows_left(self, req_id: str) -> int:
        """Return how many rows of attention are left for gaps of a request that waits, if it joins this step.

        Each gap makes a row of its own, and the kernels' tables have one for each request that may run.
        """
        assert self.gaps is not None
        taken = self.gaps.extra_rows(lambda other: self.requests[other].num_computed_tokens, without=req_id)
        rows: int = self.scheduler_config.max_num_seqs - self.get_request_counts()[0]
        return rows - 1 - taken

    def _as_new(self, req_id: str) -> NewRequestData:
        request = self.requests[req_id]
        return NewRequestData.from_request(
            request, self.kv_cache_manager.get_block_ids(req_id), list(request._all_token_ids)
        )

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.gaps is not None:  # whoever looks at the count from here on takes it for that of the first tokens
            request.num_computed_tokens = self.gaps.front(request.request_id, request.num_computed_tokens)
        return super()._free_request(request, *args, **kwargs)
