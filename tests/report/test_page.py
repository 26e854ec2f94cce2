"""The page of results: what it shows and escapes, that it loads nothing, and how it behaves in a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.extent import HANG_S
from vllm_ext.report import common_flags, page, plots
from vllm_ext.report.page import Chart, Page, Section, Verdict
from vllm_ext.report.plots import Panel, Series
from vllm_ext.report.table import Table

EVIL = "<script>alert(1)</script> & 'x' \"y\""
LINE = Series(label=EVIL, x=[1.0, 2.0], y=[10.0, 20.0], low=[9.0, 18.0], high=[11.0, 22.0])
OTHER = Series(label="upstream-fcfs", x=[1.0, 2.0], y=[12.0, 24.0])
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def draw_lines(path: Path) -> None:
    plots.lines([LINE, OTHER], path, xlabel="load", ylabel="latency (ms)", limit=15)


def draw_panels(path: Path) -> None:
    plots.over_time([Panel(ylabel="running", series=[LINE, OTHER])], path)


def chart(draw: Callable[[Path], None] = draw_lines) -> Chart:
    return Chart(caption=f"Latency of {EVIL}", alt=f"Lines of {EVIL}", draw=draw)


PAGE = Page(
    title=f"Model {EVIL}",
    verdicts=[Verdict(text=f"alise: 1.20 times better than {EVIL}", kind="better"), Verdict(text="no", kind="missed")],
    sections=[
        Section(title="Latency", text=f"said of {EVIL}\n  vllm serve {EVIL}", charts=[chart(), chart(draw_panels)]),
        Section(
            title="Table",
            table=Table(("name", "ms"), [("b10", 1000.0), ("b9", None), ("a", 20.5), (EVIL, 3), ("c", float("nan"))]),
            open=False,
        ),
    ],
    left_out=[f"dropped: {EVIL}"],
    command=f"vllm-ext plan --model '{EVIL}'",
    facts={"model": EVIL, "configuration": json.dumps({"a": EVIL}, indent=1)},
)


class Seen(HTMLParser):
    """The elements of a page, and the text of some."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.elements[-1][0] if self.elements else "", data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "page.html"
    page.write(PAGE, path)
    return path.read_text(encoding="utf-8")


def test_what_names_hold_is_text_everywhere(html: str) -> None:
    assert "<script>alert" not in html
    seen = Seen(html)
    assert [attrs.get("type") for attrs in seen.of("script")] == ["application/json", None]
    shown = [text for _, text in seen.texts if "alert(1)" in text]
    assert len(shown) >= 10, "title, verdict, caption, legend, cell, command ..."


def test_nothing_is_loaded(html: str) -> None:
    loaded = [value for _, attrs in Seen(html).elements for name, value in attrs.items()
              if name in ("src", "href", "xlink:href", "srcset", "data", "action") and value]  # fmt: skip
    assert [value for value in loaded if not value.startswith(("#", "data:"))] == []
    assert "://" not in html
    assert "@import" not in html
    assert html.count("url(") == html.count("url(#")


