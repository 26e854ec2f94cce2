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

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

from vllm_ext.config.kv_tier import IN_STEP

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

    from vllm_ext.kv.connector.prices import TransferPrices


@dataclass
class TierMetadata(OffloadingConnectorMetadata):
    """What the workers have to copy, and which of the loads the step waits for."""

    in_step: frozenset[int] = frozenset()
    """Ids of jobs in ``load_jobs``."""


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
        step_s: Returns the mean duration of a step, in seconds.
        num_running: Returns how many requests are in the step that is being scheduled.
        clock: Returns the time, in seconds.
        num_layers: Layers of the model.

    Attributes:
        chosen: Requests whose load is to be within the step, if they get their blocks.
    """

    def __init__(
        self, mode: str, prices: TransferPrices, step_s: Callable[[], float], num_running: Callable[[], int],
        clock: Callable[[], float],
        *, num_layers: int,
    ) -> None:  # fmt: skip
        self._always = mode == IN_STEP
        self._prices, self._step_s, self._num_running, self._clock = prices, step_s, num_running, clock
        self._num_layers = num_layers
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
        behind_s = 0.0 if self._prices.takes_cycles else max(0.0, self._link_free_s - self._clock())
        return self._always or in_step_is_cheaper(
            self._prices.load_s(num_tokens),
            planned_s=self._planned_s,
            step_s=self._step_s(),
            num_layers=self._num_layers,
            others=self._num_running(),
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
            behind_step_s = self._clock() + self._step_s()
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


def exposed_s(load_s: float, step_s: float, num_layers: int, *, behind_s: float = 0.0) -> float:
    """Return by how much a step gets longer which loads KV layer by layer, and computes meanwhile.

    The first layer's attention waits for a layer's share of the load. After that the slower of both sets the pace: the
    last layer's share is there after ``load_s``, by when all layers but the last one can be through. All of it waits
    for what the link has to bring before.

    Args:
        load_s: To load all layers, in seconds; 0: there is nothing to wait for.
        step_s: A step that loads nothing, in seconds.
        num_layers: At least 1.
        behind_s: Until the load can begin, in seconds.

    Source: Pensieve, section 4.3.3, for the pipeline.
    """
    if not load_s:
        return 0.0
    first, hidden = load_s / num_layers, step_s * (num_layers - 1) / num_layers
    return behind_s + max(first, load_s - hidden)


def between_s(load_s: float, step_s: float, others: int, *, behind_s: float = 0.0) -> float:
    """Return how much later a request computes if its KV is loaded between steps.

    The load begins behind the step at hand, and is seen to be through at the end of a step; where nothing else runs
    there is no step to wait for.

    Args:
        load_s: To load it, in seconds.
        step_s: A step, in seconds; greater than 0.
        others: Requests that run in the step at hand.
        behind_s: Until the link is free, from the step's begin on, in seconds.
    """
    if not others:
        return behind_s + load_s
    return step_s * (1 + math.ceil((max(0.0, behind_s - step_s) + load_s) / step_s))


def in_step_is_cheaper(
    load_s: float, *, planned_s: float, step_s: float, num_layers: int, others: int, behind_s: float = 0.0
) -> bool:
    """Return whether to load within the step at hand, for which all that run in it wait.

    Args:
        load_s: What this request's load takes, in seconds.
        planned_s: What the loads take that this step makes already.
        step_s: A step that loads nothing; greater than 0.
        num_layers: At least 1.
        others: Requests that run in the step beside this one.
        behind_s: Until the link is through with the loads of the steps before, which nobody waits for, in seconds.
    """
    together = exposed_s(planned_s + load_s, step_s, num_layers, behind_s=behind_s)
    added = together - exposed_s(planned_s, step_s, num_layers, behind_s=behind_s)
    return together + added * others <= between_s(planned_s + load_s, step_s, others, behind_s=behind_s)
