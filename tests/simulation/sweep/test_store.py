"""Finished points on disk."""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_ext.simulation.spec import SimulationSpec, with_values
from vllm_ext.simulation.sweep import store as store_module
from vllm_ext.simulation.sweep.sources import checksums, decisive_files
from vllm_ext.simulation.sweep.store import NAME, Outcome, PointStore, StoreError

SPEC = SimulationSpec()
DONE = {"latency_ms": 1.5}
TRACES = ("{}", "another")
MODELS = tuple(
    json.dumps(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "vocab_size": 512,
            "max_position_embeddings": 256,
            "torch_dtype": "bfloat16",
        }
    )
    for layers in (2, 3)
)


def key(spec: SimulationSpec, folder: Path) -> str:
    return PointStore(folder).key(spec)


def stored(folder: Path) -> Path:
    with PointStore(folder) as store:
        store.save(store.key(SPEC), SPEC, Outcome(metrics=DONE))
    return folder / NAME


def test_outcome_is_found_again_with_what_was_run(tmp_path: Path) -> None:
    file = stored(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [NAME]
    with PointStore(tmp_path) as store:
        assert store.load(store.key(SPEC)) == Outcome(metrics=DONE)
    (row,) = sqlite3.connect(file).execute("select spec from points").fetchall()
    assert SimulationSpec.model_validate_json(row[0]) == SPEC


def test_outcome_counts_as_long_as_no_module_that_was_imported_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome(metrics=DONE, modules=("systems/alise.py", "simulation/run.py"))
    with PointStore(tmp_path) as store:
        store.save(key := store.key(SPEC), SPEC, outcome)
        for name, found in {"systems/pensieve.py": outcome, "systems/alise.py": None}.items():
            monkeypatch.setattr(
                store_module, "_sources", lambda name=name: {**checksums(decisive_files()), name: "changed"}
            )
            store_module._digest.cache_clear()
            assert store.load(key) == found
            monkeypatch.undo()
        store_module._digest.cache_clear()
        kept = store.load(key)
    assert kept is not None
    assert kept.modules == outcome.modules


def test_two_processes_may_write_at_a_time(tmp_path: Path) -> None:
    """Two connections: what one wrote the other finds."""
    other = with_values(SPEC, {"workload.seed": 1})
    with PointStore(tmp_path) as one, PointStore(tmp_path) as two:
        one.save(one.key(SPEC), SPEC, Outcome(metrics=DONE))
        two.save(two.key(other), other, Outcome(metrics=DONE))
        assert one.load(one.key(other)) == two.load(two.key(SPEC)) == Outcome(metrics=DONE)


def test_key_depends_on_every_field_and_on_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [{"seed": 1, "prediction": {"window": 5}}, {"prediction": {"window": 5}, "seed": 1}]
    changes = ({}, {"workload.seed": 1}, {"engine.watermark": 0.1}, *({"engine.options": order} for order in options))
    keys = {key(with_values(SPEC, change), tmp_path) for change in changes}
    for name in ("vllm-ext", "vllm"):
        changed = {**store_module.versions(), name: "other"}
        monkeypatch.setattr(store_module, "versions", lambda changed=changed: changed)
        keys.add(key(SPEC, tmp_path))
    assert len(keys) == 6, "the order of options does not matter"


@pytest.mark.parametrize(
    ("field", "file", "named", "texts"),
    [
        ("workload.source", "trace.jsonl", "trace.jsonl", TRACES),
        ("hardware.model", "config.json", "config.json", MODELS),
        ("hardware.model", "config.json", ".", MODELS),
    ],
    ids=["trace", "model's config.json", "model's folder"],
)
def test_key_depends_on_the_content_of_the_files_that_are_named(
    tmp_path: Path, field: str, file: str, named: str, texts: tuple[str, ...]
) -> None:
    data = tmp_path / file
    keys = []
    for text in (*texts, texts[0]):
        data.write_text(text)
        keys.append(key(with_values(SPEC, {field: str(tmp_path / named)}), tmp_path / "store"))
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("edited", ["own_policies.py", "helper.py", "deep/inner.py"])
@pytest.mark.parametrize(
    "options",
    [lambda folder: {"modules": ["own_policies"]}, lambda folder: {"policies": [f"{folder}/own_policies.py:Mine"]}],
    ids=["modules", "policies"],
)
def test_key_depends_on_the_policies_that_are_named_and_what_they_import_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Callable[[Path], dict[str, object]], edited: str
) -> None:
    (tmp_path / "own_policies.py").write_text("import json\nfrom helper import x\n")
    (tmp_path / "helper.py").write_text("def f():\n    import deep.inner\nx = 1\n")
    (tmp_path / "stranger.py").write_text("x = 1\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "inner.py").write_text("y = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_policies", raising=False)
    spec = with_values(SPEC, {"engine.options": options(tmp_path)})
    before = key(spec, tmp_path / "store")
    (tmp_path / "stranger.py").write_text("x = 2\n")
    assert key(spec, tmp_path / "store") == before
    file = tmp_path / edited
    file.write_text(f"{file.read_text()}z = 2\n")
    assert key(spec, tmp_path / "store") != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"no database at all" * 100,
        lambda raw: raw[:100],
        lambda raw: raw.replace(b", metrics, modules", b", metrixx, modules"),
    ],
    ids=["cut off", "another file", "a header only", "another table"],
)
def test_damaged_file_is_reported_set_aside_and_made_anew(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    file = stored(tmp_path)
    damaged = damage(file.read_bytes())
    file.write_bytes(damaged)
    with caplog.at_level(logging.WARNING), PointStore(tmp_path) as store:
        assert store.load(store.key(SPEC)) is None
        store.save(store.key(SPEC), SPEC, Outcome(metrics=DONE))
    assert file.with_name(f"{NAME}.damaged-1").read_bytes() == damaged
    assert NAME in caplog.text
    with PointStore(tmp_path) as store:
        assert store.load(store.key(SPEC)) == Outcome(metrics=DONE)


def test_metric_that_is_no_number_is_never_stored(tmp_path: Path) -> None:
    with PointStore(tmp_path) as store:
        with pytest.raises(ValueError, match="JSON compliant"):
            store.save(store.key(SPEC), SPEC, Outcome(metrics={"latency_ms": float("nan")}))
        assert store.load(store.key(SPEC)) is None


def test_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(StoreError, match=NAME), PointStore(tmp_path):
        pytest.fail("a folder is no file")
