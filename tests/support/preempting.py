"""Rows for tests of preemption by rank: shortest predicted remaining time first, with prices, as ALISE with ours."""

from __future__ import annotations

from vllm_ext.policies.admission.preemptive import Preemptive
from vllm_ext.policies.ordering.remaining_time import RemainingTimeLevels
from vllm_ext.policies.residency.estimated_wait import EstimatedWait
from vllm_ext.system import System
from vllm_ext.systems import register

PREEMPTING, ORACLE = (
    register(
        System(
            name=name,
            ordering=RemainingTimeLevels,
            admission=Preemptive,
            residency=EstimatedWait,
            oracle=oracle,
            summary="for tests",
        )
    ).name
    for name, oracle in (("test-preempting", False), ("oracle-test-preempting", True))
)
