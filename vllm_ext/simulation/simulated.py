"""`vllm_ext.simulate`: a simulation from Python, and what it found as DataFrames."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_ext.simulation.measure import export
from vllm_ext.simulation.measure.metrics import summarise
from vllm_ext.simulation.measure.run_data import RunData
from vllm_ext.simulation.spec import SimulationSpec, checked, parse, with_values

if TYPE_CHECKING:
    import pandas as pd

STEPS = 1_000_000
"""Steps that are kept where the description does not say."""


@dataclass(frozen=True)
class Simulated:
    """A run that ended."""

    spec: SimulationSpec
    run: RunData

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """Flat metrics, units in the names; those of ``vllm-ext simulate``."""
        return summarise(self.run)

    @functools.cached_property
    def requests(self) -> pd.DataFrame:
        """A row per request that ended, with the columns of ``vllm-ext simulate --requests``."""
        return export.requests_frame(self.run)

    @functools.cached_property
    def steps(self) -> pd.DataFrame:
        """A row per step that the device computed: when, of how many requests and tokens, and whom it preempted.

        Warns where the run had more steps than ``record.events``, and has the first ones then.
        """
        events = self.run.events
        if events is not None and events.dropped:
            warnings.warn(f"only the first {events.limit} steps are there; raise record.events", stacklevel=2)
        return export.steps_frame(self.run)


def simulate(
    spec: SimulationSpec | Mapping[str, Any] | None = None,
    *,
    policy: str | Sequence[str] = (),
    set: Mapping[str, Any] | None = None,
) -> Simulated:
    """Serve a workload in virtual time.

        found = vllm_ext.simulate(
            {"engine": {"system": "alise"}, "workload": {"rate_per_s": 12, "num_requests": 500}},
            policy="my_policy.py:MyOrdering",
        )
        found.requests.groupby("preemptions")["ttft_s"].mean()

    Args:
        spec: Description of the run; defaults for the rest. ``vllm-ext simulate --print-spec`` prints one.
        policy: Policies of one's own, ``FILE.py:CLASS``; each takes its axis of the system.
        set: Dotted path -> value, over the description: ``{"workload.rate_per_s": 4}``.

    Raises:
        ValueError: a field of the description or a policy is wrong; the message names it and what is allowed.
        Stalled: the scheduler stopped scheduling with requests left.
    """
    from vllm_ext.simulation.run import simulate as run

    described = spec if isinstance(spec, SimulationSpec) else parse(SimulationSpec, spec or {})
    changes = dict(set or {})
    if policy:
        changes["engine.options.policies"] = [policy] if isinstance(policy, str) else list(policy)
    if not described.record.events:
        changes.setdefault("record.events", STEPS)
    described = checked(with_values(described, changes))
    return Simulated(described, run(described))
