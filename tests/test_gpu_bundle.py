"""vLLM for a bare machine with a GPU: what is packed, when, and what is refused; of wheels that are made here."""

from __future__ import annotations

import importlib
import os
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.fat_binaries import CODE, HOPPER, MALFORMED


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    return importlib.import_module("gpu_bundle")


@pytest.mark.parametrize(
    ("name", "carried"),
    [
        ("vllm/engine/arg_utils.py", True),
        ("vllm/_C_stable_libtorch.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", False),
        ("vllm/third_party/deep_gemm/__init__.py", False),
        ("vllm/vllm-rs", False),
        ("vllm-0.32.0.dist-info/entry_points.txt", True),
        ("vllm-0.32.0.dist-info/RECORD", False),
        ("msgspec/_core.cpython-312-x86_64-linux-gnu.so", True),
        ("msgspec/tests/test_common.py", False),
        ("tests/test_common.py", False),
        ("msgspec/__init__.pyi", False),
        ("oss_harmony-0.0.11.data/scripts/tool", False),
    ],
)
def test_what_is_carried_of_wheels(bundle: ModuleType, name: str, carried: bool) -> None:
    assert bundle.is_carried(name) is carried


class Index:
    """Stands for pip: gives a wheel of vLLM and one of a package that it needs, made here."""

    def __init__(self, compiled: Sequence[str]) -> None:
        self.files = {
            **dict.fromkeys(compiled, HOPPER),
            "vllm/__init__.py": b"x = 1\n",
            "vllm/a.hpp": b"",
            "need.py": b"",
        }
        self.calls = 0

    def __call__(self, folder: Path, python: str) -> None:
        self.calls += 1
        folder.mkdir()
        with zipfile.ZipFile(folder / "all-1-py3-none-any.whl", "w") as wheel:
            for name, data in self.files.items():
                wheel.writestr(name, data)


@pytest.fixture
def index(bundle: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Index:
    index = Index(bundle.COMPILED)
    pins = tmp_path / "pins.txt"
    pins.write_text("# of tests\nvllm==1\nneed==1\n")
    monkeypatch.setattr(bundle, "download", index)
    monkeypatch.setattr(bundle, "PINS", (pins,))
    return index


@pytest.fixture
def build(bundle: ModuleType, index: Index, tmp_path: Path) -> Callable[..., bool]:
    def build(**target: Any) -> bool:
        return bool(
            bundle.build(
                tmp_path / "out", bundle.Target(**{"architecture": 90, "python": "3.12", "limit_mib": 1.0, **target})
            )
        )

    return build


def test_the_bundle_holds_thinned_modules_and_nothing_else(
    bundle: ModuleType, build: Callable[..., bool], tmp_path: Path
) -> None:
    assert build()
    with tarfile.open(tmp_path / "out" / bundle.BUNDLE) as tar:
        held = {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
    assert held.keys() == {*bundle.COMPILED, "vllm/__init__.py", "need.py"}
    assert all(held[name].count(CODE) == 1 for name in bundle.COMPILED), "of three entries, one is for Hopper"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {bundle.BUNDLE, bundle.STAMP}


def test_a_second_run_does_nothing_until_something_changes(
    bundle: ModuleType, build: Callable[..., bool], index: Index, tmp_path: Path
) -> None:
    assert build()
    assert not build()
    assert index.calls == 1
    assert build(architecture=80)
    bundle.PINS[0].write_text("vllm==2\n")
    assert build(architecture=80)
    packed = tmp_path / "out" / bundle.BUNDLE
    packed.write_bytes(packed.read_bytes()[:-1])
    assert build(architecture=80)
    assert index.calls == 4


def test_the_same_wheels_give_the_same_bytes(bundle: ModuleType, build: Callable[..., bool], tmp_path: Path) -> None:
    packed = tmp_path / "out" / bundle.BUNDLE
    build()
    first = packed.read_bytes()
    packed.unlink()
    build()
    assert packed.read_bytes() == first


@pytest.mark.parametrize("failure", ["too large", "malformed", "a module is gone", "interrupted"])
def test_a_run_that_fails_leaves_the_bundle_before_it(
    bundle: ModuleType,
    build: Callable[..., bool],
    index: Index,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: str,
) -> None:
    build()
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    limit = 1.0
    raised: type[BaseException] = bundle.BundleError
    if failure == "too large":
        limit, message = 1e-4, r"must be at most --limit-mib 0.0001; the largest parts: \S+ about"
    elif failure == "malformed":
        index.files[bundle.COMPILED[0]], message = MALFORMED["no magic"]
        message = f"{bundle.COMPILED[0]}: {message}"
    elif failure == "a module is gone":
        del index.files[bundle.COMPILED[1]]
        message = f"no {bundle.COMPILED[1]}"
    else:
        raised, message = KeyboardInterrupt, ""
        monkeypatch.setattr(bundle, "pack", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(raised, match=message) as caught:
        build(limit_mib=limit, python="3.13")
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_refusal_names_the_largest_part_first(bundle: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "large.so").write_bytes(os.urandom(3000))
    (tmp_path / "need.py").write_bytes(os.urandom(2000))
    assert [name for name, _ in bundle.largest(tmp_path)] == ["vllm/large.so", "need.py"]


def test_requirements_are_pinned(bundle: ModuleType, index: Index) -> None:
    assert bundle.requirements() == ["vllm==1", "need==1"]
    bundle.PINS[0].write_text("vllm>=1\n")
    with pytest.raises(bundle.BundleError, match=r"requirement 'vllm>=1': must be NAME==VERSION"):
        bundle.requirements()


def test_the_projects_own_pins_are_read(bundle: ModuleType) -> None:
    names = [pin.partition("==")[0] for pin in bundle.requirements()]
    assert names[0] == "vllm"
    assert len(names) == len(set(names)) > 20


def test_what_pip_says_last_is_the_error(bundle: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho first >&2; echo 'No module named pip' >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(bundle.sys, "executable", str(python))
    with pytest.raises(bundle.BundleError, match=r"^pip download exited with status 1: No module named pip$"):
        bundle.download(tmp_path / "wheels", "3.12")


def test_the_command_says_where_the_bundle_is_or_why_there_is_none(
    bundle: ModuleType, index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert bundle.main([out]) == 0
    assert bundle.main([out]) == 0
    assert capsys.readouterr().err.endswith(f"gpu-bundle: {out}/{bundle.BUNDLE}: 0.0 MiB, up to date\n")
    assert bundle.main([out, "--limit-mib", "0"]) == 3
    assert "gpu-bundle: error: " in capsys.readouterr().err.splitlines()[-1]
