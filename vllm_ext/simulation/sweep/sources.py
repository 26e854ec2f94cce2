"""Checksums of code: what other code simulated must not be taken for this one's.

A run can depend only on modules that its process has imported. Their names are kept with what it measured; as long as
none of them has changed, it need not run again. A module that is imported from now on is imported by one that changed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import vllm_ext
import vllm_ext.kernels
import vllm_ext.patches
from vllm_ext.systems.compose import UNSERVED

PACKAGES: Mapping[str, Iterable[str]] = {
    "": vllm_ext.__path__,
    "kernels/": vllm_ext.kernels.__path__,
    "patches/": vllm_ext.patches.__path__,
}
"""Folders of source files, by where a wheel has them within `vllm_ext`; a checkout has two of them beside it."""
NOT_DECISIVE = ("cli", "cluster", "compare", "demo", "experiments", "simulation/plan", "tiny_model")
"""Packages that nothing which simulates imports: how a run is asked for, where it runs, what is shown of it."""
ROWS_APART = UNSERVED.removeprefix("vllm_ext.").replace(".", "/") + ".py"
"""Rows of systems that are imported when one is asked for by name, from a package of these."""


def all_files(packages: Mapping[str, Iterable[str]] = PACKAGES) -> dict[str, Path]:
    """Return every module of the package, by its path within `vllm_ext`, sorted."""
    found = {
        prefix + file.relative_to(folder).as_posix(): file
        for prefix, folders in packages.items()
        for folder in folders
        for file in Path(folder).rglob("*.py")
    }
    return {name: found[name] for name in sorted(found)}


def decisive_files(packages: Mapping[str, Iterable[str]] = PACKAGES) -> dict[str, Path]:
    """Return the modules that can decide a simulation."""
    apart = tuple(f"{package}/" for package in NOT_DECISIVE)
    files = all_files(packages)
    return {name: file for name, file in files.items() if name == ROWS_APART or not name.startswith(apart)}


def checksums(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the checksum of each file, by its name."""
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


def digest_of(names: Iterable[str], of: Mapping[str, str]) -> str | None:
    """Return the checksum of the names and contents of some modules; None if one of them is gone.

    Args:
        names: In any order.
        of: What `checksums` returned.
    """
    lines = [f"{name} {of.get(name)}\n" for name in sorted(names)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12] if of.keys() >= {*names} else None


def loaded_modules() -> tuple[str, ...]:
    """Return which of `decisive_files` this process has imported, sorted."""
    places = {getattr(one, "__file__", None) for one in [*sys.modules.values()]}
    return tuple(sorted(name for place, name in _by_place().items() if place in places))


@functools.cache
def _by_place() -> dict[str, str]:
    return {str(file): name for name, file in decisive_files().items()}


def module_files(name: str) -> list[Path]:
    """Return the source files of a module of the user's, and of what it imports from the folder it lies in, sorted.

    A module within a package counts with the whole package. Parts of vllm_ext, and modules that are not found, have no
    files here: the former are in `source_digest`, the latter are refused when the system is built.
    """
    top = name.partition(".")[0]
    try:
        spec = None if top == vllm_ext.__name__ else importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return sorted(file for place in spec.submodule_search_locations for file in Path(place).rglob("*.py"))
    return with_neighbours(Path(spec.origin)) if spec.origin and spec.origin.endswith(".py") else []


def with_neighbours(file: Path) -> list[Path]:
    """Return a source file and those of its folder that it imports, directly or not, sorted."""
    found, ahead = {file}, [file]
    while ahead:
        for name in _imported(ahead.pop()):
            folder = file.parent / name
            new = {f for f in (folder.with_suffix(".py"), *folder.rglob("*.py")) if f.is_file()} - found
            found |= new
            ahead += new
    return sorted(found)


def _imported(file: Path) -> Iterator[str]:
    """First names of the modules that a file imports; none if it is no Python, which building the system reports."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
