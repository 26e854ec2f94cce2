"""Figures: valid files, equal bytes for equal data, every label in the text, lines cut where systems saturate."""

from __future__ import annotations

import contextlib
import itertools
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.report import plots
from vllm_ext.report.plot_style import styles
from vllm_ext.report.plots import Panel, Series

ORCA = Series(label="orca", x=[1.0, 2.0, 3.0], y=[10.0, 20.0, 900.0])
VLLM = Series(label="vllm-2023", x=[1.0, 2.0, 3.0], y=[9.0, 12.0, 20.0])
TEXT = "{http://www.w3.org/2000/svg}text"
PNG = b"\x89PNG\r\n\x1a\n"


def texts(path: Path) -> set[str]:
    return {"".join(node.itertext()).strip() for node in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")}


DRAWINGS: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "latency": (
        lambda path: plots.latency_vs_rate([ORCA, VLLM], path, title="OPT-13B", limit=200, limit_label="objective"),
        {"orca", "vllm-2023", "OPT-13B", "objective", "request rate (requests/s)", "normalised latency (ms/token)"},
    ),
    "latency on a logarithmic axis": (
        lambda path: plots.latency_vs_rate([ORCA], path, ylabel="TTFT (ms)", log_y=True, y_max=100),
        {"orca", "TTFT (ms)"},
    ),
    "distribution": (
        lambda path: plots.cdf([plots.empirical_cdf("orca", [1.0, 2.0])], path, xlabel="TTFT (s)", log_x=True),
        {"orca", "TTFT (s)", "fraction"},
    ),
    "over time": (
        lambda path: plots.over_time(
            [Panel(ylabel="KV (%)", series=[ORCA]), Panel(ylabel="running", series=[ORCA, VLLM])], path, title="Server"
        ),
        {"orca", "vllm-2023", "KV (%)", "running", "time (s)", "Server"},
    ),
    "percentiles": (
        lambda path: plots.stacked(
            [Panel(ylabel="P50 (ms)", series=[ORCA]), Panel(ylabel="P90 (ms)", series=[VLLM])],
            path,
            xlabel="served requests/s",
            log_y=True,
        ),
        {"orca", "vllm-2023", "P50 (ms)", "P90 (ms)", "served requests/s"},
    ),
    "bars": (
        lambda path: plots.compare_with_paper(["Alpaca", "GPT"], [0.034, 0.1], [0.05, math.nan], path, ylabel="error"),
        {"Alpaca", "GPT", "paper", "ours", "error", "0.034", "0.05"},
    ),
}
each_drawing = pytest.mark.parametrize(("draw", "expected"), DRAWINGS.values(), ids=DRAWINGS.keys())


@each_drawing
def test_every_label_is_text_in_the_svg_and_bytes_repeat(
    tmp_path: Path, draw: Callable[[Path], None], expected: set[str]
) -> None:
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    draw(first)
    draw(second)
    assert expected <= texts(first)
    assert first.read_bytes() == second.read_bytes()


def test_png_is_an_image_and_its_bytes_repeat(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        plots.latency_vs_rate([ORCA, VLLM], tmp_path / name)
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(PNG)
    assert data.endswith(b"IEND\xaeB`\x82")
    assert data == (tmp_path / "b.png").read_bytes()
    assert b"Software" not in data


def test_drawing_leaves_the_users_matplotlib_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.latency_vs_rate([ORCA], tmp_path / "a.svg")
    assert dict(matplotlib.rcParams) == before


def test_a_line_ends_at_the_first_point_above_the_axis_and_skips_what_was_not_measured() -> None:
    series = Series(label="x", x=[3, 1, 2, 4, 5], y=[500.0, 10.0, math.nan, 20.0, math.inf])
    assert plots._points(series, None) == ([1, 3, 4], [10.0, 500.0, 20.0])
    assert plots._points(series, 100.0) == ([1, 3], [10.0, 500.0])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.integers(1, 60))
