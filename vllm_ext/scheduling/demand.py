"""What a waiting request asks of a step, net of what needs no computing and of what the step admitted already."""

from __future__ import annotations

from vllm_ext.contract import Candidate, Demand, Pool
from vllm_ext.kv.connector.cached_prefixes import CachedPrefixes
from vllm_ext.scheduling.engine_state import EngineState


class Prices:
    """Prices the candidates of one step.

    vLLM enters the blocks of whoever joins into the prefix cache at once, so that those who share them may join in the
    same pass: what joined is taken off as well.
    """

    def __init__(self, engine: EngineState, prefixes: CachedPrefixes, pool: Pool) -> None:
        """Take vLLM's scheduler, and its blocks as they are before the step."""
        self._engine = engine
        self._prefixes = prefixes
        self._pool = pool
        self._joined: set[bytes] = set()
        self._whole = bool(engine.scheduler_reserve_full_isl)
        self._reserved: int | None = None

    def price(self, candidate: Candidate, free_tokens: int) -> Demand:
        """Return what a candidate asks for, as vLLM will count it.

        Args:
            candidate: A waiting request.
            free_tokens: What the step has left: its prompt is cut to that.
        """
        request = self._engine.requests[candidate.req_id]
        prefix = self._prefixes.of(request, self._joined)
        length, ready = request.num_tokens, prefix.ready_tokens
        missing = max(1, length - ready)
        now = 0 if prefix.between_steps else min(missing, max(free_tokens, 1))
        slots = ready + now + (0 if prefix.between_steps else self._pool.lookahead_tokens)
        tokens = max(slots, length) if self._whole else slots
        blocks = self._pool.blocks_for(tokens, drafts=False) - prefix.held_blocks
        if prefix.between_steps:
            blocks += self._promised()
        own = length - prefix.held_blocks * self._prefixes.probe.block_size
        return Demand(0 if prefix.between_steps else missing, max(blocks, 0), max(own, 0), prefix.between_steps)

    def joins(self, candidate: Candidate, tokens: int) -> None:
        """Note that a candidate joins, and that so many of its tokens are computed in this step."""
        if not self._prefixes.probe.gallops:
            return
        request = self._engine.requests[candidate.req_id]
        prefix = self._prefixes.of(request, self._joined)
        end = prefix.tokens if prefix.between_steps else prefix.ready_tokens + tokens
        self._joined.update(request.block_hashes[: end // self._prefixes.probe.block_size])

    def _promised(self) -> int:
        """Return the blocks that prompts under way still need: who loads between steps must leave them."""
        if self._reserved is None:
            self._reserved = self._engine._inflight_prefill_reserved_blocks()
        return self._reserved
