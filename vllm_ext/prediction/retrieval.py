"""Retrieval of ALISE: the output length of a prompt from the true lengths of the most similar past prompts."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction.estimate import RETRIEVAL, Estimate, bounded

MIN_SIMILARITY = 0.8
"""The threshold s0. The paper gives no value; this one was chosen among 0.4 to 0.9 (see `blend`)."""
_ROUNDING = 1e-9
"""What sums of weights may miss by, relative to their total."""

Floats = npt.NDArray[np.float64]


class SimilarPrompts(Protocol):
    """What a search of the vector store found for one prompt."""

    @property
    def lengths(self) -> npt.NDArray[Any]:
        """True output lengths in tokens, [k]."""
        ...

    @property
    def similarities(self) -> npt.NDArray[Any]:
        """Cosine similarities, [k]; in any order."""
        ...


def estimate(neighbours: SimilarPrompts, max_tokens: int, *, min_similarity: float = MIN_SIMILARITY) -> Estimate | None:
    """Return the similarity-weighted mean of the neighbours' lengths, or None if none is similar enough.

    Neighbours with a similarity of at least ``min_similarity`` count, weighted by their similarities over the sum of
    these. What is not similar at all (0 or below) never counts. The bound is the weighted 90 % quantile.

    Args:
        neighbours: What the store found for this prompt.
        max_tokens: The client's bound on the output, in tokens.
        min_similarity: s0, -1 to 1. Compared in the precision of the similarities, so that an equal one passes.

    Raises:
        ValueError: a length is below 1, a similarity is not finite, the two differ in number, or an option is out of
            its range.

    Source: ALISE, Algorithm 1, lines 6-10. The paper leaves out that the weights are normalised, which a mean needs;
    the quantile is ours.
    """
    lengths, similarities = passing(neighbours, min_similarity)
    if not len(lengths):
        return None
    tokens = float(lengths @ (similarities / similarities.sum()))
    return bounded(
        tokens,
        weighted_quantile(lengths, similarities, 0.9),
        RETRIEVAL,
        max_tokens,
        neighbours=len(lengths),
        similarity=float(similarities.max()),
    )


def passing(neighbours: SimilarPrompts, min_similarity: float) -> tuple[Floats, Floats]:
    """Return lengths (tokens) and similarities, both [n], of the neighbours that reach the threshold and exceed 0.

    Raises:
        ValueError: as of `estimate`.
    """
    if not -1 <= min_similarity <= 1:
        raise ValueError(f"min_similarity={min_similarity!r}: must be -1 to 1")
    lengths, similarities = np.asarray(neighbours.lengths), np.asarray(neighbours.similarities)
    if lengths.ndim != 1 or lengths.shape != similarities.shape:
        raise ValueError(f"neighbours: lengths {lengths.shape} and similarities {similarities.shape} must be [k] alike")
    if not np.isfinite(similarities).all():
        raise ValueError(f"similarities={similarities!r}: must be finite")
    if (lengths < 1).any():
        raise ValueError(f"lengths={lengths!r}: must be at least 1 token")
    # float32 similarities: 0.7 of a store is a little less than the 0.7 of an option.
    threshold = similarities.dtype.type(min_similarity) if similarities.dtype.kind == "f" else min_similarity
    keep = (similarities >= threshold) & (similarities > 0)
    return lengths[keep].astype(np.float64), similarities[keep].astype(np.float64)


def weighted_quantile(lengths: Floats, weights: Floats, q: float) -> float:
    """Return the smallest length at which at least the share ``q`` of the weight is reached.

    Args:
        lengths: [n], n >= 1, in any order.
        weights: [n], none below 0, not all 0.
        q: 0 to 1.
    """
    order = np.argsort(lengths, kind="stable")
    reached = np.cumsum(weights[order])
    at = int(np.searchsorted(reached, (q - _ROUNDING) * reached[-1]))
    return float(lengths[order[min(at, len(order) - 1)]])
