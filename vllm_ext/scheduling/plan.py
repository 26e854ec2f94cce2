"""What policies decide: ranks of requests, and the plan of one step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple


class Rank(NamedTuple):
    """Place of a request in the order: the lowest ``key`` goes first; ties end in arrival, then id.

    A rank holds until something about the request changes or the clock reaches ``until``, so that nothing needs to be
    recomputed for requests that merely wait.
    """

    key: tuple[float, ...]
    until: float = math.inf
    """Clock time from which the rank must be asked for again (aging), in seconds."""
    level: int = 0
    """Queue the request counts into, for metrics."""


AGED = -1
"""Level of requests that waited so long that only older ones go before them."""

_NUMBERS = (float, int)


def check_rank(rank: Rank) -> None:
    """Raise TypeError or ValueError unless a policy's rank holds numbers only: anything else breaks the queue later."""
    if rank.until != rank.until:
        raise ValueError(f"{rank}: until must not be NaN")
    for part in rank.key:
        if not isinstance(part, _NUMBERS):
            raise TypeError(f"{rank}: the key must consist of numbers")
        if part != part:
            raise ValueError(f"{rank}: the key must not hold NaN")


def _check_whole(name: str, value: object, unit: str) -> None:
    """Raise TypeError unless a cap is a whole number or None: vLLM would carry a fraction on to its model runner."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{name}={value!r}: must be a whole number of {unit}, or None")


def _check_ids(name: str, value: Any, kind: type[tuple[Any, ...] | frozenset[Any]]) -> None:
    """Raise TypeError unless a policy named requests by their ids: the step would fail while it applies the plan."""
    if not isinstance(value, kind) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{name}={value!r}: must be a {kind.__name__} of request ids")


@dataclass(frozen=True, kw_only=True)
class AdmissionPlan:
    """Who leaves and who may join in this step."""

    preempt: tuple[str, ...] = ()
    """Running requests to preempt, by id."""
    max_running: int | None = None
    """Cap on running requests while admitting; None leaves vLLM's. ``num_running + k`` admits the first k that vLLM
    finds room for, in the order of the queue."""
    hold: frozenset[str] = frozenset()
    """Waiting requests that must not be admitted in this step."""

    def __post_init__(self) -> None:
        _check_whole("max_running", self.max_running, "requests")
        _check_ids("preempt", self.preempt, tuple)
        _check_ids("hold", self.hold, frozenset)


@dataclass(frozen=True, kw_only=True)
class BudgetPlan:
    """How many tokens the step may take. None leaves vLLM's setting."""

    token_budget: int | None = None
    """Tokens of the whole step; 0 makes an empty step."""
    decode_only: bool = False
    """No prefill tokens in this step, as long as something decodes."""
    skip: tuple[str, ...] = ()
    """Running requests that keep their KV but get no token in this step, by id."""

    def __post_init__(self) -> None:
        _check_whole("token_budget", self.token_budget, "tokens")
        _check_ids("skip", self.skip, tuple)


_UNRESTRICTED = BudgetPlan()


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The whole decision for one step; made completely before anything is changed (invariant 2)."""

    admission: AdmissionPlan = AdmissionPlan()
    budget: BudgetPlan = BudgetPlan()

    def __post_init__(self) -> None:
        for name, kind in (("admission", AdmissionPlan), ("budget", BudgetPlan)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name}={getattr(self, name)!r}: a policy must return {kind.__name__}")

    @property
    def restricts(self) -> bool:
        """Whether the plan keeps anything from being scheduled that vLLM might schedule."""
        return self.admission.max_running is not None or bool(self.admission.hold) or self.budget != _UNRESTRICTED


NO_PLAN = StepPlan()
