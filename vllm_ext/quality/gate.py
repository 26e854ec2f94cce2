"""The limit within which 8-bit KV must leave a model's perplexity: the project's own, and a user's."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_ext.report.claim import Claim

PERPLEXITY_LIMIT_PERCENT = 0.1
"""Of the change, in either direction."""


def perplexity_claim(changes: Mapping[str, float], facts: str) -> Claim:
    """Return the change of perplexity beside its limit.

    Args:
        changes: Of 8-bit KV, as `outputs.changes` returns them.
        facts: What to know beside.
    """
    value = abs(changes["perplexity_change_percent"])
    return Claim(
        name="perplexity_change_abs_percent", value=value, op="<", goal=PERPLEXITY_LIMIT_PERCENT, facts=facts
    )  # fmt: skip


def verdict(changes: Mapping[str, float]) -> str:
    """Return whether 8-bit KV passes, in a line; where chance could have it otherwise, the line says so."""
    change, low, high = (changes[f"perplexity_change_{part}percent"] for part in ("", "low_", "high_"))
    passes = perplexity_claim(changes, "").met
    text = f"perplexity changes by {change:.2g} % ({low:.2g}..{high:.2g}), limit {PERPLEXITY_LIMIT_PERCENT:g} %"
    within = max(abs(low), abs(high)) < PERPLEXITY_LIMIT_PERCENT
    beyond = low >= PERPLEXITY_LIMIT_PERCENT or high <= -PERPLEXITY_LIMIT_PERCENT
    unsure = "" if within or beyond else "; the interval holds the limit: more --sequences would tell for certain"
    return f"{'passes' if passes else 'does not pass'}: {text}{unsure}"
