"""A figure that was to be reached, and whether it was."""

from __future__ import annotations

import operator
from dataclasses import dataclass

COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
"""How a value may stand to a bound."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What was measured beside what was to be reached: a goal of ours, or the figure that a paper states.

    Raises:
        ValueError: ``op`` is no comparison.
    """

    name: str
    """What is compared: a metric of the result, or e.g. ``opt-13b: rate at 200 ms/token, alise / vllm-2023``."""
    value: float
    """Measured."""
    op: str = ">="
    """One of ``<=``, ``>=``, ``<``, ``>``: value op goal."""
    goal: float
    """Wanted, or the paper's."""
    facts: str = ""
    """What to know beside the two."""
    why: str = ""
    """Why the goal was missed; said only if it was."""
    headline: bool = False
    """Whether a paper is known by this figure."""

    def __post_init__(self) -> None:
        if self.op not in COMPARISONS:
            raise ValueError(f"op={self.op!r} of claim {self.name}: must be one of {', '.join(COMPARISONS)}")

    @property
    def met(self) -> bool:
        """Whether the comparison holds; a value that is not a number meets no goal."""
        return bool(COMPARISONS[self.op](float(self.value), float(self.goal)))

    @property
    def note(self) -> str:
        """What is said beside the figures."""
        return "; ".join(filter(None, (self.facts, "" if self.met else self.why)))

    def as_dict(self) -> dict[str, object]:
        """Return what a result keeps."""
        return {
            "name": self.name, "value": self.value, "op": self.op, "goal": self.goal, "met": self.met,
            "note": self.note, "headline": self.headline,
        }  # fmt: skip
