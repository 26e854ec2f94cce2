"""Papers' figures that are kept: what is not as in the paper has a reason, and says which row shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.experiments.evidence import kept_results
from vllm_ext.experiments.report import of_paper
from vllm_ext.report.claim import REASON_WORDS

ROOT = Path(__file__).resolve().parents[2]
KEPT = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in kept_results(ROOT)}
JUDGED = {name: result for name, result in KEPT.items() if any("verdict" in claim for claim in result["claims"])}
"""Others are older than verdicts."""


@pytest.mark.parametrize("result", JUDGED.values(), ids=JUDGED)
def test_what_differs_from_the_paper_has_a_reason_that_a_row_shows(result: dict[str, Any]) -> None:
    claims = of_paper(result["claims"])
    assert any(claim.headline for claim in claims)
    for claim in claims:
        if claim.verdict in ("above", "below", "not comparable"):
            assert claim.reason is not None, f"{claim.name}: {claim.verdict}, and nothing says why"
            assert 0 < len(claim.reason.text.split()) <= REASON_WORDS
            assert claim.reason.shown_by


WITH_TABLES = {name: result for name, result in JUDGED.items() if "tables" in result["config"]}
"""Others were measured before results kept their tables."""


@pytest.mark.parametrize("result", WITH_TABLES.values(), ids=WITH_TABLES)
def test_the_row_or_column_that_a_reason_names_is_in_the_result(result: dict[str, Any]) -> None:
    cells = [cell for table in result["config"]["tables"].values() for row in table for cell in row]
    names = "\n".join([*cells, *result["config"]["tables"], *result["metrics"], *result["baselines"]])
    for claim in of_paper(result["claims"]):
        if claim.reason is not None:
            named = re.findall("`([^`]+)`", claim.reason.shown_by)
            assert named or claim.reason.shown_by.partition(":")[0] in (*KEPT, "docs/simulator-inputs.md"), claim.reason
            assert not [one for one in named if one not in names], claim.reason


def test_most_figures_are_judged() -> None:
    assert len(JUDGED) >= 16
