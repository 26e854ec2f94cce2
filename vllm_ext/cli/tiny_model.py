"""`vllm-ext tiny-model`: build the embedded tiny model and print its directory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_ext.cli.exit_status import FAILED
from vllm_ext.tiny_model import Style, build


def main(argv: Sequence[str]) -> int:
    """Build the model unless it is there, and print its path as the only line on stdout."""
    args = _parser().parse_args(argv)
    try:
        path = build(args.style, args.seed, args.dir)
    except (ValueError, OSError) as error:
        print(f"vllm-ext tiny-model: {error}", file=sys.stderr)
        return FAILED
    print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-ext tiny-model",
        description="Build a small random model with its tokenizer from a seed, without a download; print its path.",
    )
    parser.add_argument("--style", choices=[style.value for style in Style], default=Style.LLAMA.value)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: %(default)s)")
    parser.add_argument(
        "--dir", type=Path, help="folder in which the model's own folder is made (default: the user's cache)"
    )
    return parser
