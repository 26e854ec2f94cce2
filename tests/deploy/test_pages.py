"""The pages for operators name metrics and flags that exist."""

from __future__ import annotations

import re

import pytest

from tests.deploy.expressions import ROOT, exported
from vllm_ext.cli.options import options

OURS = re.compile(r"--(?:no-)?(?:ext|kv-tier|ttft-slo|tbt-slo|jct-slo)-[a-z-]*[a-z]")
PAGES = ("deploying", "rolling-back", "requests", "troubleshooting", "upgrading-vllm")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_metrics_and_flags_that_exist(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    flags = {flag for one in options() for flag in one.flags.split(", ")}
    assert {flag.replace("--no-", "--") for flag in OURS.findall(text)} <= flags
    assert set(re.findall(r"`[^`]*?(vllm(?:_ext)?:\w+)", text)) <= {*exported(), *histograms()}


def histograms() -> set[str]:
    return {name.removesuffix("_bucket") for name in exported() if name.endswith("_bucket")}


def test_the_page_on_objectives_names_all_of_their_metrics() -> None:
    text = (ROOT / "docs" / "requests.md").read_text(encoding="utf-8")
    assert [name for name in exported() if name.startswith("vllm_ext:slo_") and f"`{name}`" not in text] == []
