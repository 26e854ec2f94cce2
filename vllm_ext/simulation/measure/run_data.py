"""What a run leaves behind: a row per request, every gap between tokens, time series and decisions."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_GROWTH = math.log(1.001)
_SMALLEST_S = 1e-6
_BINS = int(math.log(1e6 / _SMALLEST_S) / _GROWTH) + 2

REJECTED = "rejected"
"""The front end refused it: its prompt fills the model's context."""
UNFINISHED = "unfinished"
"""It was being served, or waited, when the run was cut off."""


@dataclass(kw_only=True, eq=False, slots=True)
class RequestRow:
    """What is kept of a request. Times are seconds from the start of the run; NaN where there is none yet."""

    req_id: str = ""
    session_id: str = ""
    tier: str = ""
    finish_reason: str = ""
    """One of vLLM's: ``stop``, ``length``, ``abort``; of `RunData.unserved` `REJECTED` or `UNFINISHED`."""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    true_output_tokens: int = 0
    predicted_tokens: int = 0
    """0 where nobody predicted."""
    preemptions: int = 0
    priority: int = 0
    arrival_s: float = math.nan
    first_scheduled_s: float = math.nan
    first_token_s: float = math.nan
    finish_s: float = math.nan
    max_gap_s: float = math.nan
    waited_s: float = 0.0
    slo_ttft_s: float = math.nan
    slo_tbt_s: float = math.nan
    slo_e2e_s: float = math.nan


COLUMNS = {column.name: str(column.type) for column in fields(RequestRow)}
"""Name -> type of the columns of a table of requests."""
DERIVED = {"scheduling_delay_s": "first_scheduled_s", "ttft_s": "first_token_s", "e2e_s": "finish_s"}
"""Columns that are another one, counted from the arrival."""


class RequestTable:
    """One row per request that ended, in the order of their ends."""

    def __init__(self) -> None:
        storage: dict[str, Callable[[], Any]] = {"str": list, "int": lambda: array("q"), "float": lambda: array("d")}
        self._columns = {name: storage[kind]() for name, kind in COLUMNS.items()}
        self.token_times: list[array[float] | None] = []
        """Per row: the time of every token, or None where the run was not told to keep them."""

    def __len__(self) -> int:
        return len(self.token_times)

    def append(self, row: RequestRow, token_times: array[float] | None = None) -> None:
        """Add a row."""
        for name, column in self._columns.items():
            column.append(getattr(row, name))
        self.token_times.append(token_times)

    def column(self, name: str) -> NDArray[Any]:
        """Return a copy of a column of `COLUMNS` or `DERIVED`, shape [rows]."""
        found = np.array(self._columns[DERIVED.get(name, name)], dtype=COLUMNS[DERIVED.get(name, name)])
        return found - self.column("arrival_s") if name in DERIVED else found

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield rows as dictionaries with the columns in order."""
        for values in zip(*self._columns.values(), strict=True):
            yield dict(zip(self._columns, values, strict=True))


class GapHistogram:
    """Every gap between neighbouring tokens of one request, in bins of 0.1 % width; the extremes are exact."""

    def __init__(self) -> None:
        self._counts = [0] * _BINS
        self._last_gap_s = -1.0
        self._last_index = 0
        self.count = 0
        self.total_s = 0.0
        self.min_s = math.inf
        """Smallest gap in seconds; infinite if there was none."""
        self.max_s = 0.0

    def add(self, gap_s: float, times: int = 1) -> None:
        """Count a gap, in seconds. Requests of one batch mostly share theirs: a repeated value is quick.

        Raises:
            ValueError: the gap is negative or not a number.
        """
        if gap_s != self._last_gap_s:
            self._last_index = _bin(gap_s)
            self._last_gap_s = gap_s
            if gap_s > self.max_s:
                self.max_s = gap_s
            if gap_s < self.min_s:
                self.min_s = gap_s
        self._counts[self._last_index] += times
        self.count += times
        self.total_s += gap_s * times

    def merge(self, other: GapHistogram) -> None:
        """Count the gaps of another histogram as well."""
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.total_s += other.total_s
        self.min_s, self.max_s = min(self.min_s, other.min_s), max(self.max_s, other.max_s)

    @property
    def mean_s(self) -> float:
        """Mean gap in seconds; NaN if there was none."""
        return self.total_s / self.count if self.count else math.nan

    def quantile_s(self, q: float) -> float:
        """Return the q-quantile (0 to 1) in seconds; NaN if there was no gap.

        As numpy's: linear between the two neighbouring gaps. Each of those is taken at the upper end of its bin, so the
        result is never below the true one and at most 0.1 % above it, for gaps of 1 microsecond or more.
        """
        if not self.count:
            return math.nan
        cumulative = np.cumsum(self._counts)
        position = q * (self.count - 1)
        below = math.floor(position)
        low, high = (self._at(cumulative, min(rank, self.count - 1)) for rank in (below, below + 1))
        return low + (high - low) * (position - below)

    def _at(self, cumulative: NDArray[np.int64], rank: int) -> float:
        index = int(np.searchsorted(cumulative, rank, side="right"))
        if rank == 0:
            return self.min_s
        if rank == self.count - 1 or index == _BINS - 1:
            return self.max_s
        return max(self.min_s, min(_SMALLEST_S * math.exp(_GROWTH * index), self.max_s))


def _bin(gap_s: float) -> int:
    if not gap_s >= 0:
        raise ValueError(f"gap_s={gap_s!r}: the time between two tokens must be 0 or more")
    return 0 if gap_s <= _SMALLEST_S else min(_BINS - 1, 1 + int(math.log(gap_s / _SMALLEST_S) / _GROWTH))


SERIES = ("time_s", "running", "waiting", "kv_used_fraction", "tier_used_fraction", "transfer_bytes", "preemptions",
          "prefill_tokens", "decode_tokens", "steps")  # fmt: skip
"""Columns of the time series. The last five count from the start of the run; the others are as of that moment."""


class TimeSeries:
    """Samples of the server's state at even distances; the distance doubles whenever the memory is full."""

    def __init__(self, interval_s: float = 0.5, capacity: int = 8192) -> None:
        if capacity < 2:
            raise ValueError(f"capacity={capacity!r}: must be at least 2")
        self.interval_s = interval_s
        self._capacity = capacity
        self._columns = {name: array("d") for name in SERIES}
        self.next_s = 0.0
        """When the next sample is due."""

    def __len__(self) -> int:
        return len(self._columns["time_s"])

    def add(self, *values: float) -> None:
        """Take a sample, with the values in the order of `SERIES`."""
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        while len(self) >= self._capacity:
            self._thin()
        self.next_s = (math.floor(values[0] / self.interval_s) + 1) * self.interval_s

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a copy of a column, shape [samples]."""
        return np.array(self._columns[name], dtype=np.float64)

    def _thin(self) -> None:
        """Double the distance, and keep the first sample of each stretch of that length: those around a pause stay."""
        self.interval_s *= 2
        stretch = np.floor(self.column("time_s") / self.interval_s)
        kept = np.flatnonzero(np.diff(stretch, prepend=-1.0) > 0)
        self._columns = {name: array("d", self.column(name)[kept].tobytes()) for name in SERIES}


class StepEvent(NamedTuple):
    """One step, for traces."""

    start_s: float
    """When the device began."""
    end_s: float
    num_requests: int
    prefill_tokens: int
    decode_tokens: int
    preempted: tuple[str, ...]


class RequestEvent(NamedTuple):
    """A change of a request's state, for traces."""

    time_s: float
    req_id: str
    state: str
    """``waiting``, ``prefill``, ``decode``, ``preempted`` or a finish reason."""


