#!/usr/bin/env python3
"""Rewrite what README.md and docs/results/ show of the files in benchmarks/results.

    python scripts/readme_results.py            # rewrite the pages
    python scripts/readme_results.py --check    # exit with 1 if a page is out of date; ages of commits don't count

README.md has its block between ``<!-- results: begin -->`` and ``<!-- results: end -->``. A page of docs/results/ has
``<!-- measured: a.json b.json -->`` and ``<!-- measured: end -->`` around what it says of the runs it shows; the
word ``all`` instead of names means every file.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from headlines import HEADLINES, NoHeadline, Result, objectives

from vllm_ext.observability.provenance import RESULTS

ROOT = Path(__file__).resolve().parent.parent
_README = re.compile(r"(?<=<!-- results: begin -->\n).*?(?=<!-- results: end -->)", re.DOTALL)
_MEASURED = re.compile(
    r"(?<=<!-- measured: )(?P<names>(?!end )[^>\n]+)( -->\n).*?(?=<!-- measured: end -->)", re.DOTALL
)
_AGE = re.compile(r", \d{4}-\d\d-\d\d, \d+ commits? ago")


def readme_block(root: Path) -> str:
    """Return the README's table, what to know beside each line, and the commands."""
    shown = [make(root) for make in HEADLINES]
    table = ["| | measured | vllm-ext | baseline | machine | commit |", "|---|---|---|---|---|---|"]
    notes, commands = [], []
    for number, line in enumerate(shown, 1):
        cells = [line.measured, line.ours, line.baseline, line.result.machine, line.result.measured_at]
        table.append(f"| {number} | {' | '.join(cells)} |")
        notes.append(f"{number}. {line.note}")
        commands.append(f"    {line.result.command}")
    return "\n".join([*table, "", *notes, f"- {objectives(root)}", "", *commands, ""])


def measured_block(root: Path, names: str, page: Path) -> str:
    """Return a table of result files with machine, commit and goals, and the command of each."""
    files = sorted(path.name for path in (root / RESULTS).glob("*.json")) if names == "all" else names.split()
    results = [Result(root, name) for name in files]
    up = "../" * len(page.relative_to(root).parent.parts)
    rows = [
        f"| [{result.name}]({up}{RESULTS.as_posix()}/{result.name}) | {result.machine} | {result.measured_at} "
        f"| {_goals(result)} |"
        for result in results
    ]
    commands = [] if names == "all" else ["", *(f"    {result.command}" for result in results)]
    return "\n".join(["| result | machine | commit | goals met |", "|---|---|---|---|", *rows, *commands, ""])


def _goals(result: Result) -> str:
    goals = result.data.get("goals", [])
    return f"{sum(bool(goal['met']) for goal in goals)} of {len(goals)}" if goals else "none set"


def rewritten(root: Path, page: Path) -> str:
    """Return the text of a page with its blocks made anew.

    Raises:
        NoHeadline: a result lacks what the page shows of it, or README.md has no block.
    """
    text = page.read_text()
    if page == root / "README.md":
        block = readme_block(root)
        text, found = _README.subn(lambda _: block, text)
        if found != 1:
            raise NoHeadline(f"README.md has {found} blocks of results, not one: see scripts/readme_results.py")
    return _MEASURED.sub(lambda at: at["names"] + at[2] + measured_block(root, at["names"], page), text)


def pages(root: Path) -> list[Path]:
    """Return the pages that show results."""
    return [root / "README.md", *sorted((root / "docs" / "results").glob("*.md"))]


def without_ages(text: str) -> str:
    """Return a page without what changes with every commit, and what a shallow clone does not know."""
    return _AGE.sub("", text)


def main() -> int:
    """Rewrite the pages, or check them."""
    parser = argparse.ArgumentParser(description="Rewrite what README.md and docs/results/ show of benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is out of date")
    check = parser.parse_args().check
    stale = []
    try:
        for page in pages(ROOT):
            made = rewritten(ROOT, page)
            if without_ages(made) != without_ages(page.read_text()):
                stale.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(made)
    except NoHeadline as error:
        print(error, file=sys.stderr)
        return 1
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run: python scripts/readme_results.py", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
