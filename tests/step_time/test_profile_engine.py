"""Which profile an engine takes: that of its model, device, dtype and tensor-parallel size, and no other in silence."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext.config import ConfigError
from vllm_ext.step_time.profile import (
    AUTO,
    FORMAT,
    EngineKey,
    OtherFormat,
    default_path,
    engine_key,
    hardware_name,
    load,
    load_runtime_model,
    save,
)
from vllm_ext.step_time.runtime import DEFAULT

from .profile_parts import KEY, PROFILE, Told, cache, told

__all__ = ["cache", "told"]


def test_auto_takes_the_profile_of_this_engine() -> None:
    save(PROFILE, default_path(KEY))
    assert load_runtime_model(AUTO, KEY).coefficients == PROFILE.coefficients


@pytest.mark.parametrize(
    ("field", "value"), [("model", "org/other"), ("device", "GPU 2"), ("dtype", "float16"), ("tensor_parallel_size", 4)]
)
def test_auto_does_not_take_the_profile_of_another_engine(field: str, value: Any, told: Told) -> None:
    save(PROFILE, default_path(KEY))
    assert load_runtime_model(AUTO, KEY._replace(**{field: value})).coefficients == DEFAULT
    (note,) = told(logging.INFO)
    assert "no runtime profile of" in note


def test_auto_reports_and_ignores_a_file_that_was_copied_from_another_engine(told: Told) -> None:
    path = default_path(KEY)
    save(replace(PROFILE, dtype="float16", device="Other GPU"), path)
    assert load_runtime_model(AUTO, KEY).coefficients == DEFAULT
    (warning,) = told(logging.WARNING)
    assert "is ignored" in warning
    assert "device: the profile is of 'Other GPU', the engine has 'Some GPU'" in warning
    assert "dtype: the profile is of 'float16', the engine has 'bfloat16'" in warning
    assert path.exists(), "it is whole, so it stays"


@pytest.mark.parametrize("number", [1, FORMAT + 1])
def test_auto_reports_and_ignores_a_file_of_another_format(number: int, told: Told) -> None:
    path = default_path(KEY)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"format": number, "model": "org/model", "coefficients": [1, 1, 1, 1, 1]}))
    assert load_runtime_model(AUTO, KEY).coefficients == DEFAULT
    (warning,) = told(logging.WARNING)
    assert f"has format {number}, this version reads {FORMAT}: run `vllm-ext profile` again" in warning
    assert path.exists()


def test_a_named_file_of_another_engine_is_used_with_one_warning(tmp_path: Path, told: Told) -> None:
    path = tmp_path / "p.json"
    save(PROFILE, path)
    model = load_runtime_model(str(path), EngineKey("org/model", "Some GPU", "float16", 4))
    assert model.coefficients == PROFILE.coefficients
    (warning,) = told(logging.WARNING)
    assert "dtype: the profile is of 'bfloat16', the engine has 'float16'" in warning
    assert "tensor_parallel_size: the profile is of 2, the engine has 4" in warning
    assert "model:" not in warning


def test_a_named_file_of_this_engine_is_used_without_a_word(tmp_path: Path, told: Told) -> None:
    path = tmp_path / "p.json"
    save(PROFILE, path)
    assert load_runtime_model(str(path), KEY).coefficients == PROFILE.coefficients
    assert told(logging.WARNING) == []


def test_a_named_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"format": 1}')
    with pytest.raises(OtherFormat):
        load(path)
    with pytest.raises(ConfigError, match=r"has format 1, this version reads 3: run `vllm-ext profile` again"):
        load_runtime_model(str(path))


def test_without_an_option_the_defaults_serve() -> None:
    assert load_runtime_model(None).coefficients == DEFAULT


def test_the_key_is_read_from_vllm_s_configuration() -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="org/model", dtype="torch.bfloat16"),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
    )
    assert engine_key(config, "Some GPU") == KEY
    assert engine_key(config, "cpu").device == hardware_name("cpu")


@pytest.mark.parametrize("model", ["org/model", "/models/llama", "../../etc", "x" * 500, "ü ö/?:*"])
def test_default_paths_stay_in_the_cache_and_are_legal_names(model: str, cache: Path) -> None:
    path = default_path(EngineKey(model, "Device / 0", "float16", 8))
    assert path.parent == cache / "profiles"
    assert len(path.name) <= 255
    assert path.suffix == ".json"


def test_default_paths_of_two_engines_differ() -> None:
    keys = [KEY, *(KEY._replace(**{name: 7}) for name in KEY._fields if name == "tensor_parallel_size")]
    keys += [KEY._replace(**{name: "other"}) for name in ("model", "device", "dtype")]
    keys += [KEY._replace(model="org-model"), KEY._replace(model="a" * 300 + "1"), KEY._replace(model="a" * 300 + "2")]
    assert len({default_path(key) for key in keys}) == len(keys)
