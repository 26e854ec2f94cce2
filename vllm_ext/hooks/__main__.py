"""Print fingerprints of functions in sources, without importing them.

::

    python -m vllm_ext.hooks --source DIRECTORY_WHEEL_OR_SDIST TARGET...
    python -m vllm_ext.hooks --source vllm-0.33.0.whl --all
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_ext.hooks.fingerprint import fingerprint_source, read_module
from vllm_ext.hooks.registry import hooks


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per target: its fingerprint in ``--source``, or why there is none."""
    parser = argparse.ArgumentParser(description="Print fingerprints of functions without importing them.")
    parser.add_argument("--source", type=Path, required=True, help="directory that holds vllm/, a wheel, or an sdist")
    parser.add_argument("--all", action="store_true", help="every hook of vllm-ext")
    parser.add_argument("target", nargs="*", help="package.module:Class.method or package.module:function")
    args = parser.parse_args(argv)
    targets: list[str] = list(args.target)
    if args.all:
        targets += [hook.target for hook in hooks()]
    if not targets:
        parser.error("name a target, or give --all")
    for target in targets:
        module, _, qualname = target.partition(":")
        try:
            found = fingerprint_source(read_module(args.source, module), qualname)
        except LookupError as error:
            found = f"absent: {error}"
        print(f"{target}  {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
