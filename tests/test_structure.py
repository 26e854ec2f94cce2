"""How the package is cut: small modules, no two that import each other, and imports that point downwards.

What does not fit yet stands in a list, one for each rule. A list may only get shorter: a new exception fails, and so
does one that is no longer needed. Modules have the names they ship under, without ``vllm_ext``.
"""

from __future__ import annotations

import ast
import functools
import sys
import tomllib
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import rooms  # noqa: E402

SHIPPED = ("vllm_ext", "kernels", "patches")
FOLDERS = (*SHIPPED, "scripts", "benchmarks", "tests", "docs")
MAX_LINES = 600

LONG_MODULES: frozenset[str] = frozenset()
"""Files of more than `MAX_LINES` lines."""

TOO_COMPLEX = """
    tests/conformance/test_stateful.py
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
def pyproject() -> dict[str, Any]:
    tools: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    return tools


def test_no_module_is_long() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if path.read_bytes().count(b"\n") > MAX_LINES}
    agrees(found, set(LONG_MODULES), f"more than {MAX_LINES} lines, find the missing noun")


@pytest.mark.parametrize("module", sorted({rooms.room_of(name) for name in rooms.modules()} - {""}))
def test_every_package_has_one_layer(module: str) -> None:
    assert rooms.layer_of(module) > 0


def test_no_two_modules_import_each_other() -> None:
    found = {
        f"{one} <-> {other}"
        for one, other in combinations(sorted(rooms.imports()), 2)
        if other in rooms.imports()[one] and one in rooms.imports()[other]
    }
    assert not found, f"these import each other; give the helper a small protocol of what it needs: {sorted(found)}"


def test_no_package_imports_one_above_it() -> None:
    found = {
        f"{module} -> {target}"
        for module, targets in rooms.imports().items()
        for target in targets
        if module and rooms.layer_of(target) < rooms.layer_of(module)
    }
    assert not found, f"imports point downwards, see LAYERS of scripts/rooms.py: {sorted(found)}"


def test_the_picture_of_the_rooms_is_that_of_the_imports() -> None:
    """If not: python scripts/rooms.py."""
    text = rooms.PAGE.read_text(encoding="utf-8")
    assert rooms.rewritten(text) == text


SERVER_LINES = 33_310
"""What a server can come to load, in lines; it may only get less, but for what is new: load reports came with 500, long
prompts that hold nobody up with 110."""


def test_a_server_loads_little_and_nothing_of_the_tools() -> None:
    served = rooms.served()
    assert {"scheduling.scheduler", "kv.connector.tiered", "prediction.learned"} <= served
    tools = {"cli", "compare", "demo", "cluster", "cellular", "report", "tiny_model"}
    assert {name for name in served if rooms.room_of(name) in tools} == set()
    assert sum(rooms.modules()[name].read_bytes().count(b"\n") for name in served) <= SERVER_LINES


def test_few_modules_lie_in_no_room() -> None:
    loose = {name for name, path in rooms.modules().items() if name and "." not in name and path.name != "__init__.py"}
    assert loose == {"datasets", "envs", "files", "hints", "plugin"}


OLD_WORDS = {
    "Desk": "RequestBatcher", "Fate": "KvDisposition", "Fronts": "CachedPrefixes", "Job": "TrackedRequest",
    "Judged": "SloOutcome", "Ledger": "TrackedRequests", "LengthLaw": "LengthDistribution", "Pace": "StepStats",
    "Parting": "PreemptionCost", "PassAFew": "BoundedBypass", "PressingFirst": "UrgentFirst", "Seen": "SequenceTimes",
    "SpecError": "ConfigError", "law": "distribution", "said": "chat_messages", "take_back": "discard_failed_loads",
}  # fmt: skip
"""Names that readers stumbled over, and what is said instead."""
SPOKEN = ("config", "contract", "hooks", "metrics", "predictor", "report", "scheduling", "slo", "systems")
"""Rooms in which the old ones are refused."""


@pytest.mark.parametrize("room", SPOKEN)
def test_old_words_name_nothing_new(room: str) -> None:
    found = {}
    for name, path in rooms.modules().items():
        if rooms.room_of(name) == room:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {f"{name}: {word}": OLD_WORDS[word] for word in names_in(tree) & OLD_WORDS.keys()}
    assert not found, "say instead"


def names_in(tree: ast.AST) -> set[object]:
    """The names that a module gives and uses: `Name.id`, `Attribute.attr`, `arg.arg`, of definitions, of imports."""
    return {getattr(node, field, None) for node in ast.walk(tree) for field in ("id", "attr", "arg", "name", "asname")}


def test_every_kind_of_name_is_looked_at() -> None:
    text = "import a as b\nfrom c import d\nasync def e(f): g.h(i=1)\nclass j: k = 1\ndef l(): pass\n"
    assert set("abdefghijkl") <= names_in(ast.parse(text))


def shared_tests(file: Path, tree: ast.AST) -> set[str]:
    """The modules of tests that a file takes things from and that are neither beside nor above it, nor in support."""
    package = file.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            level = getattr(node, "level", 0)
            above = package[: len(package) - level + 1] if level else ()
            target = [*above, *(getattr(node, "module", None) or "").split(".")]
            names = {tuple(filter(None, (*target, *name.name.split(".")))) for name in node.names}
            for name in names:
                if name[0] != "tests" or name[:2] == ("tests", "support"):
                    continue
                folder = max(length for length in range(1, len(name)) if (ROOT.joinpath(*name[:length])).is_dir())
                if name[:folder] != package[:folder]:
                    found.add(".".join(name))
    return found


def test_what_folders_of_tests_share_lies_in_support() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    found = {str(file.relative_to(ROOT)): sorted(shared_tests(file, tree)) for file, tree in trees.items()}
    assert {file: names for file, names in found.items() if names} == {}
    file = ROOT / "tests" / "kv" / "int8" / "test_records.py"
    wrong = ast.parse("from tests.kv.parts import a\nfrom ..parts import b\nfrom tests.slo.parts import c\n")
    assert shared_tests(file, wrong) == {"tests.slo.parts.c"}
    assert shared_tests(file, ast.parse("import tests.slo.parts, tests.support.stub, json\n")) == {"tests.slo.parts"}


def test_complexity_is_looked_at_in_all_but_a_few_files() -> None:
    ignores: dict[str, list[str]] = pyproject()["ruff"]["lint"]["per-file-ignores"]
    agrees({file for file, rules in ignores.items() if "C901" in rules}, lines_of(TOO_COMPLEX), "cut the function")


def test_mypy_looks_at_all_that_ships() -> None:
    mypy: dict[str, Any] = pyproject()["mypy"]
    assert mypy["strict"]
    assert set(SHIPPED) <= set(mypy["files"])
    assert "exclude" not in mypy
    ignored = {module for rule in mypy["overrides"] if rule.get("ignore_errors") for module in rule["module"]}
    agrees(ignored, set(UNTYPED), "mend the errors instead")


def test_a_module_above_and_a_circle_are_found() -> None:
    tree = ast.parse("if True:\n    from vllm_ext.cli import main\ndef f():\n    import vllm_ext.kv.disk.tier\n")
    assert list(rooms.imported(tree)) == ["vllm_ext.cli.main", "vllm_ext.kv.disk.tier"]
    assert rooms.layer_of("cli.main") < rooms.layer_of("kv.disk.tier") < rooms.layer_of("config.kv_tier")
    with pytest.raises(AssertionError, match="a rule"):
        agrees({"a <-> b"}, set(), "a rule")
    with pytest.raises(AssertionError, match="take it from the list"):
        agrees(set(), {"a <-> b"}, "a rule")
