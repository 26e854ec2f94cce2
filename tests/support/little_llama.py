"""A Llama of random weights that computes in milliseconds, and sequences to judge it by."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 300


def little_llama(*, seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """Return a model of two layers with one KV head."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**shape | config)).eval()


def random_rows(sequences: int, tokens: int) -> torch.Tensor:
    """Return sequences of random tokens."""
    return torch.randint(VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(1))
