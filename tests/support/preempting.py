"""Rows for tests of preemption by rank: shortest predicted remaining time first, with prices, as ALISE with ours."""

from __future__ import annotations

from vllm_ext.systems import System, register
from vllm_ext.systems.alise import EstimatedWait, Preemptive, RemainingTimeLevels

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
