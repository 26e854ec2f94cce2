"""Runtime model: how long a step takes, and from that how long a request will.

ALISE (eqs. 3-5) estimates a request of prompt s and output n as T_pre(s) + T_dec(s, n) with T_pre = s * T0 and
T_dec = n * (alpha * s + beta). Requests share steps, so what can be observed is the time of a step:

    t = base + prefill * prefill tokens + decode * decoding requests + context * sum of contexts
      + pair * sum over prefill chunks of chunk * context

T0 is then ``prefill`` (with ``pair`` for long prompts), alpha is ``context``, and beta is the step of a typical batch.
`docs/runtime-model.md` says how to measure the coefficients and how good the model is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_ext.step_time.online_fit import ORDER_OF_MAGNITUDE, OnlineFit

KINDS = ("decode", "prefill", "mixed")
"""Kinds of steps, in the order of `StepFeatures.kind`: the last have decodes and prefill."""
MOST_TOKENS = 1 << 30
"""Largest chunk that `RuntimeModel.largest_prefill` answers, where tokens cost nothing."""
_PROFILE_KNOWN_WITHIN = 0.2
_TYPICAL = np.array([1.0, 1e2, 1e3, 1e5, 1e6])
"""Size of each feature in a step; tells how much time a coefficient that is 0 may be wrong by."""
_BATCH_WEIGHT = 0.01
_SATURATED = 0.8
_LEAST_PIVOT, _LARGEST_PIVOT = 64, 16384
_SHORTEST_S, _LONGEST_S = 1e-7, 1e5


class Coefficients(NamedTuple):
    """Prices of the terms of a step, in seconds per unit, none below 0."""

    base_s: float
    """Of any step (a)."""
    decode_s: float
    """Per decoding request (c)."""
    prefill_token_s: float
    """Per token of a prefill chunk (b)."""
    context_token_s: float
    """Per KV token that a request of the step attends to (d)."""
    pair_s: float
    """Per token of a chunk and token of its context (e)."""

    @classmethod
    def checked(cls, values: Sequence[float]) -> Coefficients:
        """Build from five numbers.

        Raises:
            ValueError: there are not five, or one is not finite or below 0.
        """
        if len(values) != len(cls._fields) or not all(_is_price(value) for value in values):
            raise ValueError(f"coefficients={values!r}: five finite numbers of at least 0 are needed")
        return cls(*map(float, values))


DEFAULT = Coefficients(base_s=5e-3, decode_s=2e-5, prefill_token_s=5e-5, context_token_s=5e-8, pair_s=0.0)
"""Before anything was observed: of the order of an 8B model on one GPU."""

DEFAULT_TILE_TOKENS = 64
"""Tile along the tokens where nothing is known of the device: GPUs have 64 or 128."""


class Pivot(NamedTuple):
    """The step at which throughput saturates: AccelGen's S_pf and T_pf."""

    tokens: int
    """Tokens of the step."""
    step_s: float
    """Its duration, in seconds."""


class StepFeatures(NamedTuple):
    """What a step consisted of."""

    num_decodes: int
    """Requests of which one token is computed. The last single token of a prompt counts here: it costs the same."""
    num_prefill_tokens: int
    """Tokens of the other requests: prefill chunks, and tokens verified together with their drafts."""
    num_context_tokens: int
    """Sum over all the step's requests of the KV tokens held at its end, those that it computes included."""
    prefill_context: float = 0.0
    """Sum over prefill chunks of chunk length times context of the chunk's middle, in tokens squared."""

    @property
    def kind(self) -> int:
        """Index in `KINDS`."""
        if not self.num_prefill_tokens:
            return 0
        return 2 if self.num_decodes else 1


