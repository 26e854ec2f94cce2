"""Which code decides what was simulated, and that no change of it goes unseen."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ext.simulation.sweep.sources import NOT_DECISIVE, checksums, decisive_files, digest_of, loaded_modules

DECISIVE = ("system.py", "simulation/cost/deep/roofline.py", "kernels/kv_quant/format.py", "patches/queue.py")


def packages(root: Path, *, wheel: bool) -> dict[str, list[str]]:
    beside = root / "vllm_ext" if wheel else root
    return {
        "": [str(root / "vllm_ext")],
        "kernels/": [str(beside / "kernels")],
        "patches/": [str(beside / "patches")],
    }


def source_digest(found: dict[str, list[str]]) -> str | None:
    of = checksums(decisive_files(found))
    return digest_of(of, of)


def write(found: dict[str, list[str]], name: str, text: str = "x = 1\n") -> Path:
    prefix = next((p for p in found if p and name.startswith(p)), "")
    file = Path(found[prefix][0]) / name.removeprefix(prefix)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture(params=[False, True], ids=["checkout", "wheel"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, list[str]]:
    """Packages with a few modules, laid out as a checkout and as a wheel."""
    found = packages(tmp_path, wheel=request.param)
    for name in DECISIVE:
        write(found, name)
    return found


def test_checkout_and_wheel_have_the_same_digest(tmp_path: Path) -> None:
    digests = set()
    for wheel in (False, True):
        found = packages(tmp_path / str(wheel), wheel=wheel)
        for name in DECISIVE:
            write(found, name)
        assert list(decisive_files(found)) == sorted(DECISIVE)
        digests.add(source_digest(found))
    assert len(digests) == 1


@pytest.mark.parametrize("name", DECISIVE)
def test_changed_moved_added_and_removed_file_each_change_the_digest(made: dict[str, list[str]], name: str) -> None:
    digests = [source_digest(made)]
    file = write(made, name, "x = 2\n")
    digests.append(source_digest(made))
    file = file.rename(file.with_name("renamed.py"))
    digests.append(source_digest(made))
    file = file.rename(write(made, f"{Path(name).parent.as_posix()}/deeper/x.py".removeprefix("./")))
    digests.append(source_digest(made))
    file.unlink()
    digests.append(source_digest(made))
    assert len(set(digests)) == len(digests)


def test_text_that_moves_from_one_file_to_the_next_changes_the_digest(made: dict[str, list[str]]) -> None:
    write(made, "a.py", "x")
    write(made, "b.py", "y")
    before = source_digest(made)
    write(made, "a.py", "")
    write(made, "b.py", "xy")
    assert source_digest(made) != before


def test_modules_that_a_run_did_not_import_leave_its_digest(made: dict[str, list[str]]) -> None:
    imported = DECISIVE[:2]
    before = digest_of(imported, checksums(decisive_files(made)))
    write(made, DECISIVE[2], "x = 2\n")
    write(made, "new.py")
    assert digest_of(reversed(imported), checksums(decisive_files(made))) == before
    write(made, DECISIVE[1], "x = 2\n")
    assert digest_of(imported, checksums(decisive_files(made))) not in {before, None}
    assert digest_of([*imported, "gone.py"], checksums(decisive_files(made))) is None


def test_what_a_simulation_imports_is_known_by_name() -> None:
    """Those of the checkout beside the package too, whose folder is a link."""
    importlib.import_module("vllm_ext.simulation.run")
    importlib.import_module("vllm_ext.kernels.kv_quant")
    loaded = loaded_modules()
    assert {"simulation/run.py", "scheduling/scheduler.py", "kernels/kv_quant/__init__.py"} <= {*loaded}
    assert not any(name.startswith(NOT_DECISIVE) for name in loaded if name != "experiments/ablations.py")


def test_what_only_asks_for_runs_or_shows_them_leaves_the_digest(made: dict[str, list[str]]) -> None:
    before = source_digest(made)
    for package in NOT_DECISIVE:
        write(made, f"{package}/deep/new.py")
    write(made, "notes.txt")
    assert source_digest(made) == before


def test_digest_covers_the_scheduler_its_hooks_and_kernels() -> None:
    covered = decisive_files().keys()
    assert {"kernels/__init__.py", "hooks/registry.py", "scheduling/scheduler.py", "simulation/run.py"} <= covered
    assert "experiments/ablations.py" in covered
    assert all(path.is_file() for path in decisive_files().values())


def test_no_decisive_module_imports_one_that_the_digest_leaves_out() -> None:
    left_out = tuple(f"vllm_ext.{package.replace('/', '.')}." for package in NOT_DECISIVE)
    wrong = [
        f"{name} imports {imported}"
        for name, file in decisive_files().items()
        for imported in imports(ast.parse(file.read_text(encoding="utf-8")))
        if f"{imported}.".startswith(left_out)
    ]
    assert wrong == []


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
