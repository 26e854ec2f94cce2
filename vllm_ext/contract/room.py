"""What one step has left for admissions: the only place that counts seats, tokens and KV blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from vllm_ext.contract.request import RequestView

SEATS, TOKENS, BLOCKS, ADAPTERS = "seats", "tokens", "blocks", "adapters"
"""Why somebody does not fit, gates aside."""


class Demand(NamedTuple):
    """What a waiting request asks of a step, net of what it would share with others or find in the caches."""

    tokens: int
    """To compute; 0 for one that only loads in this step."""
    blocks: int
    """KV blocks that leave the free pool: new ones, and cached ones that nobody holds."""
    own_tokens: int
    """Of its KV that nobody holds yet: what it adds to a forecast of memory."""
    loads: bool = False
    """Whether it loads KV between steps: it takes blocks now, a seat and tokens when its KV has come."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A waiting request that could join now."""

    req_id: str
    key: tuple[float, ...]
    """Of its rank, ties included."""
    view: Callable[[], RequestView]
    """Makes its view. To be refused for want of room most candidates need none, and it is what costs most of them."""
    aged: bool = False
    """Whether only older ones go before it: nobody may pass it."""
    presses: bool = False
    """Whether it must run soon to keep an objective: others may leave for it, and it holds nobody up."""
    adapter: int = 0
    """Number of its LoRA adapter; 0: none."""
    _seen: RequestView | None = None

    @property
    def request(self) -> RequestView:
        """What policies may know of it."""
        if self._seen is None:
            self._seen = self.view()
        return self._seen


class Victim(NamedTuple):
    """A running request that could be preempted."""

    request: RequestView
    key: tuple[float, ...]
    """Of its rank, ties included, asked for again when it was looked at."""
    blocks: int = 0
    """KV blocks that its preemption frees; what it shares stays held."""
    restore_s: float = 0.0
    """Estimated time until it would have its KV back: computed again, or copied out and in."""
    stall_s: float = 0.0
    """The part of it in which nobody else is served; all of it where KV is computed again."""


