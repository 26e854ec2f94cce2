"""Finds what is kept of a request behind gaps, decides what is done about it, and keeps account of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vllm_ext.kv.partial_prefix.layout import GapLayout
from vllm_ext.kv.partial_prefix.manager import GapManager, Placement, Search
from vllm_ext.kv.partial_prefix.plan import Action, Run, gaps_of, plan

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_MAX_GAPS = 4
UNSUPPORTED, ROWS = "unsupported", "rows"
REFUSALS = {
    UNSUPPORTED: "the request's inputs are placed by more than a position, or it asked not to read what is kept",
    ROWS: "each gap takes a row more in the attention kernels' tables, which hold --max-num-seqs rows",
}
"""Why nothing behind a prefix hit is looked for, or used."""
_TRIES = 16
"""Attempts to admit a request of which one looks for all its blocks, and the others for those that the first found."""


class HostChunks(Protocol):
    """Chunks in host memory that can be brought back into the middle of a sequence."""

    def held_blocks(self, request: Request, numbers: Iterable[int]) -> set[int]:
        """Return which blocks of a request can be loaded now, of those with such numbers; changes nothing."""
        ...


@dataclass
class GapCounts:
    """What became of lookups behind gaps, counted when a request gets its blocks."""

    tokens_kept: int = 0
    """Tokens whose KV was found on the device behind the prefix hit, and used."""
    tokens_loaded: int = 0
    """Tokens whose KV was brought back from the host."""
    tokens_computed: int = 0
    """Tokens of gaps, which were computed again."""
    tokens_missing: int = 0
    """Those of them that were kept nowhere; the others were, and would have made more gaps than a request may have."""
    requests_by_gaps: Counter[int] = field(default_factory=Counter)
    """How many requests were continued across so many gaps."""
    refused: Counter[str] = field(default_factory=Counter)
    """How many requests were not continued across gaps, by reason (`REFUSALS`)."""

    @property
    def requests(self) -> int:
        """Requests that were continued across gaps."""
        return self.requests_by_gaps.total()

    @property
    def gaps(self) -> int:
        """Gaps of these requests."""
        return sum(gaps * requests for gaps, requests in self.requests_by_gaps.items())

    def state(self) -> dict[str, Any]:
        """Return the counts, fit for JSON."""
        by_gaps = {str(gaps): requests for gaps, requests in self.requests_by_gaps.items()}
        counts = {**vars(self), "requests_by_gaps": by_gaps, "refused": dict(self.refused)}
        return {"requests": self.requests, "gaps": self.gaps, **counts}


class Kept(NamedTuple):
    """What is kept of a request, its prefix hit included."""

    tokens: int
    """The virtual number of computed tokens."""
    held_blocks: int
    """Blocks behind the hit that running requests hold, or that are records: to adopt them takes no free block."""
    idle_blocks: int
    """Blocks behind the hit that nobody holds: each leaves the free blocks when it is adopted."""


class GapSearch:
    """Lookups behind gaps for one scheduler.

    Attributes:
        host: Finds chunks in host memory, and brings them back; None: nothing is loaded behind gaps.
        compute_s: Seconds to compute so many tokens after so many others.
        rows_left: Returns how many rows of attention a step has left that also computes a request, of this id.
        counts: What became of them.
    """

    def __init__(self, manager: GapManager, compute_s: Callable[[int, int], float]) -> None:
        """Take the block manager, and what tokens cost."""
        self._manager = manager
        self.host: HostChunks | None = None
        self.compute_s = compute_s
        self.rows_left: Callable[[str], int] = lambda _: _MAX_GAPS
        self.counts = GapCounts()

    def block_cost_s(self, end: int) -> float:
        """Return the time to compute a block again that ends after so many tokens, in seconds."""
        size = self._manager.block_size
        return self.compute_s(size, max(0, end - size))

    def kept_tokens(self, request: Request, num_hit_tokens: int) -> int:
        """Place a request whose prefix hit has so many tokens.

        Returns:
            How many tokens are kept in all: the virtual number of computed tokens; the hit alone if nothing else is.
        """
        self._manager.let_go(request.request_id)  # of an earlier try to admit it
        search = self._manager.searches.setdefault(request.request_id, Search())
        placement = self._placement(request, num_hit_tokens // self._manager.block_size, search)
        if isinstance(placement, Placement):
            self._manager.hold(request.request_id, placement)
            return placement.layout.num_kept
        if placement is not None and search.tries == 1:  # who waits is looked up in each step, and counts once
            self.counts.refused[placement] += 1
        return num_hit_tokens

    def peek(self, request: Request, local_tokens: int) -> Kept:
        """Return what `kept_tokens` would find now, and change nothing: to price an admission.

        Cost: that of `kept_tokens`, one look-up per block behind the hit at the first try to admit the request and at
        every sixteenth, and per block that the last of these found at the others.

        Args:
            request: One that waits.
            local_tokens: Of its prefix hit.
        """
        known = self._manager.searches.get(request.request_id, Search())
        placement = self._placement(request, local_tokens // self._manager.block_size, replace(known))
        if not isinstance(placement, Placement):
            return Kept(local_tokens, 0, 0)
        first_record = self._manager.block_pool.num_gpu_blocks
        held = sum(block.ref_cnt > 0 or block.block_id >= first_record for block in placement.reused.values())
        return Kept(placement.layout.num_kept, held, len(placement.reused) - held)

    def is_within(self, req_id: str, index: int) -> bool:
        """Return whether tokens of a gap are still to be computed, from a virtual index on."""
        placement = self._manager.placements.get(req_id)
        return placement is not None and index < placement.layout.end

    def extra_rows(self, computed: Callable[[str], int], *, without: str | None = None) -> int:
        """Return how many rows of attention a step has at most beyond one for each request that it computes.

        Cost: a few operations for each request that has or had gaps.

        Args:
            computed: The virtual number of a request's computed tokens, before the step.
            without: A request that is not counted.
        """
        placed = ((r, p.layout) for r, p in self._manager.placements.items() if p.placed and r != without)
        return sum(layout.num_ahead(index) for r, layout in placed if (index := computed(r)) < layout.end)

    def placement(self, req_id: str) -> Placement | None:
        """Return what is done about a request's blocks, if it has gaps."""
        return self._manager.placements.get(req_id)

    def front(self, req_id: str, index: int) -> int:
        """Return how many tokens of a request have their KV, from the first one on, before a virtual index."""
        placement = self._manager.placements.get(req_id)
        return index if placement is None or not placement.placed else placement.front(index)

    def layouts(self, output: SchedulerOutput, computed: Callable[[str], int]) -> dict[str, GapLayout]:
        """Return where the tokens of a step's requests lie that are not beyond their gaps, by request.

        Args:
            output: The step.
            computed: The virtual number of a request's computed tokens, with those of the step.
        """
        placements, scheduled = self._manager.placements, output.num_scheduled_tokens
        found = {}
        for req_id in placements.keys() & scheduled.keys() if placements else ():
            layout = placements[req_id].layout
            first = computed(req_id) - scheduled[req_id]
            if first < layout.end:
                found[req_id] = layout
                if first == layout.num_kept:
                    self._count(placements[req_id])
        return found

    def _placement(self, request: Request, num_hit: int, search: Search) -> Placement | str | None:
        """Return what to do about a request's blocks, why nothing is done (`REFUSALS`), or None if no gap is there.

        Changes nothing but ``search``.
        """
        search.tries += 1
        if request.skip_reading_prefix_cache or request.has_encoder_inputs or request.prompt_embeds is not None:
            return UNSUPPORTED
        kept = self._kept_blocks(request, num_hit, search)
        if not kept:
            return None
        end = max(kept) + 1
        blocks = [Action.REUSE] * num_hit
        blocks += (kept[n][0] if n in kept else Action.COMPUTE for n in range(num_hit, end))
        runs = plan(blocks, max_gaps=_MAX_GAPS)
        rows = max(0, self.rows_left(request.request_id)) if gaps_of(runs) else 0
        refusal = ROWS if gaps_of(runs) > rows else None
        if refusal:
            runs = plan(blocks, max_gaps=rows)
        behind = tuple(run for run in runs if run.start >= num_hit)
        if not gaps_of(behind):
            return refusal  # no gap: vLLM's own way, and the connector's, does as well
        reused = {n: kept[n][1] for run in behind if run.action is Action.REUSE for n in range(run.start, run.end)}
        missing = sum(n not in kept for run in _computed(behind) for n in range(run.start, run.end))
        return Placement(GapLayout(self._ranges(runs)), num_hit, behind, reused, missing)

    def _ranges(self, runs: Sequence[Run]) -> tuple[tuple[int, int], ...]:
        """Return the kept ranges of a plan, in tokens."""
        size = self._manager.block_size
        parts = groupby(runs, lambda run: run.action is Action.COMPUTE)
        kept = (list(part) for computed, part in parts if not computed)
        return tuple((part[0].start * size, part[-1].end * size) for part in kept)

    def _kept_blocks(self, request: Request, num_hit: int, search: Search) -> dict[int, tuple[Action, Any]]:
        """Return where blocks behind the prefix hit are, by number, and those of the device; not the last token's."""
        lookup, hashes = self._manager.block_pool.get_cached_block, request.block_hashes
        numbers: Sequence[int] = range(num_hit, min((request.num_tokens - 1) // self._manager.block_size, len(hashes)))
        looks_for_all = search.tries % _TRIES == 1
        if not looks_for_all:  # what was nowhere is hardly anywhere now, and who waits is asked for in each step
            numbers = [number for number in search.numbers if number in numbers]
        kept: dict[int, tuple[Action, Any]] = {}
        for number in numbers:
            if (found := lookup(hashes[number], [0])) is not None:
                kept[number] = (Action.REUSE, found[0])
        if self.host is not None:
            for number in self.host.held_blocks(request, (n for n in numbers if n not in kept)):
                kept[number] = (Action.LOAD, None)
        if looks_for_all:
            search.numbers = sorted(kept)
        return kept

    def _count(self, placement: Placement) -> None:
        size, counts = self._manager.block_size, self.counts
        computed = _computed(placement.runs)
        counts.requests_by_gaps[len(computed)] += 1
        counts.tokens_kept += len(placement.reused) * size
        counts.tokens_loaded += sum(run.num_blocks for run in placement.runs if run.action is Action.LOAD) * size
        counts.tokens_computed += sum(run.num_blocks for run in computed) * size
        counts.tokens_missing += placement.num_missing * size


def _computed(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.action is Action.COMPUTE]