def test_empirical_distribution_is_the_fraction_at_or_below(values: list[float], points: int) -> None:
    line = plots.empirical_cdf("x", [*values, math.nan], points=points)
    assert len(line.x) <= points
    assert line.y[-1] == 1.0
    assert line.x[-1] == max(values)
    assert all(a < b for a, b in itertools.pairwise(line.y))
    if len(set(values)) == len(values):
        assert line.y == pytest.approx([np.mean(np.asarray(values) <= x) for x in line.x])


def test_band_of_a_distribution_spans_those_of_its_parts() -> None:
    line = plots.empirical_cdf("x", [1.0, 2.0, 3.0, 4.0], parts=[[1.0, 2.0], [3.0, 4.0, math.nan], []])
    assert (line.x, line.y) == ([1, 2, 3, 4], [0.25, 0.5, 0.75, 1.0])
    assert (line.low, line.high) == ([0, 0, 0.5, 1.0], [0.5, 1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="band of x: 1 and 2 for 2 of x"):
        Series(label="x", x=[1, 2], y=[1, 2], low=[1], high=[1, 2])


def test_band_is_drawn_and_the_axis_of_a_panel_holds_all_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    finish = plots._finish

    def watched(axes: Any, *args: Any, **options: Any) -> None:
        seen.append(axes)
        finish(axes, *args, **options)

    monkeypatch.setattr(plots, "_finish", watched)
    plots.over_time([Panel(ylabel="running", series=[VLLM, ORCA])], tmp_path / "a.svg")
    assert seen[-1].get_ylim()[1] > 900
    plots.lines(
        [Series(label="x", x=[2, 1], y=[5, 6], low=[4, 5], high=[6, 7])], tmp_path / "a.svg", xlabel="", ylabel=""
    )
    (band,) = seen[-1].collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} >= {(2, 4), (2, 6), (1, 5), (1, 7)}


def test_narrow_figure_has_its_legend_below_and_is_narrow_no_longer_than_asked(tmp_path: Path) -> None:
    sizes = []
    for name in ("wide", "narrow", "wide again"):
        with plots.narrow() if name == "narrow" else contextlib.nullcontext():
            plots.over_time([Panel(ylabel="running", series=[ORCA, VLLM])], tmp_path / f"{name}.svg")
        root = ET.parse(tmp_path / f"{name}.svg").getroot()
        legend = next(node for node in root.iter() if node.get("id") == "legend_1")
        sizes.append((float(root.attrib["width"].removesuffix("pt")), float(next(legend.iter(TEXT)).attrib["y"])))
    wide, narrow, again = sizes
    assert wide == again
    assert narrow[0] < 0.8 * wide[0]
    assert narrow[1] > 3 * wide[1]


@given(st.permutations(["orca", "alise", "upstream-fcfs", "mine", "yours", "theirs", "orca+alise"]))
def test_colours_do_not_depend_on_order_and_differ_within_a_figure(labels: list[str]) -> None:
    found = styles(labels)
    assert found == styles(sorted(labels))
    assert len({style.colour for style in found.values()}) == len(labels)
    assert len({style.marker for style in found.values()}) == len({str(s.dash) for s in found.values()}) == len(labels)


def test_a_system_looks_the_same_beside_any_other_known_one() -> None:
    assert styles(["orca"])["orca"] == styles(["orca", "alise", "vllm-2023"])["orca"]
    assert styles(["mine"])["mine"] == styles(["mine", "upstream-fcfs"])["mine"]


def test_twenty_systems_are_told_apart_by_colour_and_marker() -> None:
    found = styles([f"system-{index}" for index in range(20)])
    assert len(set(found.values())) == 20


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.jpg"])
def test_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"must end in one of \.png, \.svg"):
        plots.latency_vs_rate([ORCA], tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_draw_and_uneven_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one line"):
        plots.latency_vs_rate([], tmp_path / "a.svg")
    with pytest.raises(ValueError, match="y of x: 1 values for 2"):
        Series(label="x", x=[1, 2], y=[1])
    with pytest.raises(ValueError, match="values of paper: 1 for 2 groups"):
        plots.compare_with_paper(["a", "b"], [1.0], [1.0, 2.0], tmp_path / "a.svg", ylabel="y")
    with pytest.raises(ValueError, match="values of x"):
        plots.empirical_cdf("x", [math.nan])
    assert list(tmp_path.iterdir()) == []
