"""What of the latest conversations a scheduler has KV of: on the device, and in host memory behind it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_ext.kv.connector.cached_prefixes import PrefixProbe
from vllm_ext.scheduling.load_report.report import MOST_SESSIONS, Held

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey

    from vllm_ext.kv.connector.scheduler import TierScheduler

_LOOKUPS = 4000
"""Look-ups that an answer may make, a fraction of a microsecond each; whose turn did not come stands as it was."""
_MOST_HASHES = 500_000
"""Hashes of blocks that are kept, some 50 MB with what holds them: 8 million tokens of conversations."""
_NOTHING = Held(0)


@dataclass
class _Kept:
    """The last request of a conversation, as far as look-ups need it."""

    block_hashes: Sequence[Any]
    num_tokens: int
    chunks: Sequence[OffloadKey]
    held: Held
    """As it was looked up last."""
    skip_reading_prefix_cache: bool = False
    start: int = 0
    """Blocks at its front then."""

    @property
    def hashes(self) -> int:
        """How many are kept of it."""
        return len(self.block_hashes) + len(self.chunks)


class Residency:
    """Follows conversations by their requests that end. Look-ups change nothing.

    Args:
        scheduler: vLLM's or ours.
        most: Conversations that are followed, the latest ones; fewer, where they are long.
    """

    def __init__(self, scheduler: Scheduler, most: int = MOST_SESSIONS, most_hashes: int = _MOST_HASHES) -> None:
        self.probe = PrefixProbe(scheduler)
        self._tier: TierScheduler | None = getattr(scheduler, "tier", None)
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._turns: OrderedDict[str, None] = OrderedDict()
        """Who is looked up next, the first first."""
        self._most, self._most_hashes = most, most_hashes
        self._hashes = 0

    def follow(self, key: str, request: Request) -> None:
        """Take note of a request of a conversation, whose blocks are about to be given back."""
        status = None if self._tier is None else self._tier._req_status.get(request.request_id)
        chunks: list[OffloadKey] = []
        if status is not None and len(status.group_states) == 1:
            status.update_offload_keys()
            chunks = list(status.group_states[0].offload_keys)
        if key in self._kept:
            self._hashes -= self._kept[key].hashes
        else:
            self._turns[key] = None
            self._turns.move_to_end(key, last=False)
        blocks = min(len(request.block_hashes), request.num_computed_tokens // self.probe.block_size)
        held = Held(blocks * self.probe.block_size)
        self._kept[key] = _Kept(list(request.block_hashes), request.num_tokens, chunks, held)
        self._kept.move_to_end(key)
        self._hashes += self._kept[key].hashes
        while len(self._kept) > self._most or self._hashes > self._most_hashes:
            oldest, given_up = self._kept.popitem(last=False)
            self._hashes -= given_up.hashes
            del self._turns[oldest]

    def held(self, lookups: int = _LOOKUPS) -> dict[str, Held]:
        """Return tokens by conversation, of those of which there are any; those looked up longest ago are looked up."""
        for _ in range(len(self._turns)):
            if lookups <= 0:
                break
            key = next(iter(self._turns))
            self._turns.move_to_end(key)
            lookups -= self._look_up(self._kept[key])
        return {key: kept.held for key, kept in self._kept.items() if kept.held != _NOTHING}

    def _look_up(self, kept: _Kept) -> int:
        """Look a conversation up anew, and return about how many look-ups that took."""
        blocks, _, kept.start = self.probe.cached(kept, kept.start)
        device = blocks * self.probe.block_size
        host = self._host_tokens(kept.chunks, device)
        kept.held = Held(device, host)
        walked = 4 if self.probe.gallops else 4 + len(kept.block_hashes)
        return walked + max(0, host - device) // self.probe.block_size

    def _host_tokens(self, chunks: Sequence[OffloadKey], device: int) -> int:
        """Return up to which token the host's chunks go on from what the device has; 0: it has nothing more."""
        if self._tier is None or not chunks:
            return 0
        size, books = self._tier.prices.chunk_tokens, self._tier.manager.policy
        first = end = device // size
        for key in chunks[first:]:
            chunk = books.get(key)
            if chunk is None or chunk.ref_cnt < 0:  # being written
                break
            end += 1
        return end * size if end > first else 0
