"""The contract between policies and a step: what they see, what they decide, and the one place that counts."""

from vllm_ext.contract.axes import Admission, Budget, GatePolicy, Need, Ordering, Policy, Residency, Sharing
from vllm_ext.contract.preemption import KvDisposition, PreemptionCost
from vllm_ext.contract.request import (
    AGED,
    NO_SERVER,
    NO_STEP_STATS,
    Ageing,
    AgeLimit,
    Origin,
    Rank,
    RequestView,
    Server,
    StepStats,
    check_rank,
)
from vllm_ext.contract.room import Candidate, Demand, Gate, Room, Victim
from vllm_ext.contract.step import NO_PLAN, Batch, Pool, Split, Step, StepPlan

__all__ = [
    "AGED",
    "NO_PLAN",
    "NO_SERVER",
    "NO_STEP_STATS",
    "Admission",
    "AgeLimit",
    "Ageing",
    "Batch",
    "Budget",
    "Candidate",
    "Demand",
    "Gate",
    "GatePolicy",
    "KvDisposition",
    "Need",
    "Ordering",
    "Origin",
    "Policy",
    "Pool",
    "PreemptionCost",
    "Rank",
    "RequestView",
    "Residency",
    "Room",
    "Server",
    "Sharing",
    "Split",
    "Step",
    "StepPlan",
    "StepStats",
    "Victim",
    "check_rank",
]
