"""ALISE's dynamic swapping: keep, swap or recompute by how long a request will wait and what each way costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_ext.contract import KvDisposition, PreemptionCost, RequestView, Residency, Room, Step
from vllm_ext.contract.checks import require

SWAPPED, RECOMPUTED, PRICED = "swap", "recompute", "cost"


@dataclass(frozen=True, kw_only=True)
class EstimatedWait(Residency):
    """Decide for each preempted request, and copy the KV of those who will be preempted ahead of it.

    Of a request that has to leave, the KV stays where it is if the request is expected back before its blocks are
    reused (estimated wait time, eq. 7). Otherwise it is copied to host memory, or given up where computing it again is
    quicker than both copies:

        swap if  exposed * out + back < recompute

    unless it costs less to keep it on the device in 8 bits, where there is room for that.

    Who leaves next is seen by Algorithm 2: all requests in order of rank, the first that fit into memory belong there,
    and the KV of the others is copied while they still run, so that little is left to copy when they go.

    Needs a KV tier; without one everything is recomputed, as vLLM does.

    Source: ALISE, section 3.2, eqs. 6-7, Algorithm 2. Ours: the choice by cost, where the paper always swaps; a wait
    counted in places side by side; and copies ahead of time in the order of ranks, where the paper's are by queues.
    """

    choose: str = PRICED
    """``cost``, or always ``swap`` or ``recompute``: the strategies that ALISE's figure 8 compares."""
    exposed: float = 1.0
    """Part of the copy to the host that others wait for; 0 where it is wholly hidden behind computation."""
    ahead: bool = True
    """Whether KV is copied before its request is preempted, when that is foreseen."""
    every_steps: int = 4
    """Steps between two looks at who will have to leave."""
    max_leaving: int = 4
    """Requests whose KV is copied ahead at a time."""
    tier_bits: int = 8
    """Form of KV in host memory unless the user asks for another: 8 (ALISE, section 3.3) or 16."""

    def __post_init__(self) -> None:
        allowed = (PRICED, SWAPPED, RECOMPUTED)
        require(self.choose in allowed, "residency.choose", self.choose, f"one of {', '.join(allowed)}")
        require(0 <= self.exposed <= 1, "residency.exposed", self.exposed, "from 0 to 1")
        require(self.tier_bits in (8, 16), "residency.tier_bits", self.tier_bits, "8 or 16")
        for field in ("every_steps", "max_leaving"):
            value = getattr(self, field)
            require(value >= 1, f"residency.{field}", value, "an integer of at least 1")

    @property
    def uses_predictions(self) -> bool:
        """Whether predicted lengths are looked at: waits are made of them."""
        return self.choose == PRICED

    @property
    def tier_options(self) -> dict[str, Any]:
        """Options of the KV tier that this policy wants where the user leaves them open."""
        return {"bits": self.tier_bits}

    def on_preempt(self, request: RequestView, cost: PreemptionCost) -> KvDisposition:
        """Return what becomes of a preempted request's KV."""
        if self.choose == RECOMPUTED:
            return KvDisposition.RECOMPUTE
        if cost.wait_s < cost.reuse_s:
            return KvDisposition.KEEP
        if self.choose == SWAPPED:
            return KvDisposition.SWAP
        swap_s = self.exposed * cost.out_s + cost.back_s
        if cost.stay_s < min(swap_s, request.recompute_s):
            return KvDisposition.DEVICE_INT8
        return KvDisposition.SWAP if swap_s < request.recompute_s else KvDisposition.RECOMPUTE

    @property
    def look_ahead_steps(self) -> int:
        """Steps between two times that `leaving_soon` is asked."""
        return self.every_steps

    def leaving_soon(self, step: Step, room: Room) -> tuple[str, ...]:
        """Return the running requests, by id, that better-ranked waiting ones will push out.

        Cost: a look at a few requests in one step of ``every_steps``.
        """
        if not self.ahead or self.choose == RECOMPUTED or not step.num_waiting or not step.num_running:
            return ()
        leaving: list[str] = []
        victims = (victim for victim in step.victims() if victim.request.req_id not in room.preempt)
        blocks = room.blocks
        victim = next(victims, None)
        for candidate in step.waiting():
            if candidate.request.req_id in room.admit:
                continue
            blocks -= room.demand(candidate).blocks
            while blocks < 0 and victim is not None and len(leaving) < self.max_leaving:
                if candidate.key >= victim.key:
                    return tuple(leaving)
                leaving.append(victim.request.req_id)
                blocks += victim.blocks
                victim = next(victims, None)
            if blocks < 0:
                break
        return tuple(leaving)
