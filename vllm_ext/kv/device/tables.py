"""Block tables as those see them who copy KV to host memory: a record is no block, and is copied by nobody."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

NOTHING = 0
"""vLLM's null block, which its connectors pass over."""


def blocks_only(output: SchedulerOutput, num_blocks: int) -> Any:
    """Return what a step says of block tables, with the null block in the place of each record.

    Args:
        output: The step; not changed.
        num_blocks: Blocks of the pool; ids from here on name records.
    """
    cached = output.scheduled_cached_reqs
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=new.req_id, block_ids=_blocks(new.block_ids, num_blocks))
            for new in output.scheduled_new_reqs
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=cached.req_ids,
            new_block_ids=[ids and _blocks(ids, num_blocks) for ids in cached.new_block_ids],
            resumed_req_ids=cached.resumed_req_ids,
        ),
        kv_cache_block_copies=output.kv_cache_block_copies,
    )


def _blocks(groups: Sequence[Sequence[int]], num_blocks: int) -> tuple[list[int], ...]:
    return tuple([block if block < num_blocks else NOTHING for block in group] for group in groups)
