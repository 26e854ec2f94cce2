"""Flags that several commands and benchmarks have, each defined once."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from vllm_ext.envs import cache_dir
from vllm_ext.report.provenance import result_path

JSON_HINT = "(--json prints the result as JSON)"
"""Stands on a terminal where the JSON would have been."""


def json_wanted(asked: bool) -> bool:
    """Whether to print JSON to standard output: into a pipe or a file always, to a terminal where ``--json`` asked."""
    return asked or not sys.stdout.isatty()


def add(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *names: str, **helps: str) -> None:
    """Add some of them, those of a parser in a group of their own: called last, they end its help.

    argparse's parent parsers would put them in front of the parser's own flags.

    Args:
        parser: Gets them.
        names: Without dashes, with the usual text.
        helps: Name -> what the flag means here.
    """
    group = parser.add_argument_group("common flags") if isinstance(parser, argparse.ArgumentParser) else parser
    for name, options in _flags().items():
        if name in names or name in helps:
            group.add_argument(f"--{name}", **options | ({"help": helps[name]} if helps.get(name) else {}))


def _flags() -> dict[str, dict[str, Any]]:
    return {
        "out": {"type": result_path, "metavar": "FILE", "help": "also write the JSON result to FILE"},
        "plot": {"type": Path, "metavar": "FILE"},
        "json": {"action": "store_true", "help": "print the result as JSON to a terminal too; a pipe gets it anyway"},
        "quiet": {"action": "store_true", "help": "no progress and no table"},
        "quick": {"action": "store_true", "help": "the same measurement on less data, below a minute"},
        "seed": {"type": int, "default": 0, "help": "seed of every random generator (default: 0)", "metavar": "N"},
        "jobs": {
            "type": int, "default": os.cpu_count() or 1, "metavar": "N",
            "help": "simulations at a time (default: one per core)",
        },
        "cache": {
            "type": Path, "default": cache_dir() / "points", "metavar": "DIR",
            "help": "where finished simulations are kept, so that the same command goes on after an interruption "
            "(default: the cache of vllm-ext)",
        },
    }  # fmt: skip
