"""What is said of a predictor's folder: facts by hand, and every damage with its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_ext.prediction import decoder_file, store_files
from vllm_ext.prediction.folder import DECODER, STORE
from vllm_ext.prediction.folder_report import as_rows, describe
from vllm_ext.prediction.vector_store import VectorStore

from .folder_parts import make_decoder
from .store_parts import DIM, generation, random_units


def write(folder: Path, *, times: bool = True) -> None:
    store = VectorStore(DIM, encoder="enc", keep_prompts=True)
    vectors = random_units(4, DIM)[[0, 1, 2, 3, 3]]
    when = [0.0, 86400.0, 2 * 86400.0, 0.0, 0.0] if times else [0.0] * 5
    store.add(vectors, [10, 20, 30, 40, 100], ["a", "b", "a", "a", ""], when, prompts=["x"] * 5)
    store_files.save(store, folder / STORE)
    decoder_file.save(make_decoder(), folder / DECODER)


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_facts_by_hand(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "store.damaged-1").mkdir()
    before = snapshot(tmp_path)
    report = describe(tmp_path)
    store, decoder = report.store, report.decoder
    assert store is not None
    assert decoder is not None
    assert (store.entries, store.different_prompts, store.dim, store.encoder) == (5, 4, DIM, "enc")
    assert store.models == {"a": 3, "": 1, "b": 1}
    assert store.lengths == {
        "min": 10,
        "p10": 14,
        "p50": 30,
        "p90": 76,
        "p99": pytest.approx(97.6),
        "max": 100,
        "mean": 40,
    }
    assert (store.first_s, store.last_s, store.without_time, store.keeps_prompts) == (86400.0, 172800.0, 3, True)
    assert decoder.spec["encoder"] == "enc"
    assert report.size_bytes == sum(len(raw) for raw in before.values()) == store.size_bytes + decoder.size_bytes
    assert (report.problems, report.set_aside) == ((), ("store.damaged-1",))
    assert json.loads(json.dumps(report.as_dict()))["store"]["entries"] == 5
    texts = dict(as_rows(report))
    assert texts["times"] == "1970-01-02 00:00:00 UTC to 1970-01-03 00:00:00 UTC; 3 entries without"
    assert texts["models"] == "a: 3, (no name): 1, b: 1"
    assert texts["prompts"] == "kept"
    assert texts["checksums"] == "all right"
    assert snapshot(tmp_path) == before


def test_a_store_without_entries_times_and_decoder_is_described(tmp_path: Path) -> None:
    store_files.save(VectorStore(DIM), tmp_path / STORE)
    report = describe(tmp_path)
    texts = dict(as_rows(report))
    assert (texts["output tokens"], texts["times"], texts["decoder"]) == ("-", "none", "none that can be used")
    assert report.decoder is None
    assert report.problems == ()


def test_a_time_beyond_any_calendar_is_told_in_seconds(tmp_path: Path) -> None:
    store = VectorStore(DIM)
    store.add(random_units(1, DIM), [5], times_s=[1e300])
    store_files.save(store, tmp_path / STORE)
    assert dict(as_rows(describe(tmp_path)))["times"] == "1e+300 s to 1e+300 s"


def test_a_decoder_alone_is_described(tmp_path: Path) -> None:
    decoder_file.save(make_decoder(), tmp_path / DECODER)
    report = describe(tmp_path)
    assert report.store is None
    assert report.decoder is not None
    assert report.problems == ()


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_no_predictor_is_an_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=f"{place}: holds no predictor"):
        describe(tmp_path / place)


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-5])
    return path


def another_encoder(folder: Path) -> Path:
    store_files.save(VectorStore(DIM, encoder="other"), folder / STORE)
    return folder / DECODER


def make_folder(path: Path) -> Path:
    path.unlink()
    path.mkdir()
    return path


DAMAGE: dict[str, Callable[[Path], Path]] = {
    "entries": lambda folder: cut(generation(folder / STORE) / "entries.npz"),
    "metadata": lambda folder: cut(generation(folder / STORE) / "metadata.json"),
    "prompts": lambda folder: cut(generation(folder / STORE) / "prompts.json"),
    "current": lambda folder: cut(folder / STORE / "CURRENT"),
    "decoder": lambda folder: cut(folder / DECODER),
    "decoder a folder": lambda folder: make_folder(folder / DECODER),
    "entries a folder": lambda folder: make_folder(generation(folder / STORE) / "entries.npz"),
    "decoder of another encoder": another_encoder,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_with_its_file_and_left_alone(tmp_path: Path, damage: Callable[[Path], Path]) -> None:
    write(tmp_path)
    path = damage(tmp_path)
    before = snapshot(tmp_path)
    report = describe(tmp_path)
    (problem,) = report.problems
    assert str(path) in problem
    assert dict(as_rows(report))["checksums"] == "1 problems, see below"
    assert snapshot(tmp_path) == before


def test_all_damage_is_told_at_once(tmp_path: Path) -> None:
    write(tmp_path)
    cut(tmp_path / STORE / "CURRENT")
    cut(tmp_path / DECODER)
    assert len(describe(tmp_path).problems) == 2
