"""Prometheus metrics of the token memory, kept by every API server: those of several add up."""

from __future__ import annotations

import functools

from prometheus_client import Counter, Gauge

_LABELS = ("model_name",)


class _Metrics:
    """The metric objects of this process."""

    def __init__(self) -> None:
        self.lookups = Counter(
            "vllm_ext:token_memory_lookups",
            "Prompts sent as text: hit (a beginning is known), miss, refused (only the tokenizer can encode them).",
            (*_LABELS, "outcome"),
        )
        self.tokens = Counter(
            "vllm_ext:token_memory_tokens", "Tokens of hits and misses, by source.", (*_LABELS, "source")
        )
        self.bytes = Gauge("vllm_ext:token_memory_bytes", "Memory of token ids.", _LABELS, multiprocess_mode="livesum")
        self.checks = Counter("vllm_ext:token_memory_checks", "Prompts decoded and compared.", _LABELS)
        self.mismatches = Counter(
            "vllm_ext:token_memory_mismatches", "Of these, to another text; the first switches it off.", _LABELS
        )


@functools.cache
def _metrics() -> _Metrics:
    return _Metrics()


class TokenMemoryMetrics:
    """The metrics under one model's name; all begin at 0."""

    def __init__(self, model_name: str) -> None:
        made, labels = _metrics(), {"model_name": model_name}
        self._lookups = {known: made.lookups.labels(**labels, outcome=known) for known in ("hit", "miss", "refused")}
        self._tokens = {known: made.tokens.labels(**labels, source=known) for known in ("memory", "tokenizer")}
        self._bytes, self.checks = made.bytes.labels(**labels), made.checks.labels(**labels)
        self.mismatches = made.mismatches.labels(**labels)

    def looked_up(self, spliced: int, tokenised: int) -> None:
        """Count a prompt with so many tokens from the memory, and from the tokenizer."""
        self._lookups["hit" if spliced else "miss"].inc()
        self._tokens["memory"].inc(spliced)
        self._tokens["tokenizer"].inc(tokenised)

    def refused(self) -> None:
        """Count a prompt that only the tokenizer can encode."""
        self._lookups["refused"].inc()

    def holds(self, num_bytes: int) -> None:
        """Note the memory in use."""
        self._bytes.set(num_bytes)
