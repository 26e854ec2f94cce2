"""vLLM and this checkout, laid out from a bundle as if they were installed; of a bundle that is made here."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import vllm_ext
from tests.support.extent import HANG_S

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    return importlib.import_module("gpu_site")


def pack(folder: Path, **files: bytes) -> Path:
    """A bundle of vLLM and of a package that it needs."""
    packed = folder / "vllm.tar.xz"
    with tarfile.open(packed, "w:xz") as tar:
        for name, data in {"vllm/__init__.py": b"x = 1\n", "need.py": b"", **files}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed


def seen(environment: dict[str, str], code: str) -> Any:
    """What Python without any installed package sees, started in the checkout."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import json; print(json.dumps({code}))"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_vllm_and_this_checkout_are_found_as_installed(site: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "laid out"
    environment = site.lay_out(pack(tmp_path), ROOT, folder)
    found = '[__import__("importlib.util").util.find_spec(name).origin for name in {!r}]'
    names = ["vllm", "need", "vllm_ext.kernels", "vllm_ext.patches", "vllm_ext.plugin", "checkout"]
    vllm, need, kernels, patches, plugin, checkout = (Path(path) for path in seen(environment, found.format(names)))
    assert vllm == need.parent / "vllm" / "__init__.py"
    assert need.parent.parent == folder
    ours = next(folder.glob("vllm-ext-*")) / "vllm_ext"
    assert all(ours in path.parents for path in (kernels, patches, plugin))
    assert checkout == ROOT / "benchmarks" / "gpu" / "checkout.py"
    assert list(need.parent.glob("vllm/__pycache__/*.pyc")), "compiled once, before many processes import it"


def test_the_distribution_is_what_pyproject_says(site: ModuleType, tmp_path: Path) -> None:
    environment = site.lay_out(pack(tmp_path), ROOT, tmp_path / "site")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = '__import__("importlib.metadata").metadata'
    ((group, points),) = project["entry-points"].items()
    listed = f'{{e.name: e.value for e in {metadata}.entry_points(group="{group}")}}'
    assert seen(environment, listed) == points
    assert seen(environment, f'{metadata}.version("{project["name"]}")') == vllm_ext.__version__


def test_a_bundle_is_unpacked_once_as_long_as_it_is_the_same(site: ModuleType, tmp_path: Path) -> None:
    packed, folder = pack(tmp_path), tmp_path / "site"
    first = site.lay_out(packed, ROOT, folder)
    unpacked = next(folder.glob("site-*"))
    (unpacked / "mark").touch()
    assert site.lay_out(packed, ROOT, folder) == first
    assert (unpacked / "mark").exists()
    pack(tmp_path, another=b"")
    assert site.lay_out(packed, ROOT, folder)["PYTHONPATH"] != first["PYTHONPATH"]


@pytest.fixture
def checkout(site: ModuleType, tmp_path: Path) -> Path:
    """What is copied of this one, with as little in it as there may be."""
    made = tmp_path / "checkout"
    for name in (site.PACKAGE, *site.SHIPPED_INSIDE):
        (made / name).mkdir(parents=True)
        (made / name / "__init__.py").write_text("__version__ = '1'\n")
    (made / "pyproject.toml").write_text("[project]\nname = 'made'\n[project.entry-points.group]\na = 'b'\n")
    return made


@pytest.mark.parametrize("file", ["vllm_ext/new.py", "kernels/__init__.py", "pyproject.toml"])
def test_a_changed_checkout_lies_beside_the_one_that_others_run_from(
    site: ModuleType, tmp_path: Path, checkout: Path, file: str
) -> None:
    first = site.install(checkout, tmp_path / "site")
    (first / "vllm_ext" / "__pycache__").mkdir()
    assert site.install(checkout, tmp_path / "site") == first
    with (checkout / file).open("a") as changed:
        changed.write("# changed\n")
    second = site.install(checkout, tmp_path / "site")
    assert second != first
    assert (first / "vllm_ext" / "__pycache__").exists()
    assert sorted((tmp_path / "site").iterdir()) == sorted([first, second])
    if file != "pyproject.toml":
        assert (second / "vllm_ext" / file.removeprefix("vllm_ext/")).read_text().endswith("# changed\n")


def test_of_two_that_lay_out_the_same_at_once_the_first_stays(site: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "site" / "made"
    with site.made_at_once(folder) as mine:
        (mine / "mine").touch()
        with site.made_at_once(folder) as other:
            (other / "other").touch()
    assert [path.name for path in folder.iterdir()] == ["other"]
    assert list(folder.parent.iterdir()) == [folder]


def test_where_python_looked_before_it_looks_last(
    site: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environment = site.lay_out(pack(tmp_path), ROOT, tmp_path / "site")
    assert seen(environment, '__import__("mine").__file__') == str(tmp_path / "mine.py")
    assert environment["PYTHONPATH"].split(":")[3:] == [str(tmp_path)]
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    assert site.lay_out(pack(tmp_path), ROOT, tmp_path / "site")["PYTHONPATH"] == environment["PYTHONPATH"]


def test_where_all_is_installed_nothing_is_laid_out(site: ModuleType, tmp_path: Path) -> None:
    environment = site.lay_out(None, ROOT, tmp_path / "site")
    assert environment == dict(site.ENGINE)
    assert "PYTHONPATH" not in environment
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize("harm", ["gone", "cut off", "a byte", "no archive", "a folder"])
def test_a_bundle_that_is_damaged_is_one_line_and_leaves_nothing(
    site: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    packed, folder = pack(tmp_path), tmp_path / "site"
    data = packed.read_bytes()
    packed.unlink()
    if harm == "a folder":
        packed.mkdir()
    elif harm != "gone":
        middle = len(data) // 2
        harmed = {
            "cut off": data[:middle],
            "a byte": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "no archive": b"x" * 100,
        }
        packed.write_bytes(harmed[harm])
    assert site.main([str(packed), "--folder", str(folder)]) == 3
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith(f"gpu-site: error: bundle={packed}: ")
    assert list(folder.glob("*")) == []


def test_the_command_prints_what_a_shell_evaluates(
    site: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, folder = pack(tmp_path), tmp_path / "it's here"
    assert site.main([str(packed), "--folder", str(folder)]) == 0
    script = f"{capsys.readouterr().out}\nenv -0"
    done = subprocess.run(["sh", "-c", script], env={}, capture_output=True, text=True, check=True)
    environment = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    assert site.lay_out(packed, ROOT, folder).items() <= environment.items()
