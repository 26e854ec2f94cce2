"""What a server's `/metrics` say at a moment."""

from __future__ import annotations

import http.client
import math
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Snapshot:
    """Samples of a server's metrics at a moment."""

    at_s: float
    samples: Sequence[tuple[str, Mapping[str, str], float]]

    @classmethod
    def parsed(cls, text: str, at_s: float) -> Snapshot:
        """Read the text that Prometheus would."""
        from prometheus_client.parser import text_string_to_metric_families

        families: Iterable[Any] = text_string_to_metric_families(text)
        found = [(one.name, one.labels, float(one.value)) for family in families for one in family.samples]
        return cls(at_s, found)

    def by(self, name: str, label: str = "", **where: str) -> dict[str, float]:
        """Return the sums of a metric by the values of a label; engines and models count together."""
        sums: dict[str, float] = {}
        for sample, labels, value in self.samples:
            if sample == name and all(labels.get(key) == one for key, one in where.items()):
                key = labels.get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def total(self, name: str, **where: str) -> float:
        """Return the sum of a metric; nan where the server does not have it."""
        return sum(self.by(name, **where).values()) if self.by(name, **where) else math.nan


def scraped(url: str) -> Snapshot:
    """Ask a server for its metrics.

    Args:
        url: Of the server, without a path.

    Raises:
        OSError, ValueError: it does not answer, or with something else.
    """
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_TIMEOUT_S) as answer:
            return Snapshot.parsed(answer.read().decode(), time.monotonic())
    except http.client.HTTPException as error:
        raise OSError(f"{url}/metrics: {error}") from error
