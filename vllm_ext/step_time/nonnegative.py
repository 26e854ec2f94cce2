"""Least squares without negative coefficients, exact, for a handful of unknowns."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

_Vector = npt.NDArray[np.float64]
_RIDGE = 1e-12


def minimum(gram: _Vector, moment: _Vector) -> _Vector:
    """Return the ``theta >= 0`` that minimises ``theta' gram theta / 2 - moment' theta``.

    Every choice of coefficients that are not 0 is solved, all at once, and the best that has no negative one is taken:
    the minimum is the free one over its own support, so it is among them. Five unknowns have 32 choices.

    Args:
        gram: Symmetric, positive semi-definite, [n, n] with n <= 8. With features X of weighted rows: X' X.
        moment: [n]; with targets y: X' y.

    Returns:
        [n], finite, none below 0. All 0 where the input is not finite.

    Source: the optimality conditions of non-negative least squares (Lawson and Hanson 1974, chapter 23).
    """
    if not (np.isfinite(gram).all() and np.isfinite(moment).all()):
        return np.zeros(len(moment))
    chosen, diagonal = _choices(len(moment))
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    unit = gram / np.outer(scale, scale) + _RIDGE * np.eye(len(moment))  # a feature never seen is no singular matrix
    target = moment / scale
    masked = unit * chosen[:, :, None] * chosen[:, None, :] + diagonal
    found = np.linalg.solve(masked, (target * chosen)[:, :, None])[:, :, 0]
    value = np.einsum("ni,ij,nj->n", found, unit, found) / 2 - found @ target
    value[(found < 0).any(axis=1) | ~np.isfinite(value)] = np.inf
    theta: _Vector = found[int(np.argmin(value))] / scale + 0.0  # all 0 is always allowed; + 0.0 makes -0.0 one
    return theta if np.isfinite(theta).all() else np.zeros(len(moment))


class Repeated:
    """`minimum` for sums that change little from one time to the next: what was above 0 is tried first, at a third."""

    def __init__(self, size: int) -> None:
        self._support(np.ones(size))

    def minimum(self, gram: _Vector, moment: _Vector) -> _Vector:
        """Return what `minimum` returns, to rounding."""
        try:
            if self._left_out is None:
                theta: _Vector = np.asarray(np.linalg.solve(gram, moment))
                optimal = theta.min() >= 0  # false for NaN as well
            else:
                theta = np.asarray(np.linalg.solve(gram * self._pairs + self._diagonal, moment * self._kept))
                optimal = theta.min() >= 0 and not ((moment - gram @ theta) * self._left_out > 0).any()
        except np.linalg.LinAlgError:
            optimal = False
        if optimal:
            return theta
        theta = minimum(gram, moment)
        self._support((theta > 0).astype(np.float64))
        return theta

    def _support(self, kept: _Vector) -> None:
        self._kept, self._left_out = kept, None if kept.all() else 1 - kept
        self._pairs, self._diagonal = np.outer(kept, kept), np.diag(1 - kept)


@functools.cache
def _choices(size: int) -> tuple[_Vector, _Vector]:
    """Return every subset as rows of 0 and 1, [2**n, n], and 1 on the diagonal where a row leaves a coefficient out."""
    rows = (np.arange(2**size)[:, None] >> np.arange(size)) & 1
    chosen = rows.astype(np.float64)
    return chosen, np.stack([np.diag(1 - row) for row in chosen])
