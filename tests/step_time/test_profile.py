"""Profiles on disk: written whole, read strictly, damaged ones set aside, missing ones named."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.config import ConfigError
from vllm_ext.step_time import profile as module
from vllm_ext.step_time.profile import AUTO, default_path, load, load_runtime_model, save
from vllm_ext.step_time.runtime import DEFAULT, Pivot, RuntimeModel

from .profile_parts import KEY, PROFILE, Told, cache, told

__all__ = ["cache", "told"]


def test_a_saved_profile_is_loaded_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "p.json"
    save(PROFILE, path)
    assert load(path) == PROFILE
    save(replace(PROFILE, num_steps=200), path)
    assert load(path).num_steps == 200
    assert [p.name for p in path.parent.iterdir()] == ["p.json"], "no temporary file stays behind"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    save(PROFILE, path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(replace(PROFILE, num_steps=200), path)
    assert load(path) == PROFILE
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


PIVOT = replace(PROFILE, pivot_tokens=512, pivot_s=0.046, pivot_saturated=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 3),
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", True),
        ("num_steps", 1.5),
        ("median_error", -0.1),
        ("p90_error", float("nan")),
        ("coefficients", (1e-3, 2e-5, 3e-5, 4e-8, -5e-10)),
        ("coefficients", (float("inf"), 0, 0, 0, 0)),
        ("coefficients", (1.0,)),
        ("pivot_tokens", 0),
        ("pivot_tokens", 512.0),
        ("pivot_tokens", True),
        ("pivot_tokens", None),
        ("pivot_s", 0),
        ("pivot_s", float("nan")),
        ("pivot_s", float("inf")),
        ("pivot_s", None),
        ("pivot_saturated", None),
    ],
)
def test_a_profile_with_a_senseless_field_is_not_built(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        replace(PIVOT, **{field: value})


def test_the_pivot_that_was_measured_reaches_the_runtime_model(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save(PIVOT, path)
    assert load(path) == PIVOT
    assert load_runtime_model(str(path)).pivot == PIVOT.pivot == Pivot(512, 0.046)


def test_without_a_measured_pivot_the_coefficients_tell_it(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save(PROFILE, path)
    assert load(path).pivot is None
    assert load_runtime_model(str(path)).pivot == RuntimeModel(PROFILE.coefficients).pivot


def test_a_file_of_format_2_which_had_no_pivot_is_read(tmp_path: Path) -> None:
    raw = _raw(tmp_path)
    fields = {name: value for name, value in raw["profile"].items() if not name.startswith("pivot_")}
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"format": 2, "sha256": module._digest(fields), "profile": fields}))
    assert load(path) == PROFILE


def _raw(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "whole.json"
    save(PROFILE, path)
    raw: dict[str, Any] = json.loads(path.read_text())
    return raw


def _resealed(raw: dict[str, Any], **changes: Any) -> str:
    """A file whose checksum is right though its fields are not."""
    fields = {k: v for k, v in {**raw["profile"], **changes}.items() if v is not ...}
    return json.dumps({**raw, "profile": fields, "sha256": module._digest(fields)})


def _damaged(name: str, raw: dict[str, Any]) -> str:
    profile = raw["profile"]
    return {
        "empty": lambda: "",
        "cut off": lambda: json.dumps(raw)[:200],
        "not an object": lambda: "[1, 2]",
        "no format": lambda: json.dumps({k: v for k, v in raw.items() if k != "format"}),
        "a format that is no number": lambda: json.dumps({**raw, "format": "2"}),
        "no checksum": lambda: json.dumps({k: v for k, v in raw.items() if k != "sha256"}),
        "no profile": lambda: json.dumps({k: v for k, v in raw.items() if k != "profile"}),
        "a changed digit": lambda: json.dumps({**raw, "profile": {**profile, "num_steps": 101}}),
        "an unknown field": lambda: _resealed(raw, more=1),
        "a missing field": lambda: _resealed(raw, num_steps=...),
        "missing coefficients": lambda: _resealed(raw, coefficients=...),
        "a list of coefficients": lambda: _resealed(raw, coefficients=[1, 2, 3, 4, 5]),
        "a negative coefficient": lambda: _resealed(raw, coefficients={**profile["coefficients"], "pair_s": -1}),
        "a coefficient that is no number": lambda: _resealed(
            raw, coefficients={**profile["coefficients"], "pair_s": "a"}
        ),
        "an endless coefficient": lambda: _resealed(
            raw, coefficients={**profile["coefficients"], "base_s": float("inf")}
        ),
        "regimes that are none": lambda: _resealed(raw, regimes=[{"name": "decode"}]),
        "half a pivot": lambda: _resealed(raw, pivot_tokens=512),
        "no terms": lambda: _resealed(raw, terms=None),
    }[name]()


DAMAGES = (
    "empty", "cut off", "not an object", "no format", "a format that is no number", "no checksum", "no profile",
    "a changed digit", "an unknown field", "a missing field", "missing coefficients", "a list of coefficients",
    "a negative coefficient", "a coefficient that is no number", "an endless coefficient", "regimes that are none",
    "no terms", "half a pivot",
)  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_reported_set_aside_and_defaults_serve(name: str, tmp_path: Path, told: Told) -> None:
    content = _damaged(name, _raw(tmp_path))
    path = default_path(KEY)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert load_runtime_model(AUTO, KEY).coefficients == DEFAULT
    assert not path.exists()
    assert path.with_name(path.name + ".damaged-1").read_text() == content
    (warning,) = told(logging.WARNING)
    assert "the runtime profile not used" in warning
    load_runtime_model(AUTO, KEY)
    assert len(told(logging.WARNING)) == 1, "the second start finds none"


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_that_was_named_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(content := _damaged(name, _raw(tmp_path)))
    with pytest.raises(ConfigError, match="vllm-ext profile"):
        load_runtime_model(str(path), KEY)
    assert path.read_text() == content


def test_bytes_that_are_no_text_are_damage() -> None:
    path = default_path(KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe{")
    assert load_runtime_model(AUTO, KEY).coefficients == DEFAULT
    assert path.with_name(path.name + ".damaged-1").read_bytes() == b"\xff\xfe{"


def test_a_file_of_somebody_else_is_not_moved(tmp_path: Path) -> None:
    """``--ext-profile`` pointed at the model's config.json by mistake must not take it away from the model."""
    path = tmp_path / "config.json"
    path.write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match=r"config\.json is not a runtime profile"):
        load_runtime_model(str(path))
    assert path.exists()


def test_a_damaged_file_that_can_t_be_moved_does_not_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only folder, or a second engine core that was quicker."""
    path = default_path(KEY)
    path.parent.mkdir(parents=True)
    path.write_text("{")

    def refuse(source: object, target: object) -> None:
        raise FileNotFoundError(str(source))

    monkeypatch.setattr(Path, "rename", refuse)
    assert load_runtime_model(AUTO, KEY).coefficients == DEFAULT


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_named_file_that_can_t_be_read_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    if kind == "folder":
        path.mkdir()
    with pytest.raises(ConfigError, match="vllm-ext profile") as caught:
        load_runtime_model(str(path))
    assert (caught.value.field, caught.value.value) == ("profile", str(path))
