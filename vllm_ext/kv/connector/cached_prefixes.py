"""What of a waiting request's sequence needs no computing: its front in the prefix cache, the host tier and records."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from vllm_ext.kv.connector.scheduler import TierScheduler
    from vllm_ext.kv.int8.records import Records
    from vllm_ext.kv.partial_prefix.search import GapSearch

_GAPS_STAND_STEPS = 16
_NOTHING: AbstractSet[bytes] = frozenset()


class CachedPrefix(NamedTuple):
    """What of a waiting request's sequence needs no computing, from the first token on."""

    tokens: int = 0
    """On the device."""
    held_blocks: int = 0
    """Of these, blocks that somebody holds, which are shared, or that are records of 8 bits. The others leave the free
    pool when they are taken."""
    host_tokens: int = 0
    """In host memory, behind those on the device."""
    between_steps: bool = False
    """Whether these are loaded between steps."""

    @property
    def ready_tokens(self) -> int:
        """Tokens that need no computing."""
        return self.tokens + self.host_tokens


_NOTHING_CACHED = CachedPrefix()


class PrefixProbe:
    """Looks up how much of a request's front is in the prefix cache.

    A block can't be found without those before it, so the end of the front is galloped to and bisected for, from where
    it was last time: two look-ups where it stands. Exact for full attention; for models with several kinds of layers
    vLLM's own look-up is made, which walks through the whole front.
    """

    def __init__(self, engine: Scheduler) -> None:
        """Take vLLM's scheduler."""
        manager = engine.kv_cache_manager
        self._manager = manager
        self._pool = manager.block_pool
        coordinator = manager.coordinator
        self.full_attention = all(
            isinstance(group.kv_cache_spec, FullAttentionSpec) for group in engine.kv_cache_config.kv_cache_groups
        )
        """False for sliding-window, Mamba and hybrid models, where block counts are upper bounds."""
        self.gallops = self.full_attention and isinstance(coordinator, UnitaryKVCacheCoordinator)
        self._enabled = bool(manager.enable_caching)
        self._has_records = len(self._pool.blocks) > self._pool.num_gpu_blocks
        self._dropped = len(getattr(coordinator, "eagle_group_ids", ())) if self.gallops else 0
        self.block_size: int = coordinator.single_type_managers[0].block_size

    def cached(self, request: Request, start: int = 0, joined: AbstractSet[bytes] = _NOTHING) -> tuple[int, int, int]:
        """Return how many blocks at the front of a request are cached, and how many of them somebody holds.

        Args:
            request: One that holds no KV.
            start: Blocks at its front last time.
            joined: Hashes of blocks that those who join in this step will hold and have cached.

        Returns:
            Cached blocks that vLLM will use, how many of them take no free block, and where to start next time. Where
            records and idle blocks take turns some of the records are passed over.
        """
        if not self._enabled or request.skip_reading_prefix_cache:
            return 0, 0, 0
        if not self.gallops:
            return self._asked(request)
        hashes, get = request.block_hashes, self._pool.cached_block_hash_to_block.get_one_block
        first_record = self._pool.num_gpu_blocks
        limit = min(len(hashes), (request.num_tokens - 1) // self.block_size)

        def cached(place: int) -> bool:
            block_hash = hashes[place]
            return block_hash in joined or get(make_block_hash_with_group_id(block_hash, 0)) is not None

        def held(place: int) -> bool:
            block_hash = hashes[place]
            if block_hash in joined:
                return True
            block = get(make_block_hash_with_group_id(block_hash, 0))
            return block is not None and (block.ref_cnt > 0 or block.block_id >= first_record)

        found = _last(cached, limit, min(start, limit))
        used = max(0, found - self._dropped)
        in_front = _last(held, used, used)
        # Blocks that are evicted from the end of a sequence are records behind idle blocks.
        behind = _last(lambda place: held(used - 1 - place), used - in_front, 0) if self._has_records else 0
        return used, in_front + behind, found

    def _asked(self, request: Request) -> tuple[int, int, int]:
        blocks, tokens, *_ = self._manager.get_computed_blocks(request)
        held = sum(not block.is_null and block.ref_cnt > 0 for group in blocks.blocks for block in group)
        return tokens // self.block_size, held, 0


def _last(holds: Callable[[int], bool], limit: int, start: int) -> int:
    """Return how many of the first ``limit`` places hold, where none does behind one that does not."""
    low, high = start, limit
    if start and not holds(start - 1):
        low, high = 0, start - 1
    else:
        step = 1
        while low < limit:
            ahead = min(low + step, limit)
            if not holds(ahead - 1):
                high = ahead - 1
                break
            low, step = ahead, 2 * step
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle - 1):
            low = middle
        else:
            high = middle - 1
    return low


