"""Links between the project's pages lead somewhere: to a file, and to a heading in it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    names = listed.split("\0")[:-1] or [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
    return [ROOT / name for name in names]


def anchors(page: Path) -> set[str]:
    """Names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub(lambda found: found[0].strip("`"), page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in plain}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []
