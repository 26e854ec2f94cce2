"""Flags that several commands and benchmarks have, each defined once."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Callable
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


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of a flag that is a count."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least {least}")
        return int(text)

    return count


def number(allowed: Callable[[float], bool], what: str) -> Callable[[str], float]:
    """Return the type of a flag that is a number.

    Args:
        allowed: Whether it may be; nan is what is no number.
        what: It must be.
    """

    def found(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"{text}: must be {what}")
        return value

    return found


def output_file(*endings: str) -> Callable[[str], Path]:
    """Return the type of a flag that names a file to write, refused before the work if it can't be written."""

    def file(text: str) -> Path:
        path = output_folder(os.path.dirname(text)) / os.path.basename(text)
        if not path.name.endswith(endings or ("",)):
            raise argparse.ArgumentTypeError(f"{text}: must end in {', '.join(endings)}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text or repr(text)}: must be a file, not a folder")
        return path

    return file


def html_file(text: str) -> Path:
    """Return the file of a page, refused before the work if it can't be written, or nothing is there to make it."""
    for module in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise argparse.ArgumentTypeError(f"{text}: needs {module}: pip install 'vllm-ext[lab]'")
    return output_file(".html")(text)


def output_folder(text: str) -> Path:
    """Return the folder that a flag names; refused if it can't be written to, or made."""
    path = result_path(text)  # nor if it holds results of sources that are not committed
    there = next(one for one in (path, *path.absolute().parents) if os.path.exists(one))
    try:
        with tempfile.TemporaryFile(dir=there):  # rights alone say too little: root has all, even below /proc
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {there} must be a folder that can be written to") from error


def _flags() -> dict[str, dict[str, Any]]:
    return {
        "out": {"type": output_file(), "metavar": "FILE", "help": "also write the JSON result to FILE"},
        "plot": {"type": output_file(".png", ".svg"), "metavar": "FILE"},
        "html": {"type": html_file, "metavar": "FILE", "help": "write the result as one page to look at, .html"},
        "json": {"action": "store_true", "help": "print the result as JSON to a terminal too; a pipe gets it anyway"},
        "quiet": {"action": "store_true", "help": "no progress and no table"},
        "quick": {"action": "store_true", "help": "the same measurement on less data, below a minute"},
        "seed": {
            "type": at_least(0), "default": 0, "metavar": "N", "help": "seed of every random generator (default: 0)"
        },
        "jobs": {
            "type": at_least(1), "default": os.cpu_count() or 1, "metavar": "N",
            "help": "simulations at a time (default: one per core)",
        },
        "cache": {
            "type": output_folder, "default": cache_dir() / "points", "metavar": "DIR",
            "help": "where finished simulations are kept, so that the same command goes on after an interruption "
            "(default: the cache of vllm-ext)",
        },
    }  # fmt: skip
