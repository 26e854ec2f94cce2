"""What must not matter to a conversation with gaps, and what must: for engines whose core lives in this process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

_POISON = 1e4
"""In every key and value of a block that holds nothing: whoever reads one gives other tokens."""
_POISON_BYTE = 0x47
"""In every byte of a chunk of the host that holds nothing: 51015 as float32."""
_DROPS_EVERY = 8
"""Steps."""


def install(kind: str, core: Any) -> Callable[[], None]:
    """Arrange for it; returns what to call before each step.

    Args:
        kind: ``poison``: blocks that hold nothing, or that nobody can find, are overwritten before each step.
            ``drops``: so are chunks of the host, and now and then some of what is kept in either place is lost.
            ``whole-rows`` and ``first-positions`` leave out one half each of what a worker does about gaps, and
            ``garbage`` spoils a kept block: the output must show these.
        core: The engine core.

    Raises:
        KeyError: for an unknown kind.
    """
    kinds = {
        "poison": _poison,
        "drops": _drops,
        "whole-rows": _whole_rows,
        "first-positions": _first_positions,
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


def _drops(core: Any) -> Callable[[], None]:
    poison_device, dice = _poison(core), random.Random(0)
    scheduler = core.scheduler
    connector = None if scheduler.connector is None else scheduler.connector.connector_scheduler
    steps = iter(range(10**9))
    pool, idle = scheduler.kv_cache_manager.block_pool, _Idle()

    def before_step() -> None:
        known = idle.since_the_last_step(pool)
        if next(steps) % _DROPS_EVERY == 0:
            _lose_blocks(pool, known, connector, dice)
            if connector is not None:
                _lose_chunk(connector.manager, dice)
        poison_device()
        if connector is not None:
            _poison_host(connector.manager)

    return before_step


class _Idle:
    """Blocks that nobody holds, and their content; the connector hears of those in the next step only."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def since_the_last_step(self, pool: Any) -> list[Any]:
        idle = {b.block_id: b.block_hash for b in pool.blocks if b.ref_cnt == 0 and b.block_hash is not None}
        both = [pool.blocks[number] for number, content in idle.items() if self._before.get(number) == content]
        self._before = idle
        return both


def _lose_blocks(pool: Any, idle: list[Any], connector: Any, dice: random.Random) -> None:
    """Forget some blocks that nobody holds, wherever they stand in their conversations."""
    being_copied = () if connector is None else connector._block_id_to_pending_jobs
    free = [block for block in idle if block.block_id not in being_copied]
    lost = dice.sample(free, min(len(free), dice.randrange(3)))
    for block in lost:
        assert pool._maybe_evict_cached_block(block)
    if connector is not None and connector.stores is not None:  # as of blocks that were not loaded
        connector.stores.idle.taken(block.block_id for block in lost)


def _lose_chunk(manager: Any, dice: random.Random) -> None:
    """Forget a chunk that no copy uses."""
    policy = manager.policy
    keys = list(policy._nodes)
    if keys and (lost := policy.evict(1, set(keys) - {dice.choice(keys)})):
        manager.forget(lost, "room")


def _poison_host(manager: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    codec = connector.connector_worker.worker._codec
    held = {node.chunk.chunk_id for node in manager.policy._nodes.values()}
    chunks = codec._pool.reshape(-1, codec._row_bytes)
    chunks[[number for number in range(len(chunks)) if number not in held]] = _POISON_BYTE


def _garbage(core: Any) -> Callable[[], None]:
    pool = core.scheduler.kv_cache_manager.block_pool

    def before_step() -> None:
        _overwrite(core, [b.block_id for b in pool.blocks if b.ref_cnt == 0 and not b.is_null])

    return before_step


def _whole_rows(core: Any) -> Callable[[], None]:
    import vllm_ext.patches.gap_attention as module

    module.split_rows = lambda metadata, rows: metadata
    return lambda: None


def _first_positions(core: Any) -> Callable[[], None]:
    import vllm_ext.patches.gap_rows_v1 as module

    real = module.place_queries

    def place_queries(layouts: Any, req_ids: Any, computed: Any, num_tokens: Any, ends: Any, query_pos: Any) -> Any:
        return real(layouts, req_ids, computed, num_tokens, ends, query_pos.copy())

    module.place_queries = place_queries
    return lambda: None
