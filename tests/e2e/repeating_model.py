"""A tiny Llama that repeats itself, but not always: n-gram drafts of what it says are accepted, and rejected."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

ALPHABET = range(32, 96)
"""Tokens that it says; so few come back soon."""
_EMBEDDING, _LAYERS = 8.0, 0.12
"""How loud embeddings and what its layers add are, relative to the tiny Llama's: what comes next depends most on the
last token, and a little on the others."""


def build(model: Path, folder: Path) -> Path:
    """Write a copy of the tiny Llama that differs by this; returns its folder."""
    target = folder / "repeating"
    shutil.copytree(model, target)
    (target / "MANIFEST.json").unlink()
    tensors = load_file(model / "model.safetensors")
    for name, weights in tensors.items():
        if name.endswith("embed_tokens.weight"):
            tensors[name] = weights * np.float32(_EMBEDDING)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = weights * np.float32(_LAYERS)
    head = np.zeros_like(tensors["lm_head.weight"])
    head[ALPHABET] = tensors["lm_head.weight"][ALPHABET]
    save_file({**tensors, "lm_head.weight": head}, target / "model.safetensors", {"format": "pt"})
    return target
