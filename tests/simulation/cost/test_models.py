"""The table of models agrees with what was published, and a model is found by name, folder or Hugging Face id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from vllm_ext.simulation.cost.models import MODELS, find_model

PUBLISHED = [name for name, model in MODELS.items() if model.published_parameters]
SMALL = {"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 256,
         "vocab_size": 500, "max_position_embeddings": 128}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_agree_with_the_published_count(name: str) -> None:
    model = MODELS[name]
    assert model.parameters == pytest.approx(model.published_parameters, rel=0.01)


@pytest.mark.parametrize(
    ("name", "kib"),
    [
        ("opt-13b", 800),  # vLLM paper, section 3
        ("llama-3.1-8b", 128),
        ("llama-3.1-70b", 320),
        ("llama-2-70b", 320),
        ("llama-2-13b", 800),
        ("llama-2-13b-gqa10", 200),  # Pensieve: 10 of 40 KV heads
        ("falcon-180b", 160),
        ("mixtral-8x7b", 128),
        ("deepseek-v3", 68.625),  # 61 layers of 512 + 64 elements
    ],
)
def test_kv_bytes_per_token_follow_from_the_shape(name: str, kib: float) -> None:
    assert MODELS[name].kv_bytes_per_token() == kib * 1024


def test_an_unknown_name_lists_the_known_ones_and_says_to_give_a_folder() -> None:
    with pytest.raises(ValueError, match=r"model='opt-14b'.*give the folder of its config\.json.*opt-2.7b.*pythia-12b"):
        find_model("opt-14b")


def cached(cache: Path, repo_id: str, config: object) -> None:
    """Lay a configuration down as the Hugging Face client does."""
    repo = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123abcd", encoding="utf-8")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def test_a_hugging_face_id_is_looked_up_in_the_local_cache(cache: Path) -> None:
    cached(cache, "some-lab/small-opt", SMALL)
    model = find_model("some-lab/small-opt")
    assert (model.name, model.layers, model.hidden) == ("some-lab/small-opt", 2, 64)


@pytest.mark.parametrize("name", ["some-lab/other", "./no/such/folder", "/no/such/folder/", "a--b/c..d"])
def test_an_id_or_folder_that_is_not_there_is_one_line_that_says_what_to_give(name: str, cache: Path) -> None:
    cached(cache, "some-lab/small-opt", SMALL)
    with pytest.raises(ValueError, match=r"not in the local Hugging Face cache; give the folder of its") as error:
        find_model(name)
    assert str(error.value).startswith(f"model={name!r}: ")
    assert "\n" not in str(error.value)


def test_a_folder_goes_before_the_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(cache, "some-lab/small-opt", SMALL)
    folder = tmp_path / "some-lab" / "small-opt"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**SMALL, "num_hidden_layers": 3}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert find_model("some-lab/small-opt").layers == 3
    assert find_model("some-lab/small-opt/config.json").layers == 3
