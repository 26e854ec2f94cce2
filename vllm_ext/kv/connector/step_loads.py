"""Loads within a step: a request computes in the step that brings its KV back.

vLLM's connector loads between steps only. A load within a step is booked as nobody's (`kv.connector.jobs`), and ends
with the step.

A load that fails has been computed with by then: by its request, by those that share its blocks, and with async
scheduling by the next step too. Nothing of that may last. Blocks written since leave the prefix cache, what was to be
stored since is never found, and who read them is preempted without its output. vLLM would let them go on from the
first block that failed, but goes wrong there: with async scheduling it delivers what the next step made of the KV, a
prompt that is computed again in pieces can be found in the prefix cache before its last piece is, and the connector
stores chunks that were computed from what was not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

from vllm_ext.config.kv_tier import IN_STEP
from vllm_ext.kv.connector.load_choice import in_step_is_cheaper

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

    from vllm_ext.kv.connector.prices import TransferPrices


@dataclass
class TierMetadata(OffloadingConnectorMetadata):
    """What the workers have to copy, and which of the loads the step waits for."""

    in_step: frozenset[int] = frozenset()
    """Ids of jobs in ``load_jobs``."""


class Engine(NamedTuple):
    """What the choice is made by. Who gives it promises to ask `failed_step_loads` before a step's output is used."""

    step_s: Callable[[], float]
    """Mean duration of a step, in seconds."""
    num_running: Callable[[], int]
    """Requests in the step that is being scheduled."""


class FailedLoads(NamedTuple):
    """Loads within a step that did not fill all of their blocks."""

    since: int
    """Id of the first of these jobs."""
    blocks: frozenset[int]
    """Those that were not filled."""
    suspects: frozenset[int]
    """Blocks allocated since the step of the first of these loads: all that can have been computed from them."""


@dataclass
class _Load:
    blocks: frozenset[int]
    since: set[int] = field(default_factory=set)
    """Blocks that were allocated in its step and in those scheduled since."""


class StepLoads:
    """The loads within the step that is being scheduled, and those whose step's output did not come yet.

    Args:
        mode: Within steps, or what costs less.
        prices: What copies take.
        engine: What the choice is made by.
        clock: Returns the time, in seconds.
        num_layers: Layers of the model.
        takes_cycles: Whether what computes also copies, as on the CPU: there other copies make way for these.

    Attributes:
        chosen: Requests whose load is to be within the step, if they get their blocks.
    """

    def __init__(
        self, mode: str, prices: TransferPrices, engine: Engine, clock: Callable[[], float],
        *, num_layers: int, takes_cycles: bool,
    ) -> None:  # fmt: skip
        self._always = mode == IN_STEP
        self._prices, self._engine, self._clock = prices, engine, clock
        self._num_layers, self.takes_cycles = num_layers, takes_cycles
        self.chosen: set[str] = set()
        self._loads: dict[int, _Load] = {}
        self._starting: set[int] = set()
        """Those of the step that is being scheduled."""
        self._planned_s = 0.0
        """What these take."""
        self._unhurried_s = 0.0
        """What those take that it begins and nobody waits for."""
        self._link_free_s = 0.0
        """When the link will be through with those of the steps before, by the clock."""

    def is_cheaper(self, num_tokens: int) -> bool:
        """Return whether so many tokens are loaded within the step that is being scheduled; changes nothing."""
        behind_s = 0.0 if self.takes_cycles else max(0.0, self._link_free_s - self._clock())
        return self._always or in_step_is_cheaper(
            self._prices.load_s(num_tokens),
            planned_s=self._planned_s,
            step_s=self._engine.step_s(),
            num_layers=self._num_layers,
            others=self._engine.num_running(),
            behind_s=behind_s,
        )

    def begin(self, job_id: int, blocks: Iterable[int], num_tokens: int) -> None:
        """Note a load that the step waits for."""
        self._starting.add(job_id)
        self._loads[job_id] = _Load(frozenset(blocks))
        self._planned_s += self._prices.load_s(num_tokens)

    def begin_between(self, num_tokens: int) -> None:
        """Note a load that begins behind the step."""
        self._unhurried_s += self._prices.load_s(num_tokens)

    def allocated(self, blocks: set[int]) -> None:
        """Note the blocks that the step takes."""
        for load in self._loads.values():
            load.since |= blocks

    def close(self) -> frozenset[int]:
        """End the scheduling of a step; return the jobs that it waits for."""
        if self._unhurried_s:
            behind_step_s = self._clock() + self._engine.step_s()
            self._link_free_s = max(self._link_free_s, behind_step_s) + self._unhurried_s
        starting, self._starting = frozenset(self._starting), set()
        self._planned_s = self._unhurried_s = 0.0
        return starting

    @property
    def blocks(self) -> frozenset[int]:
        """Blocks that loads fill which were not reported yet."""
        return frozenset().union(*(load.blocks for load in self._loads.values()))

    def failed(self, report: KVConnectorOutput) -> FailedLoads | None:
        """Close the books of those that a step's workers report, and return what failed; None if all is well."""
        completed = getattr(report.kv_connector_worker_meta, "completed_jobs", {}) if self._loads else {}
        ended = {job_id: self._loads.pop(job_id) for job_id in completed if job_id in self._loads}
        unfilled = report.invalid_block_ids or set()
        failed = {job_id: load for job_id, load in ended.items() if not load.blocks.isdisjoint(unfilled)}
        if not failed:
            return None
        blocks = frozenset().union(*(load.blocks for load in failed.values())) & unfilled
        return FailedLoads(min(failed), blocks, frozenset().union(*(load.since for load in failed.values())))
