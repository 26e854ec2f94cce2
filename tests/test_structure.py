"""How the package is cut: small modules, no two that import each other, and imports that point downwards.

What does not fit yet stands in a list, one for each rule. A list may only get shorter: a new exception fails, and so
does one that is no longer needed. Modules have the names they ship under, without ``vllm_ext``.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "vllm_ext"
SHIPPED = {"": ROOT / PACKAGE, "kernels": ROOT / "kernels", "patches": ROOT / "patches"}
"""Where the modules of the package lie, by their first name; the top-level folders ship inside of it."""
FOLDERS = (PACKAGE, "kernels", "patches", "scripts", "benchmarks", "tests", "docs")
MAX_LINES = 400

LONG_MODULES: frozenset[str] = frozenset()
"""Files of more than `MAX_LINES` lines."""

LAYERS = """
    cli
    repro demo
    cluster cellular
    plugin
    simulation
    patches
    predictor slo metrics
    scheduling
    kv attention
    system*
    policies
    prediction
    contract
    step_time
    report
    tiny_model kernels hooks config* envs hints files datasets
"""
"""Packages and single modules, the highest first. A module imports from its own line and from lines below it."""

TOO_COMPLEX = """
    tests/conformance/test_stateful.py
    vllm_ext/config.py
"""
"""Files in which ruff does not look at how complex a function is (C901)."""

UNTYPED: frozenset[str] = frozenset()
"""Modules whose errors mypy ignores."""


def lines_of(listed: str) -> set[str]:
    return {line.strip() for line in listed.splitlines() if line.strip()}


def agrees(found: set[str], listed: set[str], rule: str) -> None:
    assert not found - listed, f"{rule}: {sorted(found - listed)}"
    assert not listed - found, f"no longer so, take it from the list: {sorted(listed - found)}"


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for first, folder in SHIPPED.items():
        for path in folder.rglob("*.py"):
            parts = [first, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(part for part in parts if part and part != "__init__")] = path
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield full names of what is imported anywhere in a module, absolute as TID252 wants it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def imports() -> dict[str, frozenset[str]]:
    """Return the modules of the package that each module imports."""
    known, found = modules(), {}
    for name, path in known.items():
        targets = set()
        for target in imported(ast.parse(path.read_text(encoding="utf-8"))):
            top, _, inner = target.partition(".")
            if top == PACKAGE:  # `from a import b`: b is a module, or a name in the module a
                targets.add(inner if inner in known else inner.rpartition(".")[0])
        found[name] = frozenset(targets - {name, ""})
    return found


def layer_of(module: str) -> int:
    """Return the line of `LAYERS` in which a module's first name stands."""
    first = module.partition(".")[0]
    lines = [[fnmatch(first, pattern) for pattern in line.split()] for line in LAYERS.splitlines()]
    assert sum(map(sum, lines)) == 1, f"{first}: must stand once in LAYERS"
    return next(number for number, line in enumerate(lines) if any(line))


@functools.cache
def pyproject() -> dict[str, Any]:
    tools: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    return tools


def test_no_module_is_long() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if path.read_bytes().count(b"\n") > MAX_LINES}
    agrees(found, set(LONG_MODULES), f"more than {MAX_LINES} lines, find the missing noun")


@pytest.mark.parametrize("module", sorted({name.partition(".")[0] for name in modules()} - {""}))
def test_every_package_has_one_layer(module: str) -> None:
    assert layer_of(module) > 0


def test_no_two_modules_import_each_other() -> None:
    found = {
        f"{one} <-> {other}"
        for one, other in combinations(sorted(imports()), 2)
        if other in imports()[one] and one in imports()[other]
    }
    assert not found, f"these import each other; give the helper a small protocol of what it needs: {sorted(found)}"


def test_no_package_imports_one_above_it() -> None:
    found = {
        f"{module.partition('.')[0]} -> {target}"
        for module, targets in imports().items()
        for target in targets
        if module and layer_of(target) < layer_of(module)
    }
    assert not found, f"imports point downwards, see LAYERS: {sorted(found)}"


def test_complexity_is_looked_at_in_all_but_a_few_files() -> None:
    ignores: dict[str, list[str]] = pyproject()["ruff"]["lint"]["per-file-ignores"]
    agrees({file for file, rules in ignores.items() if "C901" in rules}, lines_of(TOO_COMPLEX), "cut the function")


def test_mypy_looks_at_all_that_ships() -> None:
    mypy: dict[str, Any] = pyproject()["mypy"]
    assert mypy["strict"]
    assert {str(folder.relative_to(ROOT)) for folder in SHIPPED.values()} <= set(mypy["files"])
    assert "exclude" not in mypy
    ignored = {module for rule in mypy["overrides"] if rule.get("ignore_errors") for module in rule["module"]}
    agrees(ignored, set(UNTYPED), "mend the errors instead")


def test_a_module_above_and_a_circle_are_found() -> None:
    tree = ast.parse("if True:\n    from vllm_ext.cli import main\ndef f():\n    import vllm_ext.kv.disk.tier\n")
    assert list(imported(tree)) == ["vllm_ext.cli.main", "vllm_ext.kv.disk.tier"]
    assert layer_of("cli.main") < layer_of("kv.disk.tier") < layer_of("config_kv")
    with pytest.raises(AssertionError, match="a rule"):
        agrees({"a <-> b"}, set(), "a rule")
    with pytest.raises(AssertionError, match="take it from the list"):
        agrees(set(), {"a <-> b"}, "a rule")
