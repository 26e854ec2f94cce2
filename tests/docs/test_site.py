"""The documentation as a site: each page is in its menu, and links that leave docs/ lead to the repository."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import docs_site  # noqa: E402

MADE = {"index.md", "options.md", "all-metrics.md", "patches.md", "reproductions.md", "simulator-tables.md"}
"""Pages that `make docs` writes."""


def relinked(text: str, page: str) -> str:
    return docs_site.relinked(text, page, "docs/", "https://forge/vllm-ext")


def test_each_page_is_in_the_menu_once() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} | MADE
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert Counter(re.findall(r"- (\S+\.md)$", menu, re.MULTILINE)) == Counter(pages)


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("docs/plan.md", "[s](simulator.md#costs)", "[s](simulator.md#costs)"),
        ("docs/systems/alise.md", "[s](../plan.md)", "[s](../plan.md)"),
        ("docs/results/gpu.md", "[s](../../README.md#limits)", "[s](../index.md#limits)"),
        ("README.md", "[s](docs/systems/README.md)", "[s](systems/README.md)"),
        ("README.md", "[`s` of [t]](docs/plan.md)", "[`s` of [t]](plan.md)"),
        ("README.md", "[s](LICENSE)", "[s](https://forge/vllm-ext/blob/main/LICENSE)"),
        ("docs/plan.md", "[s](examples/a.py)", "[s](https://forge/vllm-ext/blob/main/docs/examples/a.py)"),
        ("docs/results/gpu.md", "[s](../../scripts/a.py#L1)", "[s](https://forge/vllm-ext/blob/main/scripts/a.py#L1)"),
        ("docs/results/gpu.md", "![s](../../benchmarks/a.png)", "![s](../pictures/a.png)"),
        ("docs/plan.md", "[s](https://a/b) and [t](#here)", "[s](https://a/b) and [t](#here)"),
    ],
)
def test_a_link_holds_on_the_site(page: str, link: str, expected: str) -> None:
    assert relinked(link, page) == expected


def test_pictures_outside_the_folder_come_along() -> None:
    assert docs_site.pictures("![a](../benchmarks/a.png) [b](b.png) ![c](c.png)", "docs/x.md") == [
        "benchmarks/a.png", "docs/c.png",
    ]  # fmt: skip
