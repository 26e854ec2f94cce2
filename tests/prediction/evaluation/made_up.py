"""Made-up requests whose length follows from what they ask for."""

from __future__ import annotations

import numpy as np

from vllm_ext.prediction.evaluation.rows import Examples, Prompts

DIM = 8


def requests(count: int, *, seed: int = 0, kinds: int = 4) -> Examples:
    """Prompts of some kinds: kind k has embeddings around the k-th axis and lengths around 10 * 4^k."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(kinds, size=count)
    vectors = np.eye(DIM)[kind] + 0.15 * rng.standard_normal((count, DIM))
    unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    lengths = np.maximum(1, 10.0 * 4.0**kind * np.exp(0.3 * rng.standard_normal(count))).astype(np.int64)
    words = ("yes", "list", "story", "book")
    texts = tuple(f"{words[k % 4]} about {number} of seed {seed}" for number, k in enumerate(kind))
    return Examples(prompts=Prompts(texts=texts, tokens=kind + 3, vectors=unit), lengths=lengths)
