"""Configurations and random weights of the two tiny models: Llama-style with grouped queries, and OPT-style.

The weights' standard deviation is far above the usual 0.02: with small weights a model's output hardly depends on
its KV cache and it repeats one token, so it would hide exactly the faults that a scheduler or a KV tier can make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ext.tiny_model.style import Style
from vllm_ext.tiny_model.tokenizer import BOS_ID, EOS_ID, PAD_ID

Tensor = npt.NDArray[np.float32]

HIDDEN_SIZE = 128
NUM_LAYERS = 4
NUM_HEADS = 4
NUM_KV_HEADS = 2
"""Of the Llama style only; OPT has no grouped queries."""
INTERMEDIATE_SIZE = 256
HEAD_DIM = HIDDEN_SIZE // NUM_HEADS
"""32, the smallest that vLLM's CPU attention supports."""


MAX_POSITIONS = {Style.LLAMA: 4096, Style.OPT: 2048}
"""Longest sequence of each style, in tokens."""

WEIGHT_STD = 0.15

OPT_EMBEDDING_STD = 0.45
OPT_ATTENTION_STD = 0.3
OPT_BIAS_STD = 0.015
"""OPT's biases and its ReLU add the same vector at every position; with 0.15 throughout, its greedy output soon falls
into a circle. Louder embeddings, sharper attention and small biases keep some 160 distinct tokens in 200."""


def config(style: Style, vocab_size: int) -> dict[str, Any]:
    """Return the contents of `config.json` for a model of `style`."""
    common = {
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "max_position_embeddings": MAX_POSITIONS[style],
        "vocab_size": vocab_size,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if style is Style.LLAMA:
        return common | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "intermediate_size": INTERMEDIATE_SIZE,
            "num_key_value_heads": NUM_KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
        }
    return common | {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "ffn_dim": INTERMEDIATE_SIZE,
        "word_embed_proj_dim": HIDDEN_SIZE,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    }


def weights(style: Style, vocab_size: int, seed: int) -> dict[str, Tensor]:
    """Return all tensors of a model of `style`; the same arguments give the same numbers.

    The output rows of the special tokens are zero: their logits are then 0, far below the largest of the others, so
    that the model practically never ends by itself and outputs last as long as the request says.
    """
    rng = np.random.default_rng([seed, list(Style).index(style)])

    def random(*shape: int, std: float = WEIGHT_STD) -> Tensor:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    tensors = dict(_llama(vocab_size, random) if style is Style.LLAMA else _opt(vocab_size, random))
    tensors["lm_head.weight"][[BOS_ID, EOS_ID, PAD_ID]] = 0.0
    return tensors


def _llama(vocab_size: int, random: Callable[..., Tensor]) -> Iterator[tuple[str, Tensor]]:
    kv_size = NUM_KV_HEADS * HEAD_DIM
    yield "model.embed_tokens.weight", random(vocab_size, HIDDEN_SIZE)
    for layer in range(NUM_LAYERS):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", _ones(HIDDEN_SIZE)
        yield f"{at}.post_attention_layernorm.weight", _ones(HIDDEN_SIZE)
        for name, size in (("q", HIDDEN_SIZE), ("k", kv_size), ("v", kv_size), ("o", HIDDEN_SIZE)):
            yield f"{at}.self_attn.{name}_proj.weight", random(size, HIDDEN_SIZE)
        yield f"{at}.mlp.gate_proj.weight", random(INTERMEDIATE_SIZE, HIDDEN_SIZE)
        yield f"{at}.mlp.up_proj.weight", random(INTERMEDIATE_SIZE, HIDDEN_SIZE)
        yield f"{at}.mlp.down_proj.weight", random(HIDDEN_SIZE, INTERMEDIATE_SIZE)
    yield "model.norm.weight", _ones(HIDDEN_SIZE)
    yield "lm_head.weight", random(vocab_size, HIDDEN_SIZE)


def _opt(vocab_size: int, random: Callable[..., Tensor]) -> Iterator[tuple[str, Tensor]]:
    offset = 2  # OPT's position table starts with two unused rows
    positions = MAX_POSITIONS[Style.OPT] + offset
    yield "model.decoder.embed_tokens.weight", random(vocab_size, HIDDEN_SIZE, std=OPT_EMBEDDING_STD)
    yield "model.decoder.embed_positions.weight", random(positions, HIDDEN_SIZE, std=OPT_EMBEDDING_STD)
    for layer in range(NUM_LAYERS):
        at = f"model.decoder.layers.{layer}"
        for name in ("q", "k", "v", "out"):
            at_projection = f"{at}.self_attn.{name}_proj"
            yield f"{at_projection}.weight", random(HIDDEN_SIZE, HIDDEN_SIZE, std=OPT_ATTENTION_STD)
            yield f"{at_projection}.bias", random(HIDDEN_SIZE, std=OPT_BIAS_STD)
        for name, size_out, size_in in (
            ("fc1", INTERMEDIATE_SIZE, HIDDEN_SIZE),
            ("fc2", HIDDEN_SIZE, INTERMEDIATE_SIZE),
        ):
            yield f"{at}.{name}.weight", random(size_out, size_in)
            yield f"{at}.{name}.bias", random(size_out, std=OPT_BIAS_STD)
        yield from _layer_norm(f"{at}.self_attn_layer_norm")
        yield from _layer_norm(f"{at}.final_layer_norm")
    yield from _layer_norm("model.decoder.final_layer_norm")
    yield "lm_head.weight", random(vocab_size, HIDDEN_SIZE)


def _layer_norm(name: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", _ones(HIDDEN_SIZE)
    yield f"{name}.bias", np.zeros(HIDDEN_SIZE, dtype=np.float32)


def _ones(size: int) -> Tensor:
    return np.ones(size, dtype=np.float32)
