"""The benchmark oracle: true output lengths, for upper bounds in offline benchmarks only.

The only module that may read the hidden length. The scheduler asks it when a system is marked ``oracle``, which
``vllm serve`` refuses and the offline engine accepts with ``allow_oracle`` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN_LENGTH_KEY = "bench_output_len"
"""Key of ``extra_args`` under which benchmarks hide the true output length, in tokens."""


def true_output_tokens(extra_args: Mapping[str, Any] | None) -> int | None:
    """Return the hidden output length in tokens, or None if the request carries none."""
    value = (extra_args or {}).get(HIDDEN_LENGTH_KEY)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
