"""The peak of KV memory that a batch will need, kept while requests are added."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
