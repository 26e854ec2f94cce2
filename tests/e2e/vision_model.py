"""A tiny random vision-language model (Idefics 3: tiles of an image into a Llama) over the tiny model's tokenizer.

An image is cut into tiles by its shape, and a small copy of the whole is one more: images of different shapes have
different numbers of embeddings. Some positions that an image takes in the prompt are separators and have no embedding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, Idefics3Config, Idefics3ForConditionalGeneration
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

from vllm_ext.tiny_model.tokenizer import SPECIAL_TOKENS

IMAGE_TOKEN = "<image>"
TILE, PATCH, SHUFFLE = 32, 8, 2
"""Edges of a tile and of a patch in pixels, and of what patches are merged into one embedding."""
EDGE = 96
"""To which the longer edge of every image is scaled."""
TILE_EMBEDDINGS = (TILE // PATCH // SHUFFLE) ** 2
MOST_EMBEDDINGS = TILE_EMBEDDINGS * ((EDGE // TILE) ** 2 + 1)
"""Of a square image."""
_STD = 0.15
"""Large enough that answers depend on what came before, and on the image."""


def build(language_model: Path, folder: Path) -> Path:
    """Write the model, its tokenizer and its processor; returns its folder.

    Args:
        language_model: The tiny Llama, whose configuration and tokenizer it takes over.
        folder: Where to make it.
    """
    target = folder / "vision"
    target.mkdir(parents=True)
    ids = _write_tokenizer(language_model, target)
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(_config(language_model, ids)).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, _STD)
        # no special token is ever the likeliest
        model.lm_head.weight[[*range(len(SPECIAL_TOKENS)), *range(min(ids.values()), model.vocab_size)]] = 0.0
    model.save_pretrained(target)
    _write_processor(target)
    return target


def image_token_of(model: Path) -> int:
    """Return the token that stands for an image in a prompt."""
    return int(json.loads((model / "config.json").read_text())["image_token_id"])


def _config(language_model: Path, ids: dict[str, int]) -> Idefics3Config:
    text = AutoConfig.from_pretrained(language_model)
    text.vocab_size = -(-(max(ids.values()) + 1) // 64) * 64
    vision = Idefics3VisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=TILE,
        patch_size=PATCH,
    )  # fmt: skip
    return Idefics3Config(
        vision_config=vision, text_config=text, image_token_id=ids[IMAGE_TOKEN], scale_factor=SHUFFLE,
        pad_token_id=text.pad_token_id,
    )  # fmt: skip


def _write_tokenizer(language_model: Path, target: Path) -> dict[str, int]:
    """Write the tokenizer with what the processor puts around images; returns the ids of that."""
    tokenizer = json.loads((language_model / "tokenizer.json").read_text())
    grid = range(1, EDGE // TILE + 1)
    added = [IMAGE_TOKEN, "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    added += [f"<row_{row}_col_{column}>" for row in grid for column in grid]
    first, like = len(tokenizer["model"]["vocab"]), tokenizer["added_tokens"][0]
    ids = {token: first + number for number, token in enumerate(added)}
    tokenizer["added_tokens"] += [{**like, "id": number, "content": token} for token, number in ids.items()]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = (language_model / "tokenizer_config.json").read_text()
    (target / "tokenizer_config.json").write_text(settings)
    return ids


def _write_processor(target: Path) -> None:
    images: dict[str, Any] = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": EDGE},
        "max_image_size": {"longest_edge": TILE},
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": TILE_EMBEDDINGS}
    (target / "preprocessor_config.json").write_text(json.dumps(images))
    (target / "processor_config.json").write_text(json.dumps(processor))
