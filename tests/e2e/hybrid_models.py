"""Tiny random models whose KV is not all of one kind, over the tiny model's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, Gemma3TextConfig, MistralConfig, PretrainedConfig

WINDOW = 64
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_STD = 0.08
"""Large enough that tokens depend on what came before."""


def build(kind: str, tokenizer_of: Path, folder: Path) -> Path:
    """Write a model and return its folder: ``sliding`` (all layers), ``hybrid`` (every other layer), or ``mla``."""
    vocab_size = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
    common = {**_COMMON, "vocab_size": vocab_size}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(kind, common), torch_dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, _STD)
    target = folder / kind
    model.save_pretrained(target)
    for path in tokenizer_of.iterdir():
        if path.name.startswith(("tokenizer", "special")):
            shutil.copy(path, target)
    return target


def _config(kind: str, common: dict[str, object]) -> PretrainedConfig:
    if kind == "sliding":
        return MistralConfig(**common, num_key_value_heads=2, head_dim=32, sliding_window=WINDOW)
    if kind == "hybrid":
        layers = ["sliding_attention", "full_attention"] * 2
        return Gemma3TextConfig(
            **common, num_key_value_heads=2, head_dim=32, sliding_window=WINDOW, layer_types=layers,
            query_pre_attn_scalar=32,
        )  # fmt: skip
    return DeepseekV2Config(
        **common, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=32,
        v_head_dim=32, first_k_dense_replace=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        moe_intermediate_size=32,
    )  # fmt: skip
