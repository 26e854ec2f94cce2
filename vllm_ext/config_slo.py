"""Options of service-level objectives: defaults for requests that bring none, classes by tag, and load shedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_ext.config_checks import ConfigError, boolean, number
from vllm_ext.hints import MAX_TAG_CHARS

BUCKET_TOKENS = 512
"""Width of the prompt buckets of ``ttft_bucket_ms``. Source: AccelGen, section 3.1."""
MAX_CLASSES = 64
"""Classes become values of a metric's label, which must stay few."""


@dataclass(frozen=True, kw_only=True)
class SloClass:
    """Objectives of a class of requests, in milliseconds; None leaves one out."""

    ttft_ms: float | None = None
    """Arrival to first token, whatever the prompt's length."""

    ttft_bucket_ms: tuple[float, ...] = ()
    """Arrival to first token of prompts of up to 512 tokens, up to 1024, ...; longer prompts get the last one in
    proportion to their buckets. Excludes ``ttft_ms``."""

    tbt_ms: float | None = None
    """Every gap between neighbouring tokens."""

    jct_ms: float | None = None
    """Arrival to last token."""

    def __post_init__(self) -> None:
        self._check("slo")

    def _check(self, where: str) -> None:
        for name in ("ttft_ms", "tbt_ms", "jct_ms"):
            value = getattr(self, name)
            if value is not None:
                _milliseconds(f"{where}.{name}", value)
        if not isinstance(self.ttft_bucket_ms, tuple):
            raise ConfigError(f"{where}.ttft_bucket_ms", self.ttft_bucket_ms, "must be a list of milliseconds")
        for value in self.ttft_bucket_ms:
            _milliseconds(f"{where}.ttft_bucket_ms", value)
        if self.ttft_bucket_ms and self.ttft_ms is not None:
            raise ConfigError(f"{where}.ttft_bucket_ms", self.ttft_bucket_ms, "must not be given beside ttft_ms")

    def ttft_of(self, num_prompt_tokens: int) -> float | None:
        """Return the TTFT objective of a prompt of so many tokens, in milliseconds; None if there is none."""
        buckets = self.ttft_bucket_ms
        if not buckets:
            return self.ttft_ms
        bucket = -(-num_prompt_tokens // BUCKET_TOKENS)
        return buckets[bucket - 1] if bucket <= len(buckets) else buckets[-1] * bucket / len(buckets)


@dataclass(frozen=True, kw_only=True)
class SloConfig(SloClass):
    """Objectives of requests that bring none, and what is done where one can't be met."""

    classes: Mapping[str, SloClass] = field(default_factory=dict)
    """Objectives by the client's ``tag``; what a class leaves out is taken from the defaults beside it."""

    shed: bool = False
    """Answer 503 with Retry-After, instead of queueing, where the TTFT objective of a request can't be met by the
    forecast."""

    shed_margin: float = 1.0
    """A request is refused where the forecast exceeds its objective this many times."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.classes, Mapping):
            raise ConfigError("slo.classes", self.classes, "must be an object of classes by name")
        if len(self.classes) > MAX_CLASSES:
            raise ConfigError("slo.classes", f"{len(self.classes)} classes", f"must be at most {MAX_CLASSES}")
        for name, value in self.classes.items():
            if not isinstance(name, str) or not 1 <= len(name) <= MAX_TAG_CHARS:
                raise ConfigError("slo.classes", name, f"must have names of 1 to {MAX_TAG_CHARS} characters")
            if not isinstance(value, SloClass):
                raise ConfigError(f"slo.classes.{name}", value, "must be an object of objectives")
            value._check(f"slo.classes.{name}")
        boolean("slo.shed", self.shed)
        number("slo.shed_margin", self.shed_margin)
        if not self.shed_margin > 0:
            raise ConfigError("slo.shed_margin", self.shed_margin, "must be greater than 0")


def _milliseconds(name: str, value: Any) -> None:
    number(name, value)
    if not value > 0:
        raise ConfigError(name, value, "must be a number of milliseconds greater than 0")
