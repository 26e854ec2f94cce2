"""What a run must keep to: a bound on one of its metrics, as in ``tbt_p99_ms<=100``."""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_SYNTAX = re.compile(r"\s*([A-Za-z_][^<>=\s]*)\s*(<=|>=|<|>)\s*([^<>=\s]+)\s*")


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A bound on a metric: ``metric op limit``, as `parse` reads it."""

    metric: str
    """Key in the metrics; its unit is part of it."""
    op: str
    """One of ``<=``, ``>=``, ``<``, ``>``."""
    limit: float
    """In the metric's unit; finite."""

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Read a constraint such as ``tbt_p99_ms<=100`` or ``scheduling_delay_p50_s < 2``.

        Raises:
            ValueError: the text is none.
        """
        match = _SYNTAX.fullmatch(text)
        with contextlib.suppress(ValueError):
            if match is not None and math.isfinite(limit := float(match[3])):
                return cls(metric=match[1], op=match[2], limit=limit)
        raise ValueError(
            f"constraint={text!r}: must be a metric, one of {', '.join(_COMPARE)}, and a finite number, "
            "as in 'tbt_p99_ms<=100'"
        )

    def meets(self, metrics: Mapping[str, float]) -> bool:
        """Whether the metrics of a run keep to the bound; those of a run in which nothing finished never do.

        Raises:
            ValueError: requests finished, but the metrics don't have this one.
        """
        if self.metric in metrics:
            return bool(_COMPARE[self.op](metrics[self.metric], self.limit))
        if not metrics.get("requests"):
            return False
        near = get_close_matches(self.metric, metrics, n=3) or sorted(metrics)
        raise ValueError(
            f"metric={self.metric!r} of a constraint: the run did not measure it; it has {', '.join(near)}"
        )

    def __str__(self) -> str:
        short = f"{self.limit:g}"
        return f"{self.metric}{self.op}{short if float(short) == self.limit else repr(self.limit)}"
