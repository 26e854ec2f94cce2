"""How good recent predictions were: judged when their requests finish."""

from __future__ import annotations

from collections import deque

import numpy as np

_WINDOW = 500
_RANKED = 200


class Quality:
    """The last 500 predictions whose requests finished by themselves."""

    def __init__(self) -> None:
        self._judged: deque[tuple[int, int, int]] = deque(maxlen=_WINDOW)

    def __len__(self) -> int:
        return len(self._judged)

    def add(self, predicted: int, p90: int, true: int) -> None:
        """Note a prediction (P50 and P90) and what came of it, in tokens."""
        self._judged.append((predicted, p90, true))

    def coverage(self) -> float:
        """Share that ended within their P90; 0 before there is any."""
        return float(np.mean([true <= p90 for _, p90, true in self._judged])) if self._judged else 0.0

    def relative_error(self) -> float:
        """Median of |predicted - true| / true; 0 before there is any."""
        return float(np.median([abs(p - true) / true for p, _, true in self._judged])) if self._judged else 0.0

    def tau(self) -> float:
        """Kendall's tau-b between predicted and true lengths of the last 200; 0 where either does not vary."""
        recent = np.array(list(self._judged)[-_RANKED:], dtype=np.int64).reshape(-1, 3)
        by_prediction = np.sign(recent[:, None, 0] - recent[None, :, 0])
        by_truth = np.sign(recent[:, None, 2] - recent[None, :, 2])
        ties = float(np.abs(by_prediction).sum()) * float(np.abs(by_truth).sum())
        return float((by_prediction * by_truth).sum()) / ties**0.5 if ties > 0 else 0.0
