"""`vllm-ext tiny-model`: build the embedded tiny model and print its directory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_ext.cli.command import Parser, guarded
from vllm_ext.report import common_flags
from vllm_ext.tiny_model import Style, build


def main(argv: Sequence[str]) -> int:
    """Build the model unless it is there, and print its path as the only line on stdout."""
    parser = Parser(
        prog="vllm-ext tiny-model",
        description="Build a small random model with its tokenizer from a seed, without a download; print its path.",
    )
    parser.add_argument("--style", choices=[style.value for style in Style], default="llama", help="(default: llama)")
    parser.add_argument("--dir", type=Path, help="folder in which the model's own is made (default: the user's cache)")
    common_flags.add(parser, seed="seed of the weights (default: 0)")
    return guarded(parser, _build, argv, failures=(ValueError, OSError))


def _build(args: argparse.Namespace) -> int:
    print(build(args.style, args.seed, args.dir))
    return 0
