"""Print fingerprints of functions in sources, without importing them, or write those of a version.

::

    python -m vllm_ext.hooks --source DIRECTORY_WHEEL_OR_SDIST TARGET...
    python -m vllm_ext.hooks --source vllm-0.33.0.whl --all
    python -m vllm_ext.hooks --source vllm-0.33.0.whl --write 0.33.0
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_ext.files import replaced
from vllm_ext.hooks import registry, verified
from vllm_ext.hooks.feature import Feature, overridable, target_of
from vllm_ext.hooks.fingerprint import fingerprint
from vllm_ext.hooks.patch import Addition, Hook, resolve
from vllm_ext.hooks.sources import fingerprint_source, read_module


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per target: its fingerprint in ``--source``, or why there is none."""
    parser = argparse.ArgumentParser(description="Print fingerprints of functions without importing them.")
    parser.add_argument("--source", type=Path, required=True, help="directory that holds vllm/, a wheel, or an sdist")
    parser.add_argument("--all", action="store_true", help="every hook of vllm-ext")
    parser.add_argument("--write", metavar="VERSION", help="keep those of every hook as this version's, once read")
    parser.add_argument("target", nargs="*", help="package.module:Class.method or package.module:function")
    args = parser.parse_args(argv)
    if args.write:
        return _write(args.source, args.write)
    targets: list[str] = list(args.target)
    if args.all:
        targets += [hook.target for hook in registry.hooks()]
    if not targets:
        parser.error("name a target, or give --all")
    for target in targets:
        try:
            found = _in_source(args.source, target)
        except LookupError as error:
            found = f"absent: {error}"
        print(f"{target}  {found}")
    return 0


def _write(source: Path, version: str) -> int:
    """Write the file of a version: what hooks name, and what our classes override in it."""
    found = {}
    for hook in registry.hooks():
        if isinstance(hook, Addition) or version not in (getattr(hook, "only", ()) or (version,)):
            continue
        try:
            found[hook.target] = _in_source(source, hook.target) + _wrappers(hook)
        except LookupError as error:
            print(f"{hook.target}  absent: {error}", file=sys.stderr)
    found |= _overridden(source, version)
    with replaced(Path(verified.__file__).with_name(f"{version}.json")) as file:
        file.write(json.dumps(dict(sorted(found.items())), indent=1).encode() + b"\n")
    print(f"{len(found)} functions of vLLM {version}")
    return 0


def _overridden(source: Path, version: str) -> dict[str, str]:
    """Return what our classes override in a source, which may have methods that the vLLM installed has not."""
    found = {}
    for feature, classes in overriding():
        for qualified in classes if version in (feature.only or (version,)) else ():
            for name, bases in overridable(qualified):
                for target in (target_of(base, name) for base in bases):
                    try:
                        found[target] = _in_source(source, target)
                    except LookupError:
                        continue
                    break
    return found


def overriding() -> Iterator[tuple[Feature, tuple[str, ...]]]:
    """Yield which classes of ours override methods of vLLM's, with the feature they are for."""
    for names in registry.GROUPS.values():
        for module in (importlib.import_module(f"vllm_ext.patches.{name}") for name in names):
            if hasattr(module, "OVERRIDING"):
                yield module.FEATURE, module.OVERRIDING


def _in_source(source: Path, target: str) -> str:
    module, _, qualname = target.partition(":")
    return fingerprint_source(read_module(source, module), qualname)


def _wrappers(hook: Hook) -> str:
    """Return the names of the decorators of a function, as the vLLM installed has them."""
    try:
        _, plus, names = fingerprint(resolve(hook.target).function).partition("+")
    except LookupError:
        return ""
    return plus + names


if __name__ == "__main__":
    sys.exit(main())
