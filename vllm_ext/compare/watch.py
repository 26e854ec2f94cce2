"""What a server did while it served: who ran, who waited, how full its KV memory was, how many were preempted."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self

from vllm_ext.report.scraped import Snapshot, scraped

_EVERY_S = 0.5
_MOST = 400
"""Moments that are kept of a run."""


@dataclass
class Timeline:
    """Moments of a run, in seconds from its start; empty where nobody could look."""

    at_s: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    kv_used: list[float] = field(default_factory=list)
    """Share of the KV blocks."""
    preemptions: float | None = None
    """Over the run."""
    cached: float | None = None
    """Share of the tokens of prompts that was found in a KV cache, on the device or outside."""

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> Timeline:
        """Return that of a run, empty if none was kept."""
        return cls(**run.get("timeline", {}))

    def add(self, *moment: float) -> None:
        """Note a moment: seconds, requests that run, requests that wait, share of KV in use."""
        for values, value in zip(self._columns, moment, strict=True):
            values.append(value)

    def count(self, before: Snapshot, after: Snapshot) -> None:
        """Note what a server counted between two moments; what it does not count stays unknown."""

        def grown(name: str) -> float:
            return after.total(f"vllm:{name}_total") - before.total(f"vllm:{name}_total")

        if not math.isnan(preempted := grown("num_preemptions")):
            self.preemptions = preempted
        if (asked := grown("prefix_cache_queries")) > 0:
            outside = grown("external_prefix_cache_hits")
            found = grown("prefix_cache_hits") + (0.0 if math.isnan(outside) else outside)
            self.cached = found / asked

    def kept(self) -> dict[str, Any]:
        """Return it fit for JSON, of a long run only some moments, evenly spread."""
        every = math.ceil(len(self.at_s) / _MOST) or 1
        names = ("at_s", "running", "waiting", "kv_used")
        return asdict(self) | {name: values[::every] for name, values in zip(names, self._columns, strict=True)}

    @property
    def _columns(self) -> Sequence[list[float]]:
        return (self.at_s, self.running, self.waiting, self.kv_used)


class Watch:
    """Asks a server for its metrics, from entering to leaving; one that has none is left alone."""

    def __init__(self, url: str, ask: Callable[[str], Snapshot] = scraped) -> None:
        self._url, self._ask = url, ask
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._start_s = math.nan
        self._first: Snapshot | None = None
        self._last: Snapshot | None = None
        self.timeline = Timeline()

    def __enter__(self) -> Self:
        self._note()
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._note()
        if self._first is not None and self._last is not None:
            self.timeline.count(self._first, self._last)

    def _look(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._note()

    def _note(self) -> None:
        try:
            seen = self._ask(self._url)
        except (OSError, ValueError):  # a path that is closed, or a server that ends, which the client will see
            return
        kv = [*seen.by("vllm:kv_cache_usage_perc", "engine").values()]
        counts = [seen.total(f"vllm:num_requests_{what}") for what in ("running", "waiting")]
        if not kv or any(map(math.isnan, counts)):
            return
        if self._first is None:
            self._first, self._start_s = seen, seen.at_s
        self._last = seen
        self.timeline.add(seen.at_s - self._start_s, *counts, sum(kv) / len(kv))
