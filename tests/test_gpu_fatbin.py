"""What is cleared of the device code in a shared object, and which files are refused. They are made here, and small."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.fat_binaries import CODE, ELF, MALFORMED, PTX, container, entry, shared_object


@pytest.fixture
def fatbin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    return importlib.import_module("gpu_fatbin")


@pytest.mark.parametrize(
    ("entries", "architecture", "kept"),
    [
        ([(ELF, 75), (ELF, 90), (PTX, 90), (ELF, 100)], 90, [(ELF, 90)]),
        ([(ELF, 90), (ELF, 90)], 90, [(ELF, 90), (ELF, 90)]),
        ([(ELF, 75), (ELF, 80), (ELF, 86), (PTX, 80)], 89, [(ELF, 80), (ELF, 86)]),
        ([(ELF, 80), (PTX, 80), (PTX, 89), (PTX, 100)], 90, [(PTX, 89)]),
        ([(ELF, 100), (PTX, 100)], 90, []),
    ],
    ids=["its own", "both of its own", "older ones of its generation", "newest PTX", "none"],
)
def test_of_each_container_stays_what_the_chip_runs(
    fatbin: ModuleType,
    tmp_path: Path,
    entries: list[tuple[int, int]],
    architecture: int,
    kept: list[tuple[int, int]],
) -> None:
    file = tmp_path / "module.so"
    file.write_bytes(shared_object(container(*(entry(*one) for one in entries))))
    thinned = fatbin.thin(file, architecture)
    cleared = [entry(*one, CODE + b"\0" if one in kept else bytes(len(CODE) + 1)) for one in entries]
    assert file.read_bytes() == shared_object(container(*cleared)), "headers stay, and nothing moves"
    assert sum(thinned.kept.values()) == 16 * len(kept)
    assert sum(thinned.dropped.values()) == 16 * (len(entries) - len(kept))


def test_containers_are_looked_at_one_by_one_and_padding_is_passed_over(fatbin: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "module.so"
    file.write_bytes(shared_object(container(entry(ELF, 90)) + bytes(24) + container(entry(ELF, 80)) + bytes(8)))
    thinned = fatbin.thin(file, 90)
    assert (dict(thinned.kept), dict(thinned.dropped)) == ({"sm_90": 16}, {"sm_80": 16})
    assert file.read_bytes().count(CODE) == 1


def test_a_file_without_device_code_stays_as_it_is(fatbin: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "module.so"
    file.write_bytes(shared_object(container(entry(ELF, 80)), section=b".other"))
    before = file.read_bytes()
    assert not fatbin.thin(file, 90).dropped
    assert file.read_bytes() == before


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_and_unchanged(fatbin: ModuleType, tmp_path: Path, case: str) -> None:
    data, message = MALFORMED[case]
    file = tmp_path / "module.so"
    file.write_bytes(data)
    with pytest.raises(fatbin.MalformedError, match=message):
        fatbin.thin(file, 90)
    assert file.read_bytes() == data
