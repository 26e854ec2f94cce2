"""The documentation's tables are printed from the objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ext.simulation.cost.tables import devices_markdown, models_markdown

DOCS = Path(__file__).parents[3] / "docs" / "simulator-cost.md"


@pytest.mark.parametrize("table", [devices_markdown, models_markdown])
def test_the_documentation_holds_the_table_as_it_is(table) -> None:
    assert table() in DOCS.read_text(encoding="utf-8"), "print it with vllm_ext.simulation.cost.tables"
