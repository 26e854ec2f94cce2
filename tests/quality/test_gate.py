"""The verdict on 8-bit KV, and what it says of chance."""

from __future__ import annotations

import pytest

from vllm_ext.quality.gate import perplexity_claim, verdict

SURE = "more --sequences"


@pytest.mark.parametrize(
    ("change", "low", "high", "passes", "sure"),
    [
        (0.02, 0.01, 0.03, True, True), (-0.02, -0.03, -0.01, True, True), (0.09, 0.05, 0.13, True, False),
        (0.1, 0.09, 0.11, False, False), (0.2, 0.11, 0.3, False, True), (-0.2, -0.3, -0.11, False, True),
        (0.0, -0.2, 0.2, True, False),
    ],
)  # fmt: skip
def test_limit_holds_in_both_directions(change: float, low: float, high: float, passes: bool, sure: bool) -> None:
    found = {
        "perplexity_change_percent": change, "perplexity_change_low_percent": low,
        "perplexity_change_high_percent": high,
    }  # fmt: skip
    assert perplexity_claim(found, "facts").met is passes
    text = verdict(found)
    assert text.startswith("passes: " if passes else "does not pass: ")
    assert (SURE in text) is not sure


def test_verdict_names_change_interval_and_limit() -> None:
    found = {
        "perplexity_change_percent": 0.021, "perplexity_change_low_percent": 0.01,
        "perplexity_change_high_percent": 0.03,
    }  # fmt: skip
    assert verdict(found) == "passes: perplexity changes by 0.021 % (0.01..0.03), limit 0.1 %"