class RuntimeModel:
    """Step-time model that starts from coefficients and goes on learning from the steps it is shown.

    Deterministic and free of any clock: durations are handed in. All times are in seconds, finite and never negative,
    and more work never takes less time.

    Source: ALISE, eqs. 3-5, "linear regression coefficients that can be determined by profiling"; batch terms ours.
    """

    def __init__(
        self,
        coefficients: Sequence[float] | None = None,
        pivot: Pivot | None = None,
        *,
        tile_tokens: int = DEFAULT_TILE_TOKENS,
    ) -> None:
        """Start from ``coefficients`` (5 values in the order of `Coefficients`) or from defaults.

        Args:
            coefficients: As measured by a profile.
            pivot: The step at which throughput saturates, as measured; None: made of the coefficients.
            tile_tokens: Tile of the device's matrix products along the tokens, where that is known.

        Raises:
            ValueError: not five finite values of at least 0.
        """
        self.given = None if coefficients is None else Coefficients.checked(coefficients)
        """What it started from; None if that was the defaults. A model given the same learns the same."""
        start = DEFAULT if self.given is None else self.given
        known_within = ORDER_OF_MAGNITUDE if self.given is None else _PROFILE_KNOWN_WITHIN
        self.given_pivot = pivot
        """The saturated step as it was measured; None if it is made of the coefficients."""
        self.tile_tokens = tile_tokens
        """Tile of the device's matrix products along the tokens: one token more than whole tiles costs another."""
        self._online = OnlineFit(np.array(start), _TYPICAL, len(KINDS), known_within)
        self.num_observations = 0
        self.mean_abs_relative_error = 0.0
        """Moving average of |predicted - observed| / observed over steps."""
        self._batch_decodes = 1.0
        self._batch_context = 0.0
        self._batches = 0
        self._use(start)

    @property
    def coefficients(self) -> Coefficients:
        """The coefficients as they are now."""
        return self._coefficients

    @property
    def restarts(self) -> int:
        """How often steps stayed so far off that the model began to learn anew."""
        return self._online.restarts

    @property
    def pivot(self) -> Pivot:
        """The step at which throughput saturates, as it was measured, else by the coefficients.

        A step of n prompt tokens takes base + prefill * n, so its throughput is the share n / (n + base / prefill) of
        what endless steps would have. The share taken is 0.8: measured steps saturate sooner than a straight line, for
        their compute hides behind the weights' traffic at first.

        Source: AccelGen, section 4.2, where it is measured; the estimate is ours.
        """
        if self.given_pivot is not None:
            return self.given_pivot
        price = self._coefficients
        token_s = max(price.prefill_token_s, 1e-9)  # a fit to decodes alone, or to noise, may price a prompt at 0
        whole = int(min(max(_SATURATED / (1 - _SATURATED) * price.base_s / token_s, _LEAST_PIVOT), _LARGEST_PIVOT))
        return Pivot(whole, max(self.step_time_s(StepFeatures(0, whole, whole, whole * whole / 2)), whole * token_s))

    # --- prediction -------------------------------------------------------------------------------------------------

    def step_time_s(self, features: StepFeatures) -> float:
        """Return the predicted duration of a step in seconds."""
        price = self._coefficients
        decodes, prefill_tokens, context, pairs = features
        return (
            price.base_s
            + price.decode_s * decodes
            + price.prefill_token_s * prefill_tokens
            + price.context_token_s * context
            + price.pair_s * pairs
        )

    def prefill_s(self, num_tokens: int, num_computed_tokens: int = 0) -> float:
        """Return what computing ``num_tokens`` more tokens of a sequence adds to the steps that do it (eq. 4).

        In seconds. The steps themselves are not in it, as they would run for the other requests anyway: a step's base
        counts in `decode_s`.
        """
        context = num_computed_tokens + num_tokens / 2
        return num_tokens * (self._prefill_token_s + self._pair_s * context)

    def decode_s(self, num_tokens: int, context_tokens: int) -> float:
        """Return the time to generate ``num_tokens`` after ``context_tokens`` in a typical batch, in s (eq. 5).

        One token takes one step of the batches seen lately, without the prefills that may join them.
        """
        return num_tokens * (self._beta_s + self._alpha_s * (context_tokens + num_tokens / 2))

    def largest_prefill(
        self, budget_s: float, decodes: int, context: int, computed: int, at_most: int = MOST_TOKENS
    ) -> int:
        """Return the most tokens of one prompt that can join a step so that it takes no longer than ``budget_s``.

        The step is ``StepFeatures(decodes, n, context + computed + n, n * (computed + n / 2))``, whose time is
        quadratic in n: its root is taken. Grows with the budget, falls with the rest.

        Args:
            budget_s: Seconds the step may take, such as a bound on the time between tokens.
            decodes: Decoding requests of the step.
            context: Sum of their contexts, in tokens.
            computed: Tokens of the prompt that are computed already.
            at_most: Largest answer; what is left of the prompt, say.

        Returns:
            Tokens, from 0 (not even one fits) to ``at_most``.

        Source: Sarathi-Serve, section 4.3 (budget from a TBT target), as a formula instead of a table; AccelGen, eq. 6.
        """

        def seconds(tokens: int) -> float:
            return self.step_time_s(
                StepFeatures(decodes, tokens, context + computed + tokens, tokens * (computed + tokens / 2))
            )

        if at_most < 1 or not seconds(1) <= budget_s:  # not >, which is false for NaN
            return 0
        if seconds(at_most) <= budget_s:
            return at_most
        price = self._coefficients
        left_s = budget_s - self.step_time_s(StepFeatures(decodes, 0, context + computed))
        slope = price.prefill_token_s + price.context_token_s + price.pair_s * computed
        root = math.sqrt(slope * slope + 2 * price.pair_s * left_s)
        guess = int(min(max(2 * left_s / max(slope + root, 1e-300), 1.0), at_most - 1.0))
        low, high = max(guess - 1, 1), min(guess + 2, at_most)
        if not seconds(low) <= budget_s < seconds(high):  # rounding may leave the root off by more
            low, high = 1, at_most
        return low + bisect_right(range(low + 1, high), budget_s, key=seconds)

    # --- learning ---------------------------------------------------------------------------------------------------

    def observe(self, features: StepFeatures, duration_s: float) -> None:
        """Learn from a step that took ``duration_s``; what can't be a step's duration is ignored."""
        if not _SHORTEST_S < duration_s < _LONGEST_S:  # false for NaN as well
            return
        predicted = self.step_time_s(features)
        if not self._online.observe(features.kind, (1.0, *features), predicted, duration_s):
            return
        error = abs(predicted - duration_s) / duration_s
        self.num_observations += 1
        self.mean_abs_relative_error += max(_BATCH_WEIGHT, 1 / self.num_observations) * (
            error - self.mean_abs_relative_error
        )
        if features.num_decodes:
            self._batches += 1
            weight = max(_BATCH_WEIGHT, 1 / self._batches)
            self._batch_decodes += weight * (features.num_decodes - self._batch_decodes)
            self._batch_context += weight * (features.num_context_tokens - self._batch_context)
        self._use(Coefficients(*self._online.theta.tolist()))

    def _use(self, price: Coefficients) -> None:
        self._coefficients = price
        others = self._batch_context * max(0.0, 1 - 1 / max(self._batch_decodes, 1.0))
        beta_s = price.base_s + price.decode_s * self._batch_decodes + price.context_token_s * others
        self._beta_s = max(beta_s, 1e-6)
        self._alpha_s, self._pair_s = price.context_token_s, price.pair_s  # asked for at every ranking
        self._prefill_token_s = max(price.prefill_token_s, 1e-9)


def _is_price(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
