"""The cells that the benchmark of conversations keeps on disk."""

from __future__ import annotations

from importlib import import_module as script
from pathlib import Path

import pytest


def test_a_cell_that_was_kept_is_found_by_what_was_served(tmp_path: Path) -> None:
    kept = script("multi_turn_kept").Kept
    spec, cell = {"engine_args": {"seed": 0}}, {"metrics": {"p90": 1.5}, "settings": {"dtype": "float16"}}
    first = kept(tmp_path / "cells")
    assert first.find(spec) is None
    first.keep(spec, cell)
    again = kept(tmp_path / "cells")
    assert again.find(spec) == cell
    assert again.find({"engine_args": {"seed": 1}}) is None
    assert (first.taken, again.taken) == (0, 1)


@pytest.mark.parametrize("damage", ['{"metrics": {"p90"', '{"metrics": {}}', "[]"])
def test_a_damaged_cell_is_reported_and_measured_again(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = script("multi_turn_kept").Kept(tmp_path)
    kept.keep({}, {"metrics": {}, "settings": {}})
    (file,) = tmp_path.iterdir()
    file.write_text(damage)
    assert kept.find({}) is None
    assert "it is measured again" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [f"{file.name}.damaged-1"]


def test_cells_of_another_commit_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = script("multi_turn_kept")
    kept.Kept(tmp_path).keep({}, {"metrics": {}, "settings": {}})
    monkeypatch.setattr(kept.results, "versions", lambda: {"commit": "another"})
    assert kept.Kept(tmp_path).find({}) is None
