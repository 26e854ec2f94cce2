"""Past-Future (arXiv 2507.10150): admission by the predicted peak of KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ext.contract import Batch, Candidate, Demand, GatePolicy, RequestView, Step, Victim
from vllm_ext.contract.checks import require
from vllm_ext.contract.step import Lengths
from vllm_ext.systems.system import System

Floats = npt.NDArray[np.float64]


class Peak:
    """Predicted memory at the moments when requests end, in tokens.

    With the requests sorted by what they still have to generate, most first, the i-th ends when it has generated r_i
    more tokens. By then those after it are gone, and the i that are left hold what they have now and r_i tokens more:

        M_i = sum_{j <= i} t_j + r_i * i        t: tokens held now, r: tokens left to generate
        M*  = max_i M_i

    Source: Past-Future, equations 2-4. Ours: ``rounding``, what a sequence's last block leaves empty on average, counts
    for each request; ``extra`` is what others hold (positive), or what the requests share (negative, and in proportion
    less as they end).
    """

    def __init__(
        self, tokens: npt.ArrayLike, remaining: npt.ArrayLike, *, rounding: float = 0.0, extra: float = 0.0
    ) -> None:
        """Take the batch.

        Args:
            tokens: Tokens held by each request, shape [n].
            remaining: Tokens it will still generate, shape [n], at least 1.
            rounding: Tokens added for each request.
            extra: Tokens held by others, or minus the tokens that sharing saves now.
        """
        held = np.asarray(tokens, dtype=np.float64)
        falling = -np.asarray(remaining, dtype=np.float64)
        order = np.argsort(falling)
        self._falling = falling[order]
        """Remaining tokens, negated: ascending, as searchsorted wants them."""
        self._rounding = rounding
        count = len(held)
        places = np.arange(1, count + 1)
        self._memory: Floats = np.cumsum(held[order] + rounding) - self._falling * places
        self._extra = max(extra, 0.0)
        saved = min(extra, 0.0)
        if saved and count > 1:  # the last one shares with nobody
            self._memory += saved * (places - 1) / (count - 1)

    @property
    def tokens(self) -> float:
        """M*, what others hold included; 0 for an empty batch."""
        return self._extra + float(self._memory.max(initial=0.0))

    def with_one_more(self, tokens: float, remaining: float) -> float:
        """Return M* if a request joined now: O(n), without sorting again."""
        place, own = self._place(tokens, remaining)
        held = tokens + self._rounding
        before = float(self._memory[:place].max(initial=0.0))
        # Those that end earlier than it wait for it with one sequence more: its tokens, grown as long as theirs.
        after = float((self._memory[place:] - self._falling[place:]).max(initial=-np.inf)) + held
        return self._extra + max(before, own, after)

    def add(self, tokens: float, remaining: float) -> None:
        """Let a request join."""
        place, own = self._place(tokens, remaining)
        after = self._memory[place:] - self._falling[place:] + tokens + self._rounding
        self._memory = np.concatenate((self._memory[:place], [own], after))
        self._falling = np.insert(self._falling, place, -remaining)

    def _place(self, tokens: float, remaining: float) -> tuple[int, float]:
        """Return where the request goes in the order, and the memory when it ends."""
        place = int(np.searchsorted(self._falling, -remaining, side="right"))
        # What those before it hold now: their sum at the end of the last of them, less what they grow until then.
        held = float(self._memory[place - 1] + self._falling[place - 1] * place) if place else 0.0
        return place, held + tokens + self._rounding + remaining * (place + 1)


_REFUSED = "peak_memory.refused"
HISTORY, PREDICTED = "history", "predicted"
_FORECASTS = (HISTORY, PREDICTED)


@dataclass(frozen=True, kw_only=True)
class PeakMemory(GatePolicy):
    """Let a request join only if the predicted peak of KV memory stays within the pool.

    Every step, output lengths are drawn from those of the last ``window`` finished requests: for a waiting request from
    P(l), for one that generated g tokens from P(l | l > g). From the lengths follows when each request ends and how
    much memory all others hold by then; the highest such sum is the peak (`Peak`).

    Small batches are drawn several times, and the highest peak counts: their sum of lengths is uncertain. Until
    ``cold_requests`` have finished, a part of the lengths drawn is the client's bound: everything, before the first
    one. A request that has outlived all history is expected to double, at most to its bound.

    Memory is counted in the pool's blocks. Prefix blocks that several requests share count once; as sharers finish, the
    saving is reduced in proportion, which is exact for one common prefix. What a waiting request would share with
    running ones costs it nothing. Those who load KV hold their blocks already and count as running.

    Source: Past-Future (arXiv 2507.10150), section 3, equations 1-4, Algorithm 1 and section 4. Blocks, sharing and
    ``stratify`` are ours; with ``stratify`` the draws of a step are spread evenly over the distribution, so that their
    sum varies less.
    """

    reserve: float = 0.05
    """Share of the pool that the predicted peak must leave free, at least 0 and less than 1."""
    forecast: str = HISTORY
    """Where lengths come from: ``history``, drawn as above, or ``predicted``, each request's own estimate."""
    window: int = 1000
    """Finished requests remembered."""
    cold_requests: int = 10
    """Finished requests from which on the history alone is believed."""
    least_draws: int = 256
    """Draws per step at least: a batch of fewer requests is drawn several times."""
    most_repeats: int = 5
    """How often a batch is drawn at most."""
    stratify: bool = True
    """Whether the draws of a step are spread evenly over the distribution."""
    redraw_steps: int = 4
    """Steps for which it stands that nobody fits, unless who runs or who waits changes; 1: drawn again every step."""

    def __post_init__(self) -> None:
        require(0 <= self.reserve < 1, "admission.reserve", self.reserve, "at least 0 and less than 1")
        require(self.forecast in _FORECASTS, "admission.forecast", self.forecast, f"one of {', '.join(_FORECASTS)}")
        for field in ("window", "least_draws", "most_repeats", "redraw_steps"):
            require(getattr(self, field) >= 1, f"admission.{field}", getattr(self, field), "an integer of at least 1")
        require(self.cold_requests >= 0, "admission.cold_requests", self.cold_requests, "an integer of at least 0")

    @property
    def uses_predictions(self) -> bool:
        """Whether predicted lengths are looked at."""
        return self.forecast == PREDICTED

    @property
    def history(self) -> int:
        """How many finished output lengths it looks at."""
        return self.window

    def gate(self, step: Step) -> _PeakGate:
        """Return the gate of a step."""
        return _PeakGate(self, step)


