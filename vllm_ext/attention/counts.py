"""How many steps and tokens each kernel served, in each worker, and the way of these numbers to the metrics.

Workers count; whoever asks for the state of the engine core gets what the last request for it brought, and sends the
next one without waiting for it: a worker answers between two steps.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from typing import Any

from vllm_ext.attention.plan import Kernel

INT8 = "int8"


class AttentionCounts:
    """Running totals of one process."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        self.tokens: Counter[tuple[str, str]] = Counter()

    def add(self, kernel: Kernel, tokens: int, dtype: str, int8_tokens: int = 0) -> None:
        """Count a step.

        Args:
            kernel: Which served it.
            tokens: Of KV that its rows attended to, as a whole.
            dtype: Of the KV.
            int8_tokens: Those of them that were in INT8.
        """
        self.steps[kernel.value] += 1
        self.tokens[kernel.value, dtype] += tokens - int8_tokens
        if int8_tokens:
            self.tokens[kernel.value, INT8] += int8_tokens

    def state(self) -> dict[str, Any]:
        """Return the totals, fit for JSON."""
        tokens = {f"{kernel} {dtype}": number for (kernel, dtype), number in self.tokens.items()}
        return {"steps": dict(self.steps), "tokens": tokens}


COUNTS = AttentionCounts()
"""Of this process, which has one worker."""


def worker_state(worker: Any) -> dict[str, Any]:  # noqa: ARG001 - as vLLM calls a worker's functions
    """Return the counts of the process that a worker lives in."""
    return COUNTS.state()


class CountsReader:
    """Reads the counts of an engine core's first worker: all of them serve the same steps, each with its heads."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._asked: Future[list[dict[str, Any]]] | None = None
        self._last = AttentionCounts().state()

    def read(self) -> dict[str, Any]:
        """Return the latest counts that have come, and ask for the next."""
        self._take()
        if self._asked is None:
            self._asked = self._executor.collective_rpc(worker_state, non_block=True)
            self._take()  # it is there at once where the worker is in this process
        return self._last

    def _take(self) -> None:
        if self._asked is not None and self._asked.done():
            self._last, self._asked = self._asked.result()[0], None
