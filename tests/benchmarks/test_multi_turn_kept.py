"""Cells of the benchmark of conversations, as they are kept on disk."""

from __future__ import annotations

from importlib import import_module as script
from pathlib import Path

import pytest


def test_a_cell_that_was_kept_is_found_by_what_was_served_by_the_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("multi_turn")
    spec, cell = {"engine_args": {"seed": 0}}, {"metrics": {"p90": 1.5}, "settings": {"dtype": "float16"}}
    first = module.Kept(tmp_path / "cells")
    assert first.find(spec) is None
    first.keep(spec, cell)
    again = module.Kept(tmp_path / "cells")
    assert again.find(spec) == cell
    assert again.find({"engine_args": {"seed": 1}}) is None
    assert (first.taken, again.taken) == (0, 1)
    monkeypatch.setattr(module.results, "versions", lambda: {"commit": "another"})
    assert module.Kept(tmp_path / "cells").find(spec) is None


@pytest.mark.parametrize("damage", ['{"metrics": {"p90"', '{"metrics": {}}', "[]"])
def test_a_damaged_cell_is_reported_and_measured_again(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = script("multi_turn").Kept(tmp_path)
    kept.keep({}, {"metrics": {}, "settings": {}})
    (file,) = tmp_path.iterdir()
    file.write_text(damage)
    assert kept.find({}) is None
    assert "it is measured again" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [f"{file.name}.damaged-1"]
