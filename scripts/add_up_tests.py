#!/usr/bin/env python3
"""Add up the closing lines of several pytest runs in a log, read from stdin, and print one: "N passed, N failed".

    make test 2>&1 | tee log; python scripts/add_up_tests.py 3 < log

Exits with 1 unless the log holds as many closing lines as the argument says: a run that died printed none.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable

_CLOSING = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+|no tests ran) in [0-9.]+s")
_COUNT = re.compile(r"(\d+) ([a-z]+)")


def add_up(lines: Iterable[str]) -> tuple[int, Counter[str]]:
    """Return how many closing lines there are, and their counts by word."""
    runs, counts = 0, Counter[str]()
    for line in lines:
        if found := _CLOSING.match(line):
            runs += 1
            for number, word in _COUNT.findall(found[1]):
                counts[word.replace("errors", "error")] += int(number)
    return runs, counts


def main() -> int:
    """Read the log and print the sums."""
    expected = int(sys.argv[1])
    runs, counts = add_up(sys.stdin)
    failed = counts["failed"] + counts["error"]
    if runs != expected:
        print(f"only {runs} of {expected} pytest runs finished")
    print(f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped")
    return 0 if runs == expected else 1


if __name__ == "__main__":
    sys.exit(main())
