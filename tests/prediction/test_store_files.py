"""Vector stores on disk: read as they were written, damage reported and set aside, merged without repeats."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_ext.prediction import store_generation
from vllm_ext.prediction.store_files import read, save
from vllm_ext.prediction.vector_store import VectorStore

from .store_parts import DIM, contents, generation, load_enc, make_store, random_units


@pytest.mark.parametrize("count", [0, 1, 300])
def test_a_saved_store_is_loaded_as_it_was(tmp_path: Path, count: int) -> None:
    store = make_store(count)
    assert save(store, tmp_path / "deep" / "store") == count
    assert contents(load_enc(tmp_path / "deep" / "store")) == contents(store)


def test_a_missing_store_is_an_empty_one_and_nothing_to_warn_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(load_enc(tmp_path / "none")) == 0
    assert not caplog.records
    assert not list(tmp_path.iterdir())


def test_equal_stores_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(make_store(20), tmp_path / name)
    for file in ("entries.npz", "metadata.json"):
        assert (generation(tmp_path / "a") / file).read_bytes() == (generation(tmp_path / "b") / file).read_bytes()


def test_a_second_save_replaces_the_first_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    for count in (5, 3):
        save(make_store(count), tmp_path)
    assert len(load_enc(tmp_path)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["CURRENT", ".lock", generation(tmp_path).name])


def test_a_smaller_store_takes_what_was_inserted_last(tmp_path: Path) -> None:
    save(make_store(10), tmp_path)
    assert load_enc(tmp_path, capacity=4).entries().lengths.tolist() == [7, 8, 9, 10]


def test_prompts_are_in_the_files_only_if_they_are_to_be_kept(tmp_path: Path) -> None:
    save(make_store(3), tmp_path / "private")
    save(make_store(3, keep_prompts=True), tmp_path / "keeping")
    files = [path for path in (tmp_path / "private").rglob("*") if path.is_file()]
    assert files
    assert not any(b"prompt " in path.read_bytes() for path in files)
    assert load_enc(tmp_path / "keeping").entries().prompts is None
    kept = load_enc(tmp_path / "keeping", keep_prompts=True).entries()
    assert kept.prompts == ("prompt 0", "prompt 1", "prompt 2")


def test_any_text_survives_as_model_and_prompt(tmp_path: Path) -> None:
    store = VectorStore(DIM, encoder="enc", keep_prompts=True)
    texts = ["", "\x00", "\ud800", "日本語", '"\\\n']
    store.add(random_units(5, DIM), [1] * 5, texts, prompts=texts)
    save(store, tmp_path)
    entries = load_enc(tmp_path, keep_prompts=True).entries()
    assert entries.models == entries.prompts == tuple(texts)


@settings(max_examples=25, deadline=None)
@given(count=st.integers(0, 60), max_bytes=st.integers(4096, 9000), keep=st.booleans())
def test_a_save_keeps_the_newest_entries_that_fit_the_size_cap(count: int, max_bytes: int, keep: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        written = save(make_store(count, keep_prompts=keep), Path(folder), max_bytes=max_bytes)
        sizes = [path.stat().st_size for path in generation(Path(folder)).iterdir()]
        lengths = load_enc(Path(folder)).entries().lengths.tolist()
    assert sum(sizes) <= max_bytes
    assert lengths == list(range(count - written + 1, count + 1))
    assert written == count or sum(sizes) > max_bytes - 4096 - 200


@pytest.mark.parametrize(("long_ones", "written"), [((0,), 2), ((0, 1), 1), ((0, 2), 0)])
def test_names_of_models_count_for_the_size_cap_if_they_are_written(
    tmp_path: Path, long_ones: tuple[int, ...], written: int
) -> None:
    """One long name among the oldest entries once left no room for any."""
    store = VectorStore(DIM, encoder="enc")
    models = ["x" * 5000 if number in long_ones else "m" for number in range(3)]
    store.add(random_units(3, DIM), [1, 2, 3], models)
    assert save(store, tmp_path, max_bytes=5000) == written
    assert load_enc(tmp_path).entries().models == ("m",) * written
    assert sum(path.stat().st_size for path in generation(tmp_path).iterdir()) <= 5000


def test_a_size_cap_below_the_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes=100"):
        save(make_store(1), tmp_path, max_bytes=100)


# --- damaged and foreign ----------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)


def rewrite_metadata(folder: Path, **changes: object) -> None:
    """As another writer would: with checksums that are right."""
    path = generation(folder) / "metadata.json"
    metadata = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(metadata))
    current = json.loads((folder / "CURRENT").read_text())
    current["metadata_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "CURRENT").write_text(json.dumps(current))


def rewrite_arrays(folder: Path, **arrays: NDArray[np.generic]) -> None:
    path = generation(folder) / "entries.npz"
    with np.load(path) as archive:
        arrays = {**archive, **arrays}
    np.savez(path, allow_pickle=True, **arrays)  # type: ignore[arg-type]
    rewrite_metadata(folder, sha256={"entries.npz": hashlib.sha256(path.read_bytes()).hexdigest()})


def rewrite_bytes(folder: Path, name: str, raw: bytes) -> None:
    (generation(folder) / name).write_bytes(raw)
    sums = json.loads((generation(folder) / "metadata.json").read_text())["sha256"]
    rewrite_metadata(folder, sha256={**sums, name: hashlib.sha256(raw).hexdigest()})


def compress_otherwise(folder: Path) -> None:
    """Declare a method of compression that zipfile does not know, in the directory's last entry."""
    raw = bytearray((generation(folder) / "entries.npz").read_bytes())
    raw[raw.rfind(b"PK\x01\x02") + 10] = 99
    rewrite_bytes(folder, "entries.npz", bytes(raw))


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def into_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file")


