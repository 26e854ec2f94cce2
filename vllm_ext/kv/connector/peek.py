"""Look-ups in the host tier that change nothing: what vLLM would be told, asked before a step is decided.

vLLM's own `get_num_new_matched_tokens` forgets the request's blocks, adds its keys and counts what it finds; a look-up
on disk begins to bring a chunk back. Admissions are priced more often than that, and for requests that then wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, make_offload_key

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
        RequestOffloadState,
    )


def chunk_key(status: RequestOffloadState, number: int) -> OffloadKey | None:
    """Return the key of a request's chunk in the first group of layers, whether vLLM added it already or not.

    Returns:
        None if the chunk is not full yet.
    """
    keys, size = status.group_states[0].offload_keys, status.config.kv_group_configs[0].hashes_per_chunk
    if number < len(keys):
        return keys[number]
    hashes, last = status.req.block_hashes, (number + 1) * size - 1
    return make_offload_key(hashes[last], status.config.kv_group_configs[0].group_idx) if last < len(hashes) else None


def prefix_tokens(
    side: OffloadingConnectorScheduler, status: RequestOffloadState, local_tokens: int, max_num_new_tokens: int | None
) -> int | None:
    """Return how many tokens beyond the local ones vLLM would load now, of a model with one group of full attention.

    Cost: one look-up in a dictionary per chunk that would be loaded, and one more. What the device holds already and
    what lies behind the first missing chunk is not looked at. The chunks on the host are no prefix that could be
    bisected: those of a sequence's end are copied first, and those whose copy failed are missing.

    Args:
        side: Whose books are read; its manager is ours.
        status: Of the request.
        local_tokens: That the device has.
        max_num_new_tokens: Most tokens to load; None: no bound.

    Returns:
        None if a chunk is still being written, or being loaded for somebody else: vLLM asks again later.
    """
    size, request, most_loaded = status.config.kv_group_configs[0].tokens_per_chunk, status.req, status.max_load_tokens
    most: int = request.num_tokens
    for bound in (max_num_new_tokens, most_loaded):
        if bound is not None:
            most = min(most, local_tokens + bound)
    if most_loaded is not None:
        most = most // size * size
    if most - local_tokens < size:
        return 0
    books: Any = side.manager
    first, loading, get, found = local_tokens // size, side._chunks_being_loaded or (), books.policy.get, 0
    for key in _keys(status, first, -(-most // size)):
        chunk = get(key)
        if chunk is None or (chunk.ref_cnt < 0 and books.peek(key) is LookupResult.MISS):
            break
        if chunk.ref_cnt < 0 or key in loading:
            return None
        found += 1
    num_tokens = min(most, (first + found) * size) - local_tokens
    return num_tokens if num_tokens >= size else 0


def _keys(status: RequestOffloadState, first: int, end: int) -> Iterator[OffloadKey]:
    """Yield the keys of a request's chunks in order, from one number up to another."""
    known = status.group_states[0].offload_keys
    yield from known[first:end]
    for number in range(max(first, len(known)), end):
        if (key := chunk_key(status, number)) is None:
            return
        yield key
