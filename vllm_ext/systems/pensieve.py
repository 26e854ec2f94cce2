"""Pensieve (EuroSys '25): KV of conversations survives the turn; as published it leaves from its leading end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_ext.config.kv_tier import (
    ALL,
    AUTO,
    BY_AGE,
    COPIES,
    FUSED,
    IN_STEP,
    LEADING,
    OFF,
    PAYING,
    RETENTION,
    RETURNS,
)
from vllm_ext.contract import KvDisposition, Need, PreemptionCost, RequestView, Residency
from vllm_ext.contract.checks import require
from vllm_ext.systems.alise import EstimatedWait
from vllm_ext.systems.system import System

_OURS: Mapping[str, Any] = {"gib": AUTO, "policy": RETENTION, "load": AUTO, "gaps": OFF, "prompt_only": AUTO}
_PUBLISHED: Mapping[str, Any] = {"policy": LEADING, "load": IN_STEP, "gaps": FUSED, "prompt_only": False}
"""Options of the KV tier in which the two differ."""


@dataclass(frozen=True, kw_only=True)
class Retention(Residency):
    """Keep the KV of finished turns on the device and in host memory, and drop what is cheapest to compute again.

    Blocks on the device stay until they are needed, and are copied to the host before that, when less than a quarter
    of them could be taken without loss. In host memory chunks of least retention value go first.

    As published these are the leading chunks of conversations that were not active for long, there and on the device; a
    conversation that comes back computes them again in one forward pass with its new prompt, while the others come back
    layer by layer. By default conversations shrink from their tails instead, which finds as much
    (``benchmarks/simulated/kv_ablation.py``) with vLLM's own look-up and workers.

    What this asks for are options of the KV tier, which a user may set otherwise (``kv_tier``); without host memory
    (``--kv-tier-gib 0``, the default on vLLM's CPU backend) conversations live on the device only.

    Source: Pensieve, sections 4.3 and 4.4. Ours, with a switch (``copies``): copies are made only where they pay, what
    a suspended request has computed is copied when its blocks are needed, and there are no gaps.
    """

    reserve: float = 0.1
    """Share of the device's blocks that admissions leave to running requests, as vLLM's ``--watermark``."""
    tier_bits: int = 16
    """Form of KV in host memory unless the user asks for another: 16, as published, or 8."""
    returns: str = BY_AGE
    """At which rate conversations are taken to come back: ``age``, 1 / time since the last turn, as in the equation;
    ``turns``, the share that comes back after so many turns, over that time, as in the paper's text."""
    copies: str = PAYING
    """``paying``, or ``all``, as published: everything is stored before it is lost, suspended requests at once,
    whatever the host holds is loaded, within the step that computes the request, and leading ends go first."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.TIER_FOR_CONVERSATIONS})

    def __post_init__(self) -> None:
        require(0 <= self.reserve < 1, "residency.reserve", self.reserve, "at least 0 and less than 1")
        require(self.tier_bits in (8, 16), "residency.tier_bits", self.tier_bits, "8 or 16")
        require(self.returns in RETURNS, "residency.returns", self.returns, f"one of {', '.join(RETURNS)}")
        require(self.copies in COPIES, "residency.copies", self.copies, f"one of {', '.join(COPIES)}")

    @property
    def uses_predictions(self) -> bool:
        """Whether predicted lengths are looked at: they are not."""
        return False

    @property
    def device_reserve(self) -> float:
        """Share of the device's blocks that admissions leave to running requests."""
        return self.reserve

    @property
    def tier_options(self) -> dict[str, Any]:
        """Options of the KV tier that this policy wants where the user leaves them open."""
        return {
            "bits": self.tier_bits,
            "returns": self.returns,
            "store": AUTO,
            "copies": self.copies,
            **(_OURS if self.copies == PAYING else _PUBLISHED),
        }

    def on_preempt(self, request: RequestView, cost: PreemptionCost) -> KvDisposition:
        """Suspend: the KV stays until its blocks are needed, and is copied before that; as published it is at once."""
        return KvDisposition.KEEP if self.copies == PAYING else KvDisposition.SWAP


@dataclass(frozen=True, kw_only=True)
class RetentionWithSwaps(EstimatedWait, Retention):
    """Conversations as `Retention` keeps them, and preempted requests as `EstimatedWait` has it, in one tier.

    Both kinds of KV have one scale of value: a preempted request's chunks are those of a conversation that was active
    just now, and so the last to go.
    """

    tier_bits: int = 8

    def __post_init__(self) -> None:
        EstimatedWait.__post_init__(self)
        Retention.__post_init__(self)

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        """What both need."""
        return super().needs | Retention.needs

    @property
    def tier_options(self) -> dict[str, Any]:
        """Options of the KV tier that this policy wants where the user leaves them open."""
        return {**Retention.tier_options.fget(self), "gib": 0.0}  # type: ignore[attr-defined]


Retention.joined = {EstimatedWait: RetentionWithSwaps}

_PAPER = "Pensieve (EuroSys '25)"

ROWS = (
    System(
        name="pensieve",
        residency=Retention,
        paper=_PAPER,
        summary="conversations keep their KV between turns, on the device and in host memory",
    ),
    System(
        name="pensieve-published",
        residency=Retention,
        parameters={"residency": {"reserve": 0.1, "tier_bits": 16, "returns": BY_AGE, "copies": ALL}},
        paper=_PAPER,
        summary="pensieve as published: leading ends are dropped and computed again, whatever copies cost",
    ),
)