@dataclass
class Events:
    """Detail for a trace of the run, up to a bound."""

    limit: int
    """Most entries of each list; what comes later is counted only."""
    steps: list[StepEvent] = field(default_factory=list)
    requests: list[RequestEvent] = field(default_factory=list)
    dropped: int = 0

    def keep(self, entries: list[Any], entry: NamedTuple) -> None:
        """Add an entry to one of the lists, or count it."""
        if len(entries) < self.limit:
            entries.append(entry)
        else:
            self.dropped += 1


class Stalled(RuntimeError):
    """The loop took its last allowed step and work is still left."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What one ``schedule()`` decided; equal decisions are indistinguishable to a model runner."""

    scheduled: tuple[tuple[str, int], ...]
    """(request id, tokens) in scheduling order."""
    new: tuple[str, ...]
    resumed: tuple[str, ...]
    preempted: tuple[str, ...]
    num_computed_tokens: tuple[int, ...]
    """Per entry of ``scheduled``: tokens whose KV was there before the step, prefix hits included."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return sum(tokens for _, tokens in self.scheduled)

    @classmethod
    def of(cls, output: SchedulerOutput, scheduled: Mapping[str, int] | None = None) -> Decision:
        """Return what a step of vLLM's scheduler decided; only about those with tokens in ``scheduled``, if given."""
        tokens = output.num_scheduled_tokens if scheduled is None else scheduled
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return cls(
            scheduled=tuple(tokens.items()),
            new=tuple(new.req_id for new in output.scheduled_new_reqs),
            resumed=tuple(r for r in cached.req_ids if r in cached.resumed_req_ids),
            preempted=tuple(sorted(output.preempted_req_ids or ())),
            num_computed_tokens=tuple(computed[r] for r in tokens),
        )


@dataclass(kw_only=True)
class RunData:
    """Everything measured in one run."""

    label: str
    """System and load, for legends."""
    requests: RequestTable
    gaps: GapHistogram
    series: TimeSeries
    events: Events | None = None
    """Present if the run was told to keep them."""
    unserved: RequestTable = field(default_factory=RequestTable)
    """Requests that arrived and never ended, as they were at the end of the run. ``finish_s`` is NaN; ``max_gap_s`` has
    the gap since the last token too."""
    decisions: list[Decision] | None = None
    """What every step decided, if the run was told to keep it."""
    counters: dict[str, float] = field(default_factory=dict)
    """Totals with units in the names: ``steps``, ``preemptions``, ``prefill_tokens``, ``decode_tokens``, ``idle_s``,
    ``device_busy_s``, ``policy_fallbacks``, ``unfinished_requests``, ``num_kv_blocks``, ..."""
    duration_s: float = 0.0
    """Virtual time from the start to the last event."""
    wall_s: float = 0.0
    """Wall-clock time the simulation took. Not deterministic: never part of a result's metrics."""

    def finished(self) -> NDArray[np.bool_]:
        """Return a mask over requests: True where the request ended by itself or at its bound, shape [rows]."""
        return np.isin(self.requests.column("finish_reason"), ("stop", "length"))
