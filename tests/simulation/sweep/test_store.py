"""Finished points on disk."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep import store as store_module
from vllm_ext.simulation.sweep.paths import with_values
from vllm_ext.simulation.sweep.store import Outcome, PointStore, StoreError

SPEC = SimulationSpec()
DONE = Outcome(metrics={"latency_ms": 1.5})


def stored(folder: Path, outcome: Outcome = DONE) -> Path:
    store = PointStore(folder)
    store.save(store.key(SPEC), SPEC, outcome)
    (file,) = (folder / "points").iterdir()
    return file


@pytest.mark.parametrize("outcome", [DONE, Outcome(error="ValueError: no")], ids=["done", "failed"])
def test_outcome_is_found_again(tmp_path: Path, outcome: Outcome) -> None:
    stored(tmp_path, outcome)
    store = PointStore(tmp_path)
    assert store.load(store.key(SPEC)) == outcome


def test_file_states_what_was_run(tmp_path: Path) -> None:
    content = json.loads(stored(tmp_path).read_text())
    assert SimulationSpec.model_validate(content["spec"]) == SPEC
    assert set(content["versions"]) == {"vllm-ext", "vllm"}


def test_unknown_point_is_not_there(tmp_path: Path) -> None:
    store = PointStore(tmp_path / "none")
    assert store.load(store.key(SPEC)) is None


def test_key_depends_on_every_field_and_on_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PointStore(tmp_path)
    keys = {store.key(with_values(SPEC, change)) for change in ({}, {"workload.seed": 1}, {"engine.watermark": 0.1})}
    monkeypatch.setattr(store_module, "versions", lambda: {"vllm-ext": "other"})
    keys.add(PointStore(tmp_path).key(SPEC))
    assert len(keys) == 4


def test_key_depends_on_the_content_of_the_files_that_are_named(tmp_path: Path) -> None:
    data = tmp_path / "trace.jsonl"
    spec = with_values(SPEC, {"workload.source": str(data)})
    store = PointStore(tmp_path)
    keys = []
    for text in ("one", "another"):
        data.write_text(text)
        keys.append(store.key(spec))
    assert keys[0] != keys[1]
    data.write_text("one")
    assert PointStore(tmp_path).key(spec) == keys[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("1.5", "2.5"),
        lambda text: text.replace('"spec"', '"sepc"'),
    ],
    ids=["cut off", "empty", "no object", "another number", "another name"],
)
def test_damaged_file_is_reported_and_set_aside(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(damage)
    file = stored(tmp_path)
    file.write_text(damage(file.read_text()))
    store = PointStore(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert store.load(store.key(SPEC)) is None
    aside = file.with_name(f"{file.name}.damaged")
    assert (aside.exists(), file.exists()) == (True, False)
    assert store.damaged == [aside]
    assert file.name in caplog.text


def test_file_under_another_points_name_is_damaged(tmp_path: Path) -> None:
    file = stored(tmp_path)
    other = with_values(SPEC, {"workload.seed": 1})
    store = PointStore(tmp_path)
    file.rename(file.with_name(f"{store.key(other)}.json"))
    assert store.load(store.key(other)) is None
    assert len(store.damaged) == 1


def test_metric_that_is_no_number_is_never_stored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        stored(tmp_path, Outcome(metrics={"latency_ms": float("nan")}))
    assert list(tmp_path.rglob("*.json")) == []


def test_sweeps_of_other_names_may_share_a_folder(tmp_path: Path) -> None:
    with PointStore(tmp_path).locked("a"), PointStore(tmp_path).locked("b"):
        with pytest.raises(StoreError, match=r"^b: another"), PointStore(tmp_path).locked("b"):
            pytest.fail("two sweeps of one name")
        assert PointStore(tmp_path).load("nothing") is None


def test_second_sweep_in_the_folder_is_refused(tmp_path: Path) -> None:
    with (
        PointStore(tmp_path).locked(),
        pytest.raises(StoreError, match="another sweep is at work"),
        PointStore(tmp_path).locked(),
    ):
        pytest.fail("two sweeps in one folder")
    with PointStore(tmp_path).locked():
        assert tmp_path.is_dir()