NESTED = "[" * 200_000
DAMAGE: dict[str, Callable[[Path], object]] = {
    "entries cut": lambda folder: cut(generation(folder) / "entries.npz"),
    "entries flipped": lambda folder: flip(generation(folder) / "entries.npz"),
    "entries missing": lambda folder: (generation(folder) / "entries.npz").unlink(),
    "metadata cut": lambda folder: cut(generation(folder) / "metadata.json"),
    "metadata missing": lambda folder: (generation(folder) / "metadata.json").unlink(),
    "entries a folder": lambda folder: into_folder(generation(folder) / "entries.npz"),
    "metadata a folder": lambda folder: into_folder(generation(folder) / "metadata.json"),
    "generation a file": lambda folder: into_file(generation(folder)),
    "current a folder": lambda folder: into_folder(folder / "CURRENT"),
    "current nested": lambda folder: (folder / "CURRENT").write_text(NESTED),
    "prompts nested": lambda folder: rewrite_bytes(folder, "prompts.json", NESTED.encode()),
    "prompts a number": lambda folder: rewrite_bytes(folder, "prompts.json", b"9"),
    "another compression": compress_otherwise,
    "no width": lambda folder: rewrite_metadata(folder, dim=0),
    "an endless width": lambda folder: rewrite_metadata(folder, dim=10**30),
    "current cut": lambda folder: cut(folder / "CURRENT"),
    "current empty": lambda folder: (folder / "CURRENT").write_bytes(b""),
    "current a list": lambda folder: (folder / "CURRENT").write_text("[]"),
    "current elsewhere": lambda folder: (folder / "CURRENT").write_text(
        json.dumps({"format": store_generation.FORMAT, "generation": "../x", "metadata_sha256": ""})
    ),
    "another format": lambda folder: rewrite_metadata(folder, format="vllm-ext vector store 2"),
    "metadata without dim": lambda folder: rewrite_metadata(folder, dim=None),
    "another number of entries": lambda folder: rewrite_metadata(folder, entries=99),
    "too few names": lambda folder: rewrite_metadata(folder, models=["m0"]),
    "another encoder": lambda folder: rewrite_metadata(folder, encoder="foreign"),
    "another width": lambda folder: rewrite_metadata(folder, dim=DIM + 1),
    "not a number": lambda folder: rewrite_arrays(folder, vectors=np.full((9, DIM), np.nan, np.float32)),
    "a length of 0": lambda folder: rewrite_arrays(folder, lengths=np.zeros(9, np.int64)),
    "a length beyond all": lambda folder: rewrite_arrays(folder, lengths=np.full(9, 2**63, np.uint64)),
    "pickled objects": lambda folder: rewrite_arrays(folder, times_s=np.array([{}] * 9, object)),
    "not an archive": lambda folder: (
        np.save((generation(folder) / "entries.npz").open("wb"), np.zeros(3)),
        rewrite_metadata(
            folder,
            sha256={"entries.npz": hashlib.sha256((generation(folder) / "entries.npz").read_bytes()).hexdigest()},
        ),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_or_foreign_store_is_reported_and_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    folder = tmp_path / "store"
    for number in (1, 2):
        caplog.clear()
        save(make_store(9), folder)
        damage(folder)
        with caplog.at_level(logging.WARNING):
            store = load_enc(folder)
        assert len(store) == 0
        (record,) = caplog.records
        assert str(folder) in record.getMessage()
        assert f"store.damaged-{number}" in record.getMessage()
        assert (tmp_path / f"store.damaged-{number}" / "CURRENT").exists()
        assert not folder.exists()
    save(make_store(2), folder)
    assert len(load_enc(folder)) == 2


def test_a_file_in_the_place_of_the_folder_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "store").write_text("mine")
    assert len(load_enc(tmp_path / "store")) == 0
    assert (tmp_path / "store.damaged-1").read_text() == "mine"
    assert "must be a folder" in caplog.text


@pytest.mark.parametrize("raw", [b"[1,", NESTED.encode(), b"\xff"], ids=["cut", "nested", "no text"])
def test_a_file_of_prompts_that_is_no_json_is_named(tmp_path: Path, raw: bytes) -> None:
    save(make_store(2, keep_prompts=True), tmp_path)
    rewrite_bytes(tmp_path, "prompts.json", raw)
    with pytest.raises(ValueError, match=r"prompts\.json: damaged, not a JSON file"):
        read(tmp_path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_changed_byte_goes_unnoticed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, before = Path(place) / "store", make_store(4)
        save(before, folder)
        files = [folder / "CURRENT", *generation(folder).iterdir()]
        path = data.draw(st.sampled_from(sorted(files)), label="file")
        raw = bytearray(path.read_bytes())
        raw[data.draw(st.integers(0, len(raw) - 1), label="offset")] ^= data.draw(st.integers(1, 255), label="bits")
        path.write_bytes(raw)
        after = contents(load_enc(folder))
        same_meaning = path.name == "CURRENT" and after == contents(before)  # a blank became another blank
        assert after == contents(make_store(0)) or same_meaning
