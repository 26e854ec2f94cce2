"""What must not matter to a conversation with gaps, and what must: for engines whose core lives in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_POISON = 1e4
"""In every key and value of a block that holds nothing: whoever reads one gives other tokens."""


def install(kind: str, core: Any) -> Callable[[], None]:
    """Arrange for it; returns what to call before each step.

    Args:
        kind: ``poison``: blocks that hold nothing, or that nobody can find, are overwritten before each step.
            ``whole-rows`` and ``first-positions`` leave out one half each of what a worker does about gaps,
            ``virtual-counts`` sends a worker that does nothing about them what the scheduler counts, and ``garbage``
            spoils a kept block: the output must show these.
        core: The engine core.

    Raises:
        KeyError: for an unknown kind.
    """
    kinds = {
        "poison": _poison,
        "whole-rows": _whole_rows,
        "first-positions": _first_positions,
        "virtual-counts": _virtual_counts,
        "garbage": _garbage,
    }
    return kinds[kind](core)


def _caches(core: Any) -> list[Any]:
    caches: list[Any] = core.model_executor.driver_worker.worker.model_runner.kv_caches
    return caches


def _overwrite(core: Any, block_ids: list[int]) -> None:
    for cache in _caches(core):
        assert cache.shape[0] == core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        cache[block_ids] = _POISON


def _poison(core: Any) -> Callable[[], None]:
    pool = core.scheduler.kv_cache_manager.block_pool

    def before_step() -> None:
        _overwrite(core, [b.block_id for b in pool.blocks if b.ref_cnt == 0 and b.block_hash is None and not b.is_null])

    return before_step


def _garbage(core: Any) -> Callable[[], None]:
    pool = core.scheduler.kv_cache_manager.block_pool

    def before_step() -> None:
        _overwrite(core, [b.block_id for b in pool.blocks if b.ref_cnt == 0 and not b.is_null])

    return before_step


def _whole_rows(core: Any) -> Callable[[], None]:
    import vllm_ext.patches.gap_attention as module

    module.split_rows = lambda metadata, rows: metadata
    return lambda: None


def _virtual_counts(core: Any) -> Callable[[], None]:
    import vllm_ext.scheduling.gap_scheduler as module

    module.send_positions = lambda *_: None
    return lambda: None


def _first_positions(core: Any) -> Callable[[], None]:
    import vllm_ext.patches.gap_rows_v1 as module

    real = module.place_queries

    def place_queries(layouts: Any, req_ids: Any, computed: Any, num_tokens: Any, ends: Any, query_pos: Any) -> Any:
        return real(layouts, req_ids, computed, num_tokens, ends, query_pos.copy())

    module.place_queries = place_queries
    return lambda: None
