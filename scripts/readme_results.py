#!/usr/bin/env python3
"""Rewrite what README.md and docs/results/ show of the files in benchmarks/results.

    python scripts/readme_results.py            # rewrite the pages
    python scripts/readme_results.py --check    # exit with 1 if a page is out of date

A page says between comments what goes there: in README.md ``<!-- results: begin -->``, in docs/
``<!-- table: NAME -->`` for a table of `result_tables`, and ``<!-- measured: a.json b.json -->`` for the machine, the
commit, the command and the goals of runs (``all`` means every file, without commands and goals). Each block ends
with ``<!-- results: end -->``, and so on.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from headlines import HEADLINES
from result_file import Result, Unshown
from result_tables import TABLES, claims

from vllm_ext.report.provenance import RESULTS
from vllm_ext.report.table import Table

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(
    r"(?P<begin><!-- (?P<kind>results|table|measured): (?!end -->)(?P<names>[^>\n]+) -->\n)"
    r".*?(?P<end><!-- (?P=kind): end -->)",
    re.DOTALL,
)
_ALL = "all"
_MANY = 15
"""Of so many goals all are shown; of more, those that were missed."""


def readme_block(root: Path) -> str:
    """Return the README's table, what to know beside each line, and the commands."""
    shown = [make(root) for make in HEADLINES]
    rows = [
        [str(i), line.measured, line.ours, line.baseline, line.result.machine, line.result.measured_at]
        for i, line in enumerate(shown, 1)
    ]
    notes = [f"{i}. {line.note}\n" for i, line in enumerate(shown, 1)]
    commands = dict.fromkeys(f"    {line.result.command}\n" for line in shown)
    header = ["", "measured", "vllm-ext", "baseline", "machine", "commit"]
    return "".join([Table(header, rows).markdown(), "\n", *notes, "\n", *commands])


def measured_block(root: Path, names: str, page: Path) -> str:
    """Return a table of result files with machine, commit and goals, and the command and the goals of each."""
    files = sorted(path.name for path in (root / RESULTS).glob("*.json")) if names == _ALL else names.split()
    results = [Result(root, name) for name in files]
    up = "../" * len(page.relative_to(root).parent.parts)
    rows = []
    for one in results:
        met = [claim["met"] for claim in one.claims]
        reached = f"{sum(met)} of {len(met)}" if met else "none set"
        rows.append([f"[{one.name}]({up}{RESULTS.as_posix()}/{one.name})", one.machine, one.measured_at, reached])
    shown = Table(["result", "machine", "commit", "goals met"], rows).markdown()
    if names == _ALL:
        return shown
    every = [claim for one in results for claim in one.claims]
    judged = every if len(every) <= _MANY else [claim for claim in every if not claim["met"]]
    return "".join(
        [shown, "\n", *(f"    {one.command}\n" for one in results), *(["\n", claims(judged)] if judged else [])]
    )


def rewritten(root: Path, page: Path) -> str:
    """Return the text of a page with its blocks made anew.

    Raises:
        Unshown: a result lacks what the page shows of it, a table is unknown, or README.md has not one block.
    """
    text = page.read_text()
    found = [match["kind"] for match in _BLOCK.finditer(text)]
    if page == root / "README.md" and found != ["results"]:
        raise Unshown(f"README.md has blocks {found}, not one of results: see scripts/readme_results.py")
    return _BLOCK.sub(lambda at: at["begin"] + _block(root, page, at["kind"], at["names"]) + at["end"], text)


def _block(root: Path, page: Path, kind: str, names: str) -> str:
    if kind == "results":
        return readme_block(root)
    if kind == "measured":
        return measured_block(root, names, page)
    if names not in TABLES:
        raise Unshown(f"{page.relative_to(root)}: there is no table {names!r}, only {', '.join(TABLES)}")
    return TABLES[names](root)


def pages(root: Path) -> list[Path]:
    """Return the pages that show results."""
    shown = (path for path in sorted((root / "docs").rglob("*.md")) if _BLOCK.search(path.read_text(encoding="utf-8")))
    return [root / "README.md", *shown]


def main() -> int:
    """Rewrite the pages, or check them."""
    parser = argparse.ArgumentParser(description="Rewrite what README.md and docs/results/ show of benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is out of date")
    check = parser.parse_args().check
    try:
        made = {page: rewritten(ROOT, page) for page in pages(ROOT)}
    except Unshown as error:
        print(error, file=sys.stderr)
        return 1
    if not check:
        for page, text in made.items():
            page.write_text(text)
        return 0
    stale = [page for page, text in made.items() if text != page.read_text()]
    for page in stale:
        print(f"out of date: {page.relative_to(ROOT)}; run: python scripts/readme_results.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