class Gate(Protocol):
    """A condition of one step that every admission must meet besides having room; conditions are joined by *and*."""

    name: str
    """What `Room.why` says of those it refuses."""

    @property
    def closed(self) -> bool:
        """Whether it will refuse everybody as long as nobody leaves: then the queue needs no look."""
        ...

    def fits(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> bool:
        """Say whether it may join if ``leaving`` are preempted for it. Nothing is decided by asking."""
        ...

    def take(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> None:
        """Take note that it joins, and who leaves for it."""
        ...


@dataclass(slots=True)
class AdapterPlaces:
    """The LoRA adapters of a step: vLLM passes over whoever would need one more than it has places for."""

    used: set[int] = field(default_factory=set)
    """Numbers of those that have a place."""
    most: float = math.inf
    """Places (vLLM's ``--max-loras``)."""

    def fits(self, adapter: int) -> bool:
        """Say whether a request with this adapter could join; 0: it has none."""
        return not adapter or adapter in self.used or len(self.used) < self.most

    def take(self, adapter: int) -> None:
        """Note that a request with this adapter joins."""
        if adapter:
            self.used.add(adapter)


@dataclass(slots=True, kw_only=True)
class Room:
    """What a step has left. A selector asks `fits` and says `take`, and counts nothing itself."""

    seats: int
    """The cap on sequences, less those who run or have loaded."""
    tokens: int
    """Of the step's budget, less what runs takes, drafts included, and what has loaded."""
    blocks: int
    """Free KV blocks, less vLLM's watermark."""
    inputs: float = math.inf
    """Slots of the model's input that are left, of which each request takes ``draft_slots`` besides its tokens."""
    draft_slots: int = 0
    """What some drafters need."""
    chunk: int | None = None
    """Most tokens that one prompt gets in a step (vLLM's ``--long-prefill-token-threshold``); None: no bound."""
    idle: bool
    """Whether nothing runs or loads: then the first one that is asked for may join, whatever it needs."""
    price: Callable[[Candidate, int], Demand]
    """Prices a candidate after what was taken already, where so many tokens are left. Cost: a few look-ups in the
    prefix cache."""
    taken: Callable[[Candidate, int], None]
    """Told who joins and how many tokens it gets: what it caches in this step, others share."""
    adapters: AdapterPlaces = field(default_factory=AdapterPlaces)
    """LoRA adapters that have a place."""
    gates: tuple[Gate, ...] = ()
    admit: list[str] = field(default_factory=list)
    """Who joins, by id, in order."""
    preempt: list[str] = field(default_factory=list)
    """Who leaves, by id."""
    why: dict[str, str] = field(default_factory=dict)
    """Why a request that was looked at does not join: ``seats``, ``tokens``, ``blocks``, ``adapters``, or the gate's
    name."""
    _priced: dict[str, Demand] = field(default_factory=dict)
    _first: str | None = None

    @property
    def open(self) -> bool:
        """Whether anybody could join without somebody leaving."""
        return self.lacks is None

    @property
    def lacks(self) -> str | None:
        """What nobody could join for, unless somebody leaves: as in `why`; None if there is some of all."""
        if self.idle and not self.admit:
            return None
        for name, left in ((SEATS, self.seats), (TOKENS, self._most()), (BLOCKS, self.blocks)):
            if left < 1:
                return name
        return next((gate.name for gate in self.gates if gate.closed), None)

    def demand(self, candidate: Candidate) -> Demand:
        """Return what a candidate asks for, after what was taken already."""
        found = self._priced.get(candidate.req_id)
        if found is None:
            found = self._priced[candidate.req_id] = self.price(candidate, self._most())
        return found

    def fits(self, candidate: Candidate, leaving: Sequence[Victim] = ()) -> bool:
        """Say whether a candidate may join if ``leaving`` are preempted for it; a refusal is noted in `why`."""
        req_id = candidate.req_id
        if self.idle and not self.admit and self._first in (None, req_id):
            self._first = req_id
            return True
        short = self._short_of(candidate, leaving)
        if short is None:
            return True
        self.why[req_id] = short
        return False

    def take(self, candidate: Candidate, leaving: Sequence[Victim] = ()) -> None:
        """Let a candidate join, and ``leaving`` leave for it."""
        demand = self.demand(candidate)
        granted = max(0, min(demand.tokens, self._most()))
        self.seats += len(leaving) - (not demand.loads)
        self.tokens -= granted
        self.inputs -= 0 if demand.loads else granted + self.draft_slots
        self.blocks += sum(victim.blocks for victim in leaving) - demand.blocks
        for gate in self.gates:
            gate.take(candidate, demand, leaving)
        self.admit.append(candidate.req_id)
        self.preempt += [victim.request.req_id for victim in leaving]
        self.why.pop(candidate.req_id, None)
        self.adapters.take(candidate.adapter)
        self.taken(candidate, granted)
        self._priced.clear()

    def _most(self) -> int:
        """Most tokens that the next one gets."""
        if self.draft_slots:
            return int(min(self.tokens, self.inputs - self.draft_slots, self.chunk or math.inf))
        return self.tokens if self.chunk is None else min(self.tokens, self.chunk)

    def _short_of(self, candidate: Candidate, leaving: Sequence[Victim]) -> str | None:
        if self.seats + len(leaving) < 1:
            return SEATS
        if self._most() < 1:
            return TOKENS  # vLLM looks at nobody in a step without tokens, even to begin a load
        if not self.adapters.fits(candidate.adapter):
            return ADAPTERS
        demand = self.demand(candidate)
        if demand.blocks > self.blocks + sum(victim.blocks for victim in leaving):
            return BLOCKS
        for gate in self.gates:
            if not gate.fits(candidate, demand, leaving):
                return gate.name
        return None
