"""The page of all metrics says of each what it is, and what the values of its labels mean."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import metrics_page  # noqa: E402

PLAIN = {"model_name", "engine", "tier", "level", "kernel", "format", "source", "direction", "objective", "system",
         "policies", "shadow", "order", "what", "gaps"}  # fmt: skip
"""Labels whose values say what they mean, or are named by another page."""


def test_every_metric_says_what_it_is_and_what_its_values_mean() -> None:
    found = {one.name: one for one in metrics_page.metrics()}
    assert {"vllm_ext:system_info", "vllm_ext:predictor_up", "vllm_ext:slo_requests_total"} <= found.keys()
    assert found["vllm_ext:kv_tier_used_bytes"].labels == ("model_name", "engine", "tier")
    assert all(one.text for one in found.values())
    assert [one.name for one in found.values() if {*one.labels} - PLAIN and not re.search("[:,]", one.text)] == []


def test_the_page_on_metrics_names_those_that_there_are() -> None:
    found = {one.name for one in metrics_page.metrics()}
    named = set(re.findall(r"vllm_ext:\w+[a-z]\b(?!\*)", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    assert {name for name in named if not name.endswith("_")} <= found | {"vllm_ext:shadow"}
