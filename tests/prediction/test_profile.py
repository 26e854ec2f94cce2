"""Profiles on disk: written whole, read strictly, damaged ones set aside, missing ones named."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_ext.config import ConfigError
from vllm_ext.prediction import profile as module
from vllm_ext.prediction.profile import AUTO, Profile, default_path, load, load_runtime_model, save
from vllm_ext.prediction.runtime import RuntimeModel

PROFILE = Profile(
    model="org/model",
    device="Some GPU",
    vllm_version="0.32.0",
    coefficients=(1e-3, 2e-5, 3e-5, 4e-8, 5e-10),
    num_steps=100,
    median_error=0.02,
    p90_error=0.1,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(module, "cache_dir", lambda: folder)
    return folder


def test_a_saved_profile_is_loaded_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "p.json"
    save(PROFILE, path)
    assert load(path) == PROFILE
    save(replace(PROFILE, num_steps=200), path)
    assert load(path).num_steps == 200
    assert [p.name for p in path.parent.iterdir()] == ["p.json"], "no temporary file stays behind"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save(PROFILE, path)
    with pytest.raises(TypeError):
        save(replace(PROFILE, model=object()), path)  # type: ignore[arg-type]
    assert load(path) == PROFILE
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def _text(**changes: object) -> str:
    fields = {"format": 1, **vars(PROFILE), **changes}
    return json.dumps({k: v for k, v in fields.items() if v is not ...})


DAMAGED = {
    "empty": "",
    "cut off": _text()[:40],
    "not an object": "[1, 2]",
    "another format": _text(format=2),
    "no format": _text(format=...),
    "unknown field": _text(more=1),
    "missing field": _text(num_steps=...),
    "missing coefficients": _text(coefficients=...),
    "too few coefficients": _text(coefficients=[1.0]),
    "no coefficients": _text(coefficients=None),
    "text coefficients": _text(coefficients=["a", "b", "c", "d", "e"]),
    "endless coefficient": _text(coefficients=[float("inf"), 0, 0, 0, 0]),
    "nested coefficients": _text(coefficients=[[1], [2, 3], 1, 1, 1]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_a_value_error_to_load(name: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(DAMAGED[name])
    with pytest.raises(ValueError, match=r"."):
        load(path)


def test_a_damaged_automatic_profile_is_set_aside_and_defaults_serve() -> None:
    path = default_path("m", "d")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe{")
    model = load_runtime_model(AUTO, "m", "d")
    assert model.coefficients == RuntimeModel().coefficients
    assert not path.exists()
    assert path.with_name(path.name + ".damaged").read_bytes() == b"\xff\xfe{"
    load_runtime_model(AUTO, "m", "d")


def test_a_file_of_somebody_else_is_not_moved(tmp_path: Path) -> None:
    """``--ext-profile`` pointed at the model's config.json by mistake must not take it away from the model."""
    path = tmp_path / "config.json"
    path.write_text('{"architectures": ["LlamaForCausalLM"]}')
    with contextlib.suppress(ConfigError):  # refusing it is as good as starting from defaults
        load_runtime_model(str(path))
    assert path.exists()


def test_a_damaged_file_that_can_t_be_moved_does_not_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only folder, or a second engine core that was quicker."""
    path = default_path("m", "d")
    path.parent.mkdir(parents=True)
    path.write_text("{")

    def refuse(source: object, target: object) -> None:
        raise FileNotFoundError(str(source))

    monkeypatch.setattr(module.os, "replace", refuse)
    assert load_runtime_model(AUTO, "m", "d").coefficients == RuntimeModel().coefficients


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_named_file_that_can_t_be_read_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    if kind == "folder":
        path.mkdir()
    with pytest.raises(ConfigError, match="vllm-ext profile") as caught:
        load_runtime_model(str(path))
    assert (caught.value.field, caught.value.value) == ("profile", str(path))


def test_auto_takes_the_profile_of_this_model_on_this_device() -> None:
    assert load_runtime_model(AUTO, "org/model", "Some GPU").coefficients == RuntimeModel().coefficients
    save(PROFILE, default_path("org/model", "Some GPU"))
    assert load_runtime_model(AUTO, "org/model", "Some GPU").coefficients == pytest.approx(PROFILE.coefficients)
    assert load_runtime_model(AUTO, "org/model", "Other GPU").coefficients == RuntimeModel().coefficients


def test_without_an_option_the_defaults_serve() -> None:
    assert load_runtime_model(None).num_observations == 0


@pytest.mark.parametrize("model", ["org/model", "/models/llama", "../../etc", "x" * 500, "ü ö/?:*"])
def test_default_paths_stay_in_the_cache_and_are_legal_names(model: str, cache: Path) -> None:
    path = default_path(model, "Device / 0")
    assert path.parent == cache / "profiles"
    assert len(path.name) <= 255
    assert path.suffix == ".json"


def test_default_paths_of_two_models_differ() -> None:
    assert default_path("a" * 300 + "1", "d") != default_path("a" * 300 + "2", "d")
    assert default_path("m", "d1") != default_path("m", "d2")
