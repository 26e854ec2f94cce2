"""Run on small data every benchmark whose docstring shows `--quick`, one after the other: `make bench-quick`.

A benchmark that fails does not end the run, and one that needs a device this machine has not is skipped: it says so by
its exit status. The closing lines name both. Arguments are passed on to each benchmark.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ext.report.results import NEEDS_DEVICE

FOLDER = Path("benchmarks")


@dataclass(frozen=True)
class Ran:
    """How a benchmark ended."""

    name: str
    status: int

    def __str__(self) -> str:
        """For the closing lines."""
        if self.status == 0:
            return f"passed   {self.name}"
        if self.status == NEEDS_DEVICE:
            return f"skipped  {self.name}: needs a device that this machine has not"
        return f"FAILED   {self.name}: exit status {self.status}"


def benchmarks(folder: Path) -> list[Path]:
    """Return the scripts of a folder of subjects whose docstring shows how to run them with ``--quick``, sorted."""
    return [
        file
        for file in sorted(folder.glob("*/*.py"))
        if f"benchmarks/{file.parent.name}/{file.name} --quick"
        in (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "")
    ]


def main(arguments: Sequence[str], folder: Path = FOLDER) -> int:
    """Run them all, and return 1 if one failed or there are none."""
    ran = []
    for file in benchmarks(folder):
        print(f"== {file}", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, str(file), "--quick", *arguments], check=False)
        ran.append(Ran(file.name, done.returncode))
    failed = [one for one in ran if one.status not in (0, NEEDS_DEVICE)]
    print("== bench-quick", *ran, sep="\n", file=sys.stderr, flush=True)
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
