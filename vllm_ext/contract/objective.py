"""Service-level objectives of one request, and how they are found: what the client says, else its class, else all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ext.config.slo import SloClass, SloConfig
    from vllm_ext.hints import RequestHints

_MS = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Service-level objectives of one request, in seconds; None leaves one out."""

    ttft_s: float | None = None
    """Arrival to first token."""
    tbt_s: float | None = None
    """Every gap between neighbouring tokens."""
    e2e_s: float | None = None
    """Arrival to last token (job completion time)."""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tbt_s", "e2e_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r}: must be greater than 0, or left out")


NO_SLO = Slo()


def resolve(hints: RequestHints, num_prompt_tokens: int, config: SloConfig) -> Slo:
    """Return the objectives of a request.

    Each of TTFT, TBT and JCT is taken from the request's own hint, else from the class that its ``tag`` names, else
    from the defaults; what none of them sets is left out.

    Args:
        hints: What the client said.
        num_prompt_tokens: Length of the prompt, which TTFT objectives by bucket depend on.
        config: Defaults and classes, all in milliseconds.
    """
    named = config.classes.get(hints.tag) if hints.tag is not None else None
    levels: tuple[SloClass, ...] = (config,) if named is None else (named, config)
    ttft = hints.ttft_slo_ms
    tbt: float | str | None = hints.tbt_slo_ms
    jct = hints.jct_slo_ms
    for level in levels:
        ttft = level.ttft_of(num_prompt_tokens) if ttft is None else ttft
        tbt = level.tbt_ms if tbt is None else tbt
        jct = level.jct_ms if jct is None else jct
    if ttft is None and tbt is None and jct is None:
        return NO_SLO
    return Slo(ttft_s=_seconds(ttft), tbt_s=_seconds(tbt), e2e_s=_seconds(jct))


def _seconds(milliseconds: float | str | None) -> float | None:
    return None if milliseconds is None else float(milliseconds) / _MS
