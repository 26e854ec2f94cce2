"""When a command prints its result as JSON: into a pipe or a file always, to a terminal only with ``--json``."""

from __future__ import annotations

import argparse
import sys

HINT = "(--json prints the result as JSON)"
"""Stands on a terminal where the JSON would have been."""


def add_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option ``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON to a terminal too; a pipe gets it anyway"
    )


def wanted(asked: bool) -> bool:
    """Whether to print JSON to standard output.

    Args:
        asked: Whether ``--json`` was given.
    """
    return asked or not sys.stdout.isatty()
