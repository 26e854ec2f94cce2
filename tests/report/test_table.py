"""A table as text and as Markdown."""

from __future__ import annotations

import pytest

from vllm_ext.report.table import Table

TABLE = Table(["system", "ms"], [["fcfs", 12.3456], ["alise", None]], title="measured")


def test_text_aligns_numbers_right_and_marks_what_was_not_measured() -> None:
    assert str(TABLE).splitlines() == [
        "",
        "measured",
        "system     ms",
        "------  -----",
        "fcfs    12.35",
        "alise       -",
    ]


def test_a_column_with_one_text_goes_to_the_left() -> None:
    assert str(Table(["n"], [[1], ["many"]])).splitlines()[2:] == ["1", "many"]


def test_markdown_has_the_same_cells() -> None:
    assert TABLE.markdown() == "| system | ms |\n|---|---|\n| fcfs | 12.35 |\n| alise | - |\n"


def test_markdown_escapes_what_ends_a_cell() -> None:
    assert Table(["a|b"], [["x|y"]]).markdown() == "| a\\|b |\n|---|\n| x\\|y |\n"


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1 cells in .*, 2 in the header"):
        Table(["a", "b"], [[1, 2], [3]])


def test_a_table_without_rows_is_its_header() -> None:
    assert str(Table(["a", "bc"], [])) == "a  bc\n-  --"
    assert Table(["a", ""], []).markdown() == "| a | |\n|---|---|\n"


def test_empty_cells_beside_each_other_look_as_one_alone() -> None:
    assert Table(["", "", ""], []).markdown() == "| | | |\n|---|---|---|\n"
