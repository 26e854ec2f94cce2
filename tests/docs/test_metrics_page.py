"""The page about metrics says of each what its values mean."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import metrics_page  # noqa: E402


def test_every_metric_is_named_in_the_docs() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    endings = tuple(re.findall(r"`(_\w+)`", text))
    found = {one.name: one for one in metrics_page.metrics()}
    assert {"vllm_ext:system_info", "vllm_ext:predictor_up", "vllm_ext:slo_requests_total"} <= found.keys()
    assert found["vllm_ext:kv_tier_used_bytes"].labels == ("model_name", "engine", "tier")
    unnamed = [name for name in found if name not in text and not name.endswith(endings)]
    assert unnamed == []
    assert all(one.text for one in found.values())