class _Refusal(NamedTuple):
    """When nobody fitted.

    That stands for a while: the moments at which requests of one draw end, and the memory held then, stay where they
    are while everybody who runs advances by a token a step.
    """

    step: int
    changes: int


class _PeakGate:
    name = "peak_memory"

    def __init__(self, policy: PeakMemory, step: Step) -> None:
        self._policy = policy
        self._step = step
        self._forecast: Forecast | None = None
        self._joined: list[tuple[float, tuple[int, ...]]] = []
        self._left: tuple[Victim, ...] = ()
        self._without: tuple[Victim, ...] = ()
        last: _Refusal | None = step.memo.get(_REFUSED)
        self.closed = (
            last is not None and step.number - last.step < policy.redraw_steps and last.changes == step.changes
        )

    def fits(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> bool:
        if self.closed and not leaving:
            return False
        if self._at(leaving).admits(candidate.request, demand.own_tokens):
            return True
        if not self._joined and not leaving and not self.closed:
            self._step.memo[_REFUSED] = _Refusal(self._step.number, self._step.changes)
        return False

    def take(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> None:
        self._step.memo.pop(_REFUSED, None)
        self.closed = False
        forecast = self._at(leaving)
        drawn = forecast.drawn(candidate.request)
        self._joined.append((demand.own_tokens, drawn))
        forecast.add(demand.own_tokens, drawn)
        self._left = (*self._left, *leaving)

    def _at(self, leaving: Sequence[Victim]) -> Forecast:
        """Return the forecast in which those who joined are there, and those who leave are not."""
        without = (*self._left, *leaving)
        if self._forecast is None or self._without != without:
            self._forecast, self._without = Forecast(self._policy, self._step, without), without
            for tokens, drawn in self._joined:
                self._forecast.add(tokens, drawn)
        return self._forecast


class Forecast:
    """The peaks of one step, one per repeat of the draw; grows as requests are admitted."""

    def __init__(self, policy: PeakMemory, step: Step, without: Sequence[Victim] = ()) -> None:
        self._policy = policy
        self._step = step
        self._history = step.finished_lengths()
        cold = policy.cold_requests
        # The upper end of the distribution is the bound while little is known.
        self._known = min(1.0, len(self._history) / cold) if cold else float(len(self._history) > 0)
        batch, pool = step.batch(without), step.pool
        repeats = 1
        if policy.forecast == HISTORY:
            repeats = min(policy.most_repeats, max(1, -(-policy.least_draws // (len(batch.tokens) + 1))))
        self._drawn: dict[str, tuple[int, ...]] = {}
        block = pool.block_size
        self._capacity = (1 - policy.reserve) * pool.total * block
        used = pool.total - pool.unused - sum(victim.blocks for victim in without)
        held = int((-(-batch.computed // block)).sum())
        # Positive: blocks that others than the running hold. Negative: blocks that running ones share.
        extra = (used - held) * block
        self._peaks = [
            Peak(batch.tokens, self._remaining(batch, without), rounding=(block - 1) / 2, extra=extra)
            for _ in range(repeats)
        ]

    @property
    def tokens(self) -> float:
        """The highest of the peaks, in tokens."""
        return max(peak.tokens for peak in self._peaks)

    def admits(self, request: RequestView, own_tokens: float) -> bool:
        """Say whether every peak fits with a request that adds ``own_tokens`` of KV now."""
        drawn = zip(self._peaks, self.drawn(request), strict=True)
        return all(peak.with_one_more(own_tokens, remaining) <= self._capacity for peak, remaining in drawn)

    def drawn(self, request: RequestView) -> tuple[int, ...]:
        """Return what a waiting request is taken to generate yet, in tokens, for each peak; drawn once."""
        found = self._drawn.get(request.req_id)
        if found is None:
            found = self._drawn[request.req_id] = tuple([self._remaining_of(request) for _ in self._peaks])
        return found

    def add(self, own_tokens: float, drawn: Sequence[int]) -> None:
        """Let a request join that adds ``own_tokens`` of KV now and ``drawn`` later, for each peak."""
        for number, peak in enumerate(self._peaks):
            peak.add(own_tokens, drawn[number % len(drawn)])

    def _remaining(self, batch: Batch, without: Sequence[Victim]) -> Lengths:
        if self._policy.forecast == PREDICTED:
            lengths = self._step.predicted_lengths(without)
        else:
            lengths = self._draw(batch.generated, batch.max_tokens)
        return np.maximum(np.minimum(lengths, batch.max_tokens) - batch.generated, 1)

    def _remaining_of(self, request: RequestView) -> int:
        generated, bound = request.num_output_tokens, request.max_tokens
        if self._policy.forecast == PREDICTED:
            length = request.predicted_output_tokens
        else:
            length = self._draw_one(generated, bound)
        return max(min(length, bound) - generated, 1)

    def _draw_one(self, generated: int, bound: int) -> int:
        """`_draw` for a single request."""
        history, uniform, known = self._history, self._step.rng.random(), self._known
        if uniform >= known:
            return bound
        first = int(history.searchsorted(generated, side="right"))
        left = len(history) - first
        return int(history[first + int(uniform / known * left)]) if left else 2 * generated

    def _draw(self, generated: Lengths, bound: Lengths) -> Lengths:
        """Draw a length above ``generated`` for each request, shape [requests]."""
        count, history, policy = len(generated), self._history, self._policy
        uniform = self._step.rng.random(count)
        if policy.stratify and count > 1:
            uniform = (self._step.rng.permutation(count) + uniform) / count
        known = self._known
        if known == 0:
            return bound
        first = history.searchsorted(generated, side="right")
        left = len(history) - first
        if known < 1:
            certain, uniform = uniform < known, np.minimum(uniform / known, 1 - 1e-12)
        place = first + (uniform * left).astype(np.int64)
        if left.all():
            drawn = history[place]
        else:
            drawn = np.where(left > 0, history[np.minimum(place, len(history) - 1)], 2 * generated)
        return drawn if known == 1 else np.where(certain, drawn, bound)


_PAPER = "Past-Future (arXiv 2507.10150)"

ROWS = (
    System(
        name="past-future",
        gates=(PeakMemory,),
        paper=_PAPER,
        summary="admission by the predicted peak of KV memory, from the lengths of recent requests",
    ),
    System(
        name="past-future-published",
        gates=(PeakMemory,),
        parameters={
            "admission": {
                "reserve": 0.05,
                "forecast": HISTORY,
                "window": 1000,
                "cold_requests": 10,  # how a history begins is not in the paper
                "least_draws": 256,  # small batches are drawn several times; how often is not in the paper
                "most_repeats": 5,
                "stratify": False,
                "redraw_steps": 1,
            }
        },
        paper=_PAPER,
        summary="past-future as published: lengths drawn anew in every step, each by itself",
    ),
)
