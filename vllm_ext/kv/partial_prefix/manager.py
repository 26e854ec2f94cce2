"""vLLM's block manager of full attention, for requests whose kept blocks are not only the first ones.

A request with a `Placement` gets the blocks of its whole kept part at once: kept blocks are taken hold of first, so
that nothing that is allocated for the gaps can evict them, then the table is filled in order. From there on it is a
request like any other whose number of computed tokens is virtual (`kv.partial_prefix.layout`). Only the prefix cache
must be told the truth: a block is entered when it is really full, and one that was kept is in there already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from vllm_ext.kv.partial_prefix.layout import GapLayout
from vllm_ext.kv.partial_prefix.plan import Action, Run


@dataclass
class Search:
    """What was found of a request that may have to wait for its blocks, and be looked up again in each step."""

    tries: int = 0
    numbers: Sequence[int] = ()
    """Blocks behind the prefix hit that were kept somewhere when all were looked for."""


@dataclass
class Placement:
    """What is done about the blocks of one request up to the end of what is kept."""

    layout: GapLayout
    num_hit: int
    """Blocks of the ordinary prefix hit, with which vLLM deals."""
    runs: tuple[Run, ...]
    """Those behind the hit, up to the end of the layout."""
    reused: dict[int, KVCacheBlock]
    """Kept blocks behind the hit, by number."""
    num_missing: int = 0
    """Blocks of the gaps that are kept nowhere."""
    placed: bool = field(default=False, init=False)

    @property
    def num_blocks(self) -> int:
        """Blocks from the start of the sequence to the end of what is kept."""
        return self.runs[-1].end

    def front(self, index: int) -> int:
        """Return how many tokens from the first on have their KV once those before a virtual index are computed."""
        return self.layout.position(index) if index < self.layout.end else index


_WITH_GAPS = "_with_gaps"


class GapManager(FullAttentionManager):
    """The manager of the one group of a model that `with_gap_manager` names.

    It is asked several times for each running request in each step. So three of vLLM's methods are replaced only while
    somebody has gaps, by those of the same name that end in ``_with_gaps``.

    Attributes:
        placements: By request, from its lookup until its blocks are given back; changed by `hold` and `let_go`.
        searches: Likewise.
        told: Called with whether anybody has gaps, when that changes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take vLLM's arguments."""
        super().__init__(*args, **kwargs)
        self.placements: dict[str, Placement] = {}
        self.searches: dict[str, Search] = {}
        self.told: Callable[[bool], None] = lambda _: None

    def hold(self, request_id: str, placement: Placement) -> None:
        """Note what will be done about a request's blocks."""
        first = not self.placements
        self.placements[request_id] = placement
        if first:
            for name in _REPLACED:
                setattr(self, name, getattr(self, name + _WITH_GAPS))
            self.told(True)

    def let_go(self, request_id: str) -> None:
        """Forget what would be done about a request's blocks, if anything."""
        if self.placements.pop(request_id, None) is not None and not self.placements:
            for name in _REPLACED:
                delattr(self, name)
            self.told(False)

    def get_num_blocks_to_allocate_with_gaps(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """As vLLM's; kept blocks that nobody holds count too, since they leave the queue of free blocks."""
        placement = self.placements.get(request_id)
        if placement is None or placement.placed:
            needed: int = super().get_num_blocks_to_allocate(
                request_id, num_tokens, new_computed_blocks, *args, **kwargs
            )
            return needed
        in_all: int = max(-(-num_tokens // self.block_size), placement.num_blocks)
        idle: int = self._get_num_evictable_blocks([*new_computed_blocks, *placement.reused.values()])
        return in_all - placement.num_hit - len(placement.reused) + idle

    def allocate_new_blocks_with_gaps(self, request_id: str, *args: Any, **kwargs: Any) -> list[KVCacheBlock]:
        """As vLLM's, behind the end of what is kept."""
        placement = self.placements.get(request_id)
        if placement is not None and not placement.placed:
            self._place(self.req_to_blocks[request_id], placement)
        blocks: list[KVCacheBlock] = super().allocate_new_blocks(request_id, *args, **kwargs)
        return blocks

    def cache_blocks_with_gaps(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, up to the first token that is not computed yet, without the blocks that were kept."""
        placement = self.placements.get(request.request_id)
        if placement is None:
            super().cache_blocks(request, num_tokens, *args, **kwargs)
            return
        front = placement.front(num_tokens)
        for run in placement.runs:
            if run.action is not Action.REUSE or run.end * self.block_size > front:
                continue
            if self.num_cached_block.get(request.request_id, 0) < run.end:
                super().cache_blocks(request, run.start * self.block_size, *args, **kwargs)
                self.num_cached_block[request.request_id] = run.end
        super().cache_blocks(request, front, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As vLLM's; what is known of the request goes with its blocks."""
        self.let_go(request_id)
        self.searches.pop(request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks

    def _place(self, table: list[KVCacheBlock], placement: Placement) -> None:
        self.block_pool.touch(list(placement.reused.values()))  # before anything is allocated, which might evict them
        num_new = placement.num_blocks - placement.num_hit - len(placement.reused)
        new = iter(self.block_pool.get_new_blocks(num_new))
        numbers = range(placement.num_hit, placement.num_blocks)
        table.extend(placement.reused.get(number) or next(new) for number in numbers)
        placement.placed = True


_REPLACED = ("get_num_blocks_to_allocate", "allocate_new_blocks", "cache_blocks")


@dataclass(frozen=True, kw_only=True)
class GapSpec(FullAttentionSpec):
    """Full attention whose manager knows gaps; the same in all else, and known to the scheduler's process only."""


def with_gap_manager(kv_cache_config: KVCacheConfig) -> KVCacheConfig:
    """Return a model's KV cache configuration with our manager for its one group of full attention.

    Raises:
        ValueError: it has other groups, which can't be placed so.
    """
    if not can_have_gaps(kv_cache_config):
        raise ValueError("gaps in kept KV: needs a model with one group of full attention")
    return with_manager(kv_cache_config, GapSpec, GapManager)


def with_manager(
    kv_cache_config: KVCacheConfig, spec: type[FullAttentionSpec], manager: type[GapManager]
) -> KVCacheConfig:
    """Return a KV cache configuration whose one group has another manager.

    Args:
        kv_cache_config: Of a model with one group of full attention.
        spec: Tells vLLM of the manager; has the fields of vLLM's own.
        manager: The manager.
    """
    KVCacheSpecRegistry._ensure_registered()  # else ours, as the first one, would keep vLLM's own from registering
    KVCacheSpecRegistry.register(spec, manager_class=manager, uniform_type_base_spec=FullAttentionSpec)
    (group,) = kv_cache_config.kv_cache_groups
    fields = {item.name: getattr(group.kv_cache_spec, item.name) for item in _fields(group.kv_cache_spec)}
    return dataclasses.replace(
        kv_cache_config, kv_cache_groups=[dataclasses.replace(group, kv_cache_spec=spec(**fields))]
    )


def can_have_gaps(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether all layers keep the KV of all tokens, in blocks of one kind."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return len(specs) == 1 and type(specs[0]) is FullAttentionSpec


def _fields(spec: FullAttentionSpec) -> Iterable[dataclasses.Field[Any]]:
    return (item for item in dataclasses.fields(spec) if item.init)