def test_charts_are_text_in_the_colours_of_the_page_and_have_an_alternative(html: str) -> None:
    seen = Seen(html)
    images = [attrs for attrs in seen.of("div") if attrs.get("role") == "img"]
    assert [attrs["aria-label"] for attrs in images] == [f"Lines of {EVIL}"] * 2
    assert len(seen.of("svg")) == len(seen.of("figure")) == len(seen.of("figcaption")) == 2
    assert ("text", "latency (ms)") in seen.texts
    drawn = "".join(part.partition("</svg>")[0] for part in html.split("<svg")[1:])
    assert not {paint for paint in ("#000000", "#ffffff", "#dddddd", "#595959") if paint in drawn}
    assert "currentColor" in drawn
    ids = [attrs["id"] for _, attrs in seen.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    used = {str(attrs["xlink:href"]).removeprefix("#") for attrs in seen.of("use")}
    assert used
    assert used <= set(ids)


def test_facts_are_shown_and_read_back_as_json(html: str) -> None:
    text = html.partition('<script type="application/json" id="facts">')[2].partition("</script>")[0]
    assert json.loads(text) == PAGE.facts
    assert len(Seen(html).of("dt")) == len(PAGE.facts)


def test_chart_that_can_not_be_drawn_says_why(tmp_path: Path) -> None:
    def nothing(path: Path) -> None:
        plots.lines([], path, xlabel="x", ylabel="y")

    page.write(replace(PAGE, sections=[Section(title="A", charts=[chart(nothing)])]), tmp_path / "page.html")
    assert "Not drawn: series: at least one line with one point is needed" in (tmp_path / "page.html").read_text()


def test_unknown_kind_of_verdict_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kind='fine': must be one of better, same, worse, unknown, met, missed"):
        Verdict(text="a", kind="fine")


@pytest.mark.parametrize(
    ("low", "high", "kind"),
    [(1.1, 1.3, "better"), (0.7, 0.9, "worse"), (0.9, 1.2, "unknown"), (1.0, 1.0, "same"), (1.001, 1.002, "same"),
     (0.0, float("inf"), "unknown")],
)  # fmt: skip
def test_verdict_follows_the_interval(low: float, high: float, kind: str) -> None:
    assert Verdict.of_ratio("a", low, high).kind == kind


def test_page_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("before", encoding="utf-8")

    def fails(*paths: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("vllm_ext.files.os.replace", fails)
    with pytest.raises(OSError, match="no space left"):
        page.write(replace(PAGE, sections=[]), path)  # no chart, whose own file would fail before
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text(encoding="utf-8") == "before"


def test_equal_pages_are_equal_bytes(html: str, tmp_path: Path) -> None:
    page.write(PAGE, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == html


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_flag_names_the_extra_that_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = common_flags.importlib.util.find_spec
    monkeypatch.setattr(common_flags.importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(
        common_flags.argparse.ArgumentTypeError, match=rf"needs {missing}: pip install 'vllm-ext\[lab\]'"
    ):
        common_flags.html_file("page.html")


def in_chromium(html: str, folder: Path, *options: str) -> tuple[str, list[str]]:
    """Open a page; return the document after its scripts, and what the console got."""
    file = folder / "page.html"
    file.write_text(html, encoding="utf-8")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile",
        "--enable-logging=stderr", "--virtual-time-budget=5000", *options, "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)  # type: ignore[arg-type]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def with_script(html: str, script: str) -> str:
    return html.replace("</body>", f"<script>{script}</script></body>")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize(
    ("column", "clicks", "order", "state"),
    [
        (1, 1, ["3", "20.5", "1000", "-", "nan"], "ascending"),
        (1, 2, ["1000", "20.5", "3", "nan", "-"], "descending"),
        (0, 1, [EVIL, "a", "b9", "b10", "c"], "ascending"),
    ],
)
def test_browser_sorts_by_a_click_without_an_error(
    html: str, tmp_path: Path, column: int, clicks: int, order: list[str], state: str
) -> None:
    click = f"document.querySelectorAll('th button')[{column}].click();"
    dom, errors = in_chromium(with_script(html, click * clicks), tmp_path)
    assert errors == []
    table = dom.partition("<tbody>")[2].partition("</tbody>")[0]
    rows = [[text for tag, text in Seen(row).texts if tag == "td"] for row in table.split("<tr>")[1:]]
    assert [row[column] for row in rows] == order
    states = ["none", "none"]
    states[column] = state
    assert [attrs["aria-sort"] for attrs in Seen(dom).of("th")] == states


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_errors_of_a_page_reach_the_check(html: str, tmp_path: Path) -> None:
    assert in_chromium(with_script(html, "nobody.knows()"), tmp_path)[1] != []


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_page_is_no_wider_than_a_phone(html: str, tmp_path: Path) -> None:
    """In a frame: a window of Chromium has a least width."""
    framed = "<iframe srcdoc='{}' style='width: 390px; height: 900px'></iframe><script>onload = () => {{ {} }}</script>"
    measure = (
        "const page = document.querySelector('iframe').contentDocument.documentElement;"
        "document.title = page.scrollWidth - page.clientWidth"
    )
    source = html.replace("&", "&amp;").replace("'", "&#39;")
    dom, _ = in_chromium(f"<title></title>{framed.format(source, measure)}", tmp_path)
    assert "<title>0</title>" in dom
