"""What benchmarks of a CUDA device share: the command line, and a result that grows. A part of those."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - before all that it makes importable
import torch

from vllm_ext.files import replaced
from vllm_ext.report import common_flags, results

DONE, WRONG, FAILED = 0, 1, 3
"""Exit statuses: all was measured; a comparison found something wrong, which the result names; something is missing."""


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark of a GPU has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_flags.add(parser, "out", "quick", "seed")
    parser.add_argument("--dry", action="store_true", help="a try on the CPU, whose numbers mean nothing")
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; without a device, and without ``--dry``, the process ends with `NEEDS_DEVICE`."""
    args = parser.parse_args(argv)
    if not args.dry and not torch.cuda.is_available():
        parser.exit(
            results.NEEDS_DEVICE,
            "needs a CUDA device; --dry tries it without one (kernels of Triton with TRITON_INTERPRET=1)\n",
        )
    return args


def write(out: Path | None, found: Mapping[str, Any]) -> None:
    """Write what was found so far, in one move: the process may be ended at any time."""
    if out is not None:
        with replaced(out) as file:
            file.write(json.dumps(found, indent=1, allow_nan=False).encode())


def status(*, wrong: bool, complete: bool) -> int:
    """Return an exit status; what is wrong counts for more than what is missing."""
    return WRONG if wrong else DONE if complete else FAILED


class Report:
    """A result whose file is written after each part: a process killed at its limit leaves what it measured.

    The file says ``complete`` false until `end`, and names under ``wrong`` what a comparison found to be wrong.

    Args:
        out: The file; None: nothing is written.
        facts: What is known at the start.
    """

    def __init__(self, out: Path | None, **facts: Any) -> None:
        self._out = out
        self.found: dict[str, Any] = {**facts, "complete": False}
        self.write()

    def write(self) -> None:
        """Write what is there."""
        write(self._out, self.found)

    def add_wrong(self, name: str) -> None:
        """Note that a comparison found something wrong, and write."""
        self.found.setdefault("wrong", []).append(name)
        self.write()

    def end(self, *, complete: bool = True) -> int:
        """Write for the last time, and return the exit status."""
        self.found["complete"] = complete
        self.write()
        return status(wrong=bool(self.found.get("wrong")), complete=complete)
