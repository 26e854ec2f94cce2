"""A figure that was to be reached, and whether it was; a figure of a paper, and how ours stands to it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

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

    def __str__(self) -> str:
        verdict = "met" if self.met else f"MISSED: {self.note}"
        return f"goal: {self.name} = {self.value:.4g} {self.op} {self.goal:g}: {verdict}"

    def as_dict(self) -> dict[str, object]:
        """Return what a result keeps."""
        return {
            "name": self.name, "value": self.value, "op": self.op, "goal": self.goal, "met": self.met,
            "note": self.note, "headline": self.headline,
        }  # fmt: skip


Verdict = Literal["matched", "above", "below", "not comparable", "tendency"]
WITHIN = 0.1
"""Share by which a figure may differ from the paper's and still match it."""
REASON_WORDS = 10


class Reason(NamedTuple):
    """Why a figure is not the paper's."""

    text: str
    """At most `REASON_WORDS` words."""
    shown_by: str
    """Row or experiment that shows it: ``alise-fig6: KV in 8 bits``."""


@dataclass(frozen=True, kw_only=True)
class PaperClaim(Claim):
    """A paper's figure and ours, judged in both directions: ``op`` says which way is better, ``goal`` what it states.

    Raises:
        ValueError: a reason is longer than `REASON_WORDS` words.
    """

    kind: Literal["value", "up to", "tendency"] = "value"
    """``up to``: the paper states its largest cell, and ``value`` is the largest of ours. ``tendency``: it states no
    number, and ``goal`` is ours."""
    most: float | None = None
    """Greatest of the range that the paper states, of which ``goal`` is the least; None: it states one figure."""
    interval: tuple[float, float] | None = None
    """Of ``value`` over the seeds; None: there was one."""
    reasons: Mapping[Verdict, Reason] = field(default_factory=dict)
    """Why, for each verdict that is possible. One for ``not comparable`` makes it that."""
    ours: float | None = None
    """The same figure for our own system."""
    tuned: float | None = None
    """The figure for our own system over vLLM's best setting of today."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for reason in self.reasons.values():
            if len(reason.text.split()) > REASON_WORDS:
                raise ValueError(f"reason {reason.text!r} of {self.name}: must have at most {REASON_WORDS} words")

    @property
    def verdict(self) -> Verdict:
        """How ours stands to the paper's: above is better."""
        if "not comparable" in self.reasons:
            return "not comparable"
        if self.kind == "tendency":
            return "tendency"
        low, high = self.interval or (self.value, self.value)
        least, most = self.goal * (1 - WITHIN), (self.goal if self.most is None else self.most) * (1 + WITHIN)
        if low <= most and high >= least:
            return "matched"
        return "above" if (self.value > most) == (self.op in (">=", ">")) else "below"

    @property
    def met(self) -> bool:
        """Whether ours is not worse than the paper's."""
        return super().met if self.kind == "tendency" else self.verdict != "below"

    @property
    def reason(self) -> Reason | None:
        """Why it is not matched, as far as that is known."""
        return self.reasons.get(self.verdict)

    @property
    def note(self) -> str:
        """What is said beside the figures."""
        why = "" if self.met else self.reason.text if self.reason else self.why or "the reason is not known"
        return "; ".join(filter(None, (self.facts, why)))

    @property
    def paper(self) -> str:
        """What the paper states, in words."""
        stated = f"{self.goal:.4g}" if self.most is None else f"{self.goal:.4g} to {self.most:.4g}"
        return {"value": stated, "up to": f"up to {stated}", "tendency": "no number"}[self.kind]

    @property
    def measured(self) -> str:
        """What came out here, with its interval."""
        if self.interval is None:
            return f"{self.value:.4g}"
        return "{:.4g} ({:.4g} to {:.4g})".format(self.value, *self.interval)

    def __str__(self) -> str:
        why = f" ({self.reason.text}; {self.reason.shown_by})" if self.reason else ""
        return f"paper: {self.name}: {self.paper}; here {self.measured}: {self.verdict}{why}"

    def as_dict(self) -> dict[str, object]:
        """Return what a result keeps."""
        more = {one.name: getattr(self, one.name) for one in fields(PaperClaim) if one.name not in _OF_ALL}
        more["reasons"] = {verdict: list(reason) for verdict, reason in self.reasons.items()}
        return {**super().as_dict(), **{k: v for k, v in more.items() if v not in (None, {})}, "verdict": self.verdict}

    @classmethod
    def kept(cls, of: Mapping[str, Any]) -> PaperClaim:
        """Return a claim from what a result keeps, also from one of before there were verdicts."""
        own = {one.name: of[one.name] for one in fields(cls) if one.name in of}
        if "interval" in own:
            own["interval"] = tuple(own["interval"])
        own["reasons"] = {verdict: Reason(*reason) for verdict, reason in own.get("reasons", {}).items()}
        return cls(**own, facts=of.get("note", ""))


_OF_ALL = frozenset(one.name for one in fields(Claim))
