"""Flags of commands that keep the simulations they ran, and go on with the rest after an interruption."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from vllm_ext.envs import cache_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--jobs`` and ``--cache``."""
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="simulations at a time (default: one per core)"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=cache_dir() / "points",
        metavar="DIR",
        help="where finished simulations are kept, so that the same command goes on after an interruption (default: "
        "the cache of vllm-ext)",
    )
