"""Which models can be judged, told from their configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from vllm_ext.quality.model import Unloadable, load, unsupported
from vllm_ext.quality.outputs import UnsupportedModel
from vllm_ext.tiny_model import build


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.LlamaConfig(), ""),
        (transformers.OPTConfig(), ""),
        (transformers.MistralConfig(sliding_window=None), ""),
        (transformers.MistralConfig(), "without KV of all tokens"),
        (transformers.Gemma2Config(), "DynamicSlidingWindowLayer"),
        (transformers.MambaConfig(), "recurrent layers"),
        (transformers.DeepseekV3Config(), "latent attention"),
        (transformers.T5Config(), "no decoder"),
        (transformers.ViTConfig(), "no decoder"),
    ],
    ids=["llama", "opt", "mistral", "sliding", "half-sliding", "mamba", "mla", "encoder", "vision"],
)
def test_full_attention_alone_is_supported(config: Any, reason: str) -> None:
    found = unsupported(config)
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize("style", ["llama", "opt"])
def test_tiny_models_are_loaded(style: str, tmp_path: Path) -> None:
    found = load(str(build(style, directory=tmp_path)), "bfloat16", "cpu")
    assert str(found.model.dtype) == "torch.bfloat16"
    assert found.max_tokens == {"llama": 4096, "opt": 2048}[style]
    assert len(found.encode("two words")) >= found.count("two words") > 0


def test_unsupported_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    transformers.MambaConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="Llama, Qwen3 or OPT"):
        load(str(tmp_path), "auto", "cpu")


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = build("llama", directory=tmp_path) / "model.safetensors"
    weights = load_file(file)
    gone = min(weights)
    del weights[gone]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(Unloadable, match=f"1 weights are missing, {gone}"):
        load(str(file.parent), "auto", "cpu")


def test_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Unloadable, match="cannot be loaded") as raised:
        load(str(tmp_path), "auto", "cpu")
    assert "\n" not in str(raised.value)
