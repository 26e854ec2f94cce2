"""The page about metrics says of each what its values mean."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import metrics_page  # noqa: E402


def test_every_metric_is_named_in_the_docs() -> None:
    named = set().union(*map(metrics_in, (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines()))
    found = {one.name: one for one in metrics_page.metrics()}
    assert {"vllm_ext:system_info", "vllm_ext:predictor_up", "vllm_ext:slo_requests_total"} <= found.keys()
    assert found["vllm_ext:kv_tier_used_bytes"].labels == ("model_name", "engine", "tier")
    assert sorted(found.keys() - named) == []
    assert all(one.text for one in found.values())


def metrics_in(line: str) -> set[str]:
    """Names in a line; an ending alone, such as ``_b_bytes``, stands for what may be that of a name before it."""
    whole = re.findall(r"vllm_ext:\w+", line)
    starts = {name[: at.start()] for name in whole for at in re.finditer("_", name)}
    return {*whole, *(start + ending for start in starts for ending in re.findall(r"`(_\w+)`", line))}


def test_an_ending_stands_for_names_of_its_line() -> None:
    names = metrics_in("| `vllm_ext:kv_a_bytes`, `_b_bytes` |")
    assert {"vllm_ext:kv_a_bytes", "vllm_ext:kv_b_bytes"} <= names
    assert not {"vllm_ext:other_b_bytes", "vllm_ext:kv_a"} & names