class CachedPrefixes:
    """What is cached of waiting requests, with what the host tier and lookups behind gaps add.

    Attributes:
        host: The KV tier's books; None without a tier.
        gaps: Finds what is kept behind gaps; None where lookups end at the first.
        partials: Finds partly filled blocks; None where none are kept.
        seen: What was looked up since caches may have changed; None: they may change any time.
    """

    def __init__(
        self, engine: Scheduler, *, host: TierScheduler | None, gaps: GapSearch | None, partials: Records | None
    ) -> None:
        """Take vLLM's scheduler, and where else KV is kept."""
        self.probe = PrefixProbe(engine)
        self.host = host
        self.gaps = gaps
        self.partials = partials
        self._engine = engine
        self._starts: dict[str, int] = {}
        self._told: dict[str, int] = {}
        """By request that could be told about: how often it was preempted before."""
        self.seen: dict[str, CachedPrefix] | None = None
        self._behind: dict[str, tuple[int, int, int, int]] = {}

    def forget(self, req_id: str) -> None:
        """Forget a request that ended."""
        self._starts.pop(req_id, None)
        self._told.pop(req_id, None)
        self._behind.pop(req_id, None)

    def of(self, request: Request, joined: AbstractSet[bytes] = _NOTHING) -> CachedPrefix:
        """Return what is cached of a request that holds no KV; nothing of one that does.

        Args:
            request: Whose.
            joined: Hashes of blocks that those who join in this step will hold and have cached, from the first on.
        """
        if request.num_computed_tokens:
            return _NOTHING_CACHED
        if joined and request.block_hashes and request.block_hashes[0] in joined:
            return self._look_up(request, joined)
        if self.seen is None:
            return self._look_up(request, _NOTHING)
        found = self.seen.get(request.request_id)
        if found is None:
            found = self.seen[request.request_id] = self._look_up(request, _NOTHING)
        return found

    def can_tell(self, request: Request, *, anew: bool = False) -> bool:
        """Say whether the KV connector can tell by now what KV it has of a waiting request.

        Until then vLLM would pass over it. Cost: a look-up of the connector's, for each request until it can tell, and
        again if that was preempted; vLLM asks again when it admits the request.

        Args:
            request: One that could join.
            anew: Whether to ask although it could tell before.
        """
        connector, req_id = self._engine.connector, request.request_id
        if connector is None or request.num_computed_tokens:
            return True
        if not anew and self._told.get(req_id) == request.num_preemptions:
            return True
        size = self.probe.block_size
        local_tokens = self.of(request).tokens // size * size  # vLLM shows a connector whole blocks
        if self.host is not None:
            told = self.host.can_tell(request, local_tokens)
        else:
            told = connector.get_num_new_matched_tokens(request, local_tokens)[0] is not None
        if told:
            self._told[req_id] = request.num_preemptions
        return told

    def _look_up(self, request: Request, joined: AbstractSet[bytes]) -> CachedPrefix:
        req_id = request.request_id
        blocks, held, start = self.probe.cached(request, self._starts.get(req_id, 0), joined)
        if not joined:
            self._starts[req_id] = start
        tokens = blocks * self.probe.block_size
        if self.gaps is not None:
            kept, held_behind = self._behind_gaps(request, tokens)
            if kept > tokens:  # what is loaded into gaps is in that count
                return CachedPrefix(kept, held + held_behind)
        partial = None if self.partials is None else self.partials.partial_hit(request, tokens, self.probe.block_size)
        here = 0 if partial is None else partial[1]
        if self.host is None or request.skip_reading_prefix_cache:
            return CachedPrefix(tokens + here, held)
        host_tokens, between_steps = self.host.peek(request, tokens)
        if host_tokens <= here:
            return CachedPrefix(tokens + here, held)
        return CachedPrefix(tokens, held, host_tokens, between_steps)

    def _behind_gaps(self, request: Request, tokens: int) -> tuple[int, int]:
        """Return what is kept in all and held behind the hit; looked for anew every few steps, block by block."""
        assert self.gaps is not None
        step = self._engine.current_step
        known = self._behind.get(request.request_id)
        if known is None or known[1] != tokens or step - known[0] >= _GAPS_STAND_STEPS:
            kept, held, _ = self.gaps.peek(request, tokens)
            known = self._behind[request.request_id] = (step, tokens, kept, held)
        return known[2], known[3]
