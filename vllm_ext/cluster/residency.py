"""What of the latest conversations a scheduler has KV of: on the device, and in host memory behind it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_ext.cluster.report import MOST_SESSIONS, Held, session_key
from vllm_ext.kv.connector.cached_prefixes import PrefixProbe

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey

    from vllm_ext.kv.connector.scheduler import TierScheduler


@dataclass
class _Kept:
    """The last request of a conversation, as far as look-ups need it."""

    block_hashes: Sequence[Any]
    num_tokens: int
    chunks: Sequence[OffloadKey]
    skip_reading_prefix_cache: bool = False
    start: int = 0
    """Blocks at its front when it was looked up last."""


class Residency:
    """Follows the requests that end. Look-ups change nothing, and take some microseconds for each conversation.

    Args:
        scheduler: vLLM's or ours, whose requests bring session ids.
        most: Conversations that are followed, the latest ones.
    """

    def __init__(self, scheduler: Scheduler, most: int = MOST_SESSIONS) -> None:
        self._probe = PrefixProbe(scheduler)
        self._tier: TierScheduler | None = getattr(scheduler, "tier", None)
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._most = most
        original = scheduler._free_request

        def free(request: Request, *args: Any, **kwargs: Any) -> Any:
            if request.session_id is not None and request.num_computed_tokens:
                self._follow(session_key(request.session_id), request)
            return original(request, *args, **kwargs)

        scheduler._free_request = free

    def held(self) -> dict[str, Held]:
        """Return tokens by conversation, of those of which there are any."""
        found = {}
        for key, kept in self._kept.items():
            blocks, _, kept.start = self._probe.cached(kept, kept.start)
            device = blocks * self._probe.block_size
            host = self._host_tokens(kept.chunks, device)
            if device or host:
                found[key] = Held(device, host)
        return found

    def uncached_tokens(self, requests: Iterable[Request]) -> int:
        """Return the tokens of waiting requests that the device does not have."""
        size = self._probe.block_size
        return sum(max(1, one.num_tokens - self._probe.cached(one)[0] * size) for one in requests)

    def _follow(self, key: str, request: Request) -> None:
        status = None if self._tier is None else self._tier._req_status.get(request.request_id)
        chunks: list[OffloadKey] = []
        if status is not None and len(status.group_states) == 1:
            status.update_offload_keys()
            chunks = list(status.group_states[0].offload_keys)
        self._kept[key] = _Kept(list(request.block_hashes), request.num_tokens, chunks)
        self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

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
