"""What names the folder on disk: everything that makes KV differ under equal hashes, or the tier is refused."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.stub import stub
from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.disk.identity import MODEL_KEY, model_facts, note_model, weights_facts


def model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def model_config(path: Path, **changed: Any) -> Any:
    known = {
        "model": str(path),
        "revision": None,
        "hf_overrides": {},
        "config_format": "auto",
        "seed": 0,
        "multimodal_config": None,
        "compute_hash": lambda: "hash of the configuration",
    }
    return stub(known, **changed)


def vllm_config(path: Path, **changed: Any) -> Any:
    known = {
        "model_config": model_config(path),
        "model_config__multimodal_config": None,
        "speculative_config": None,
        "lora_config": None,
        "parallel_config__nnodes": 1,
        "cache_config__prefix_caching_hash_algo": "sha256",
        "cache_config__cache_dtype": "auto",
        "cache_config__enable_prefix_caching": True,
        "load_config__load_format": "auto",
        "load_config__model_loader_extra_config": {},
        "attention_config__compute_hash": lambda: "attention",
        "kv_transfer_config__kv_connector_extra_config": {},
    }
    return stub(known, **changed)


def facts(config: Any) -> Any:
    note_model(config, "/disk")
    return config.kv_transfer_config.kv_connector_extra_config[MODEL_KEY]


def test_the_same_model_is_the_same_another_time(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model")
    assert facts(vllm_config(path)) == facts(vllm_config(path))


def test_other_weights_in_the_same_folder_are_another_model(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model")
    before = facts(vllm_config(path))
    (path / "model.safetensors").write_bytes(b"weighty")
    os.utime(path / "model.safetensors", (1, 1))
    assert facts(vllm_config(path)) != before


def test_the_commit_of_the_hub_tells_weights_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    found: dict[str | None, str] = {None: "/hub/snapshots/abc/config.json", "v2": "/hub/snapshots/def/config.json"}
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda name, file, revision: found.get(revision, object())
    )
    assert weights_facts("org/model", None, "/disk") == "abc"
    assert weights_facts("org/model", "v2", "/disk") == "def"
    with pytest.raises(ConfigError, match="local folder"):
        weights_facts("org/model", "v3", "/disk")


def test_a_model_that_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    before = weights_facts(str(path), None, "/disk")
    path.write_bytes(b"other weights")
    assert weights_facts(str(path), None, "/disk") != before


@pytest.mark.parametrize(
    "changed", [{"compute_hash": lambda: "other"}, {"hf_overrides": {"rope_theta": 1}}, {"config_format": "mistral"}]
)
def test_another_configuration_is_another_model(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = model_folder(tmp_path / "model")
    assert model_facts(model_config(path, **changed), "/disk") != model_facts(model_config(path), "/disk")


def test_a_draft_model_counts(tmp_path: Path) -> None:
    path, draft = model_folder(tmp_path / "model"), model_folder(tmp_path / "draft")
    drafting = SimpleNamespace(draft_model_config=model_config(draft))
    assert facts(vllm_config(path, speculative_config=drafting)) != facts(vllm_config(path))


def images(cache_gb: int) -> dict[str, Any]:
    """A model that takes images, with so much room for what is made of them."""
    return {"model_config__multimodal_config": SimpleNamespace(mm_processor_cache_gb=cache_gb)}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lora_config": object()}, "not with LoRA"),
        ({"parallel_config__nnodes": 2}, "on one machine"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash_cbor"}, "use sha256"),
        (images(0), ""),
        ({**images(4), "cache_config__enable_prefix_caching": False}, ""),
        ({**images(0), "cache_config__enable_prefix_caching": False}, "told apart by number only"),
    ],
)
def test_what_a_hash_does_not_tell_apart_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], said: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = vllm_config(model_folder(tmp_path / "model"), **changed)
    with pytest.raises(ConfigError, match=f"kv_tier.disk_dir='/disk': .*{said}") if said else nullcontext():
        note_model(config, "/disk")
