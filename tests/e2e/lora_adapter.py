"""A random LoRA adapter for the tiny Llama."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 8
STD = 0.3
"""Loud enough to change what a request says."""


def build(model: Path, folder: Path, *, seed: int = 0) -> Path:
    """Write an adapter of the query and value projections in PEFT's format; returns its folder."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    outputs = {"q_proj": hidden, "v_proj": hidden // heads * config["num_key_value_heads"]}
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in outputs.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = rng.normal(0, STD, (RANK, hidden)).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = rng.normal(0, STD, (width, RANK)).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": sorted(outputs), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
