"""Who may read a vector store: its owner, whatever the umask is; and what missing permissions cost."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ext.prediction.store_files import merge, read, save

from .store_parts import contents, generation, load_enc, make_store


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(folder: Path) -> set[tuple[str, int]]:
    """Kinds of everything in a folder, with their permissions."""
    return {("folder" if path.is_dir() else "file", mode(path)) for path in (folder, *folder.rglob("*"))}


def test_files_and_folders_are_their_owners_only(tmp_path: Path) -> None:
    for count in (3, 4):
        save(make_store(count, keep_prompts=True), tmp_path / "deep" / "store")
        assert modes(tmp_path / "deep" / "store") == {("folder", 0o700), ("file", 0o600)}
    assert len(list((tmp_path / "deep" / "store").rglob("*"))) == 6


def test_a_store_that_others_could_read_works_and_is_theirs_no_more_with_the_next_save(tmp_path: Path) -> None:
    save(make_store(3), tmp_path)
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert len(load_enc(tmp_path)) == 3
    save(make_store(4), tmp_path)
    (tmp_path / ".lock").unlink()  # it is empty, and stays as it is
    assert modes(tmp_path) == {("folder", 0o700), ("file", 0o600)}
    assert contents(load_enc(tmp_path)) == contents(make_store(4))


def test_permissions_are_never_added_and_a_place_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    for name, before in (("shared", 0o1777), ("store", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(before)
    save(make_store(1), tmp_path / "shared")
    assert mode(tmp_path / "shared") == 0o1777
    assert mode(generation(tmp_path / "shared")) == 0o700
    save(make_store(1), tmp_path / "store")
    (tmp_path / "store").chmod(0o550)
    with contextlib.suppress(PermissionError):  # root may
        save(make_store(1), tmp_path / "store")
    assert mode(tmp_path / "store") == 0o500


def test_a_place_without_permissions_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mounted share refuses them."""
    save(make_store(1), tmp_path)
    tmp_path.chmod(0o755)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(os, "fchmod", refuse)
    save(make_store(2), tmp_path)
    assert len(load_enc(tmp_path)) == 2
    assert mode(tmp_path) == 0o755


@pytest.mark.parametrize("name", ["CURRENT", "metadata.json", "entries.npz"])
def test_a_store_that_may_not_be_read_is_an_error_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Only damage is set aside. The refusal is made up: root may read everything."""
    save(make_store(3), tmp_path / "store")
    real = Path.open

    def refuse(self: Path, *args: object, **options: object) -> object:
        if self.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **options)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        patch.setattr(Path, "read_bytes", lambda self: self.open("rb").read())
        for use in (load_enc, read, lambda folder: merge([folder])):
            with pytest.raises(PermissionError, match=name):
                use(tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert len(load_enc(tmp_path / "store")) == 3
