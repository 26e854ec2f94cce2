"""The notebook of examples/ was executed as it stands, and still runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "policy_to_plot.ipynb"


@pytest.fixture
def cells() -> list[dict[str, Any]]:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def test_every_cell_was_executed_in_order_and_the_last_shows_a_plot(cells: list[dict[str, Any]]) -> None:
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells)
    assert not [out for cell in cells for out in cell["outputs"] if out["output_type"] == "error"]
    assert any("image/png" in out.get("data", {}) for out in cells[-1]["outputs"])


def test_cells_run_and_the_policy_does_what_the_text_says(
    cells: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On 20 s of arrivals instead of 60."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    mpl.use("Agg")
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(cells, start=1):
        source = "".join(cell["source"]).replace('"duration_s": 60.0', '"duration_s": 20.0')
        exec(compile(source, f"cell {number}", "exec"), names)  # noqa: S102 - of this repository
    latency = {name: one.metrics["normalised_latency_mean_ms_per_token"] for name, one in names["found"].items()}
    assert latency["shortest"] < latency["vLLM"]
    assert all(one.metrics["contended_steps"] for one in names["found"].values())
    assert "shortest" in capsys.readouterr().out
    assert len(names["figure"].axes) == 2
