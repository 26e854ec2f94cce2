"""Options of service-level objectives: defaults for requests that bring none, classes by tag, and load shedding."""

from __future__ import annotations

import re
import sys
from typing import Annotated, ClassVar, Self

from annotated_types import MaxLen
from pydantic import Field, PlainValidator, StringConstraints, model_validator

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.model import Flag, Options, comma_list, number_or_text
from vllm_ext.hints import MAX_TAG_CHARS, HintError, RequestHints

BUCKET_TOKENS = 512
"""Width of the prompt buckets of ``ttft_bucket_ms``. Source: AccelGen, section 3.1."""
MAX_CLASSES = 64
"""Classes become values of a metric's label, which must stay few."""

Milliseconds = Annotated[float, Field(gt=0)]
_Tag = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TAG_CHARS)]


def _numbers(text: str) -> list[float]:
    """Split ``1,2.5`` at its commas."""
    return [float(item) for item in comma_list(text)]


def _gap(value: object) -> float | str | None:
    """Check milliseconds, or a multiple of a decode step such as ``5x``."""
    multiple = re.fullmatch(r"(\d+\.?\d*|\.\d+)x", value) if isinstance(value, str) else None
    number = float(multiple[1]) if multiple else value
    fits = isinstance(number, int | float) and not isinstance(number, bool) and 0 < number <= sys.float_info.max
    if not (fits or value is None):
        raise ValueError("must be a number of milliseconds greater than 0, or a multiple of a decode step such as 5x")
    return float(value) if isinstance(value, int) else value  # type: ignore[return-value]


class SloClass(Options):
    """Objectives of a class of requests, in milliseconds; None leaves one out."""

    at: ClassVar[str] = "slo"

    ttft_ms: Annotated[Milliseconds | None, Flag("--ttft-slo-ms", metavar="MS")] = None
    """Objective for the time to the first token, for requests that bring none, whatever the prompt's length."""

    ttft_bucket_ms: Annotated[
        tuple[Milliseconds, ...],
        Field(strict=False),
        Flag("--ttft-slo-bucket-ms", type=_numbers, metavar="A,B"),
    ] = ()
    """Objectives for the time to the first token by prompt length: up to 512 tokens, up to 1,024, and so on. Beyond the
    last bucket the last objective grows in proportion. Can't be combined with ``ttft_ms``."""

    tbt_ms: Annotated[
        float | str | None, PlainValidator(_gap), Flag("--tbt-slo-ms", type=number_or_text, metavar="MS|Nx")
    ] = None
    """Objective for every gap between tokens, for requests that bring none; the token budget of sarathi follows it. A
    multiple such as ``5x`` is of a step with 32 decodes of 4,096 tokens each, by the runtime model's ``profile``."""

    jct_ms: Annotated[Milliseconds | None, Flag("--jct-slo-ms", metavar="MS")] = None
    """Objective for the time to the last token, for requests that bring none."""

    @model_validator(mode="after")
    def _one_kind_of_ttft(self) -> Self:
        if self.ttft_bucket_ms and self.ttft_ms is not None:
            raise ConfigError("ttft_bucket_ms", self.ttft_bucket_ms, "must not be given beside ttft_ms")
        return self

    def ttft_of(self, num_prompt_tokens: int) -> float | None:
        """Return the TTFT objective of a prompt of so many tokens, in milliseconds; None if there is none."""
        buckets = self.ttft_bucket_ms
        if not buckets:
            return self.ttft_ms
        bucket = -(-num_prompt_tokens // BUCKET_TOKENS)
        return buckets[bucket - 1] if bucket <= len(buckets) else buckets[-1] * bucket / len(buckets)


class SloConfig(SloClass):
    """Objectives of requests that bring none, and what is done where one can't be met."""

    classes: Annotated[dict[_Tag, SloClass], MaxLen(MAX_CLASSES)] = Field(default_factory=dict)
    """Objectives for the requests of a class, by the ``tag`` that the client sends; what a class leaves out is taken
    from the defaults."""

    least_ttft_ms: float = Field(default=0.0, ge=0)
    """Smallest TTFT objective that a client may ask for, in milliseconds; a request that asks for less is refused."""

    least_tbt_ms: float = Field(default=0.0, ge=0)
    """The same for gaps between tokens. Small ones make steps small for everybody."""

    least_jct_ms: float = Field(default=0.0, ge=0)
    """The same for the time to the last token."""

    shed: Annotated[bool, Flag("--ext-shed")] = False
    """Answer a request with 503 and Retry-After if the forecast says that its TTFT objective can't be met. Otherwise it
    is queued."""

    shed_margin: float = Field(default=1.0, gt=0)
    """Factor by which the forecast must exceed the objective for a request to be refused."""

    def check(self, hints: RequestHints) -> None:
        """Check what a client asks for against what this server allows.

        Raises:
            HintError: An objective is below the least one.
        """
        for name in ("ttft", "tbt", "jct"):
            asked, least = getattr(hints, f"{name}_slo_ms"), getattr(self, f"least_{name}_ms")
            if asked is not None and asked < least:
                raise HintError(f"{name}_slo_ms", asked, f"at least {least:g}, this server's slo.least_{name}_ms")
