"""Hugging Face configurations: read as the shapes they describe, and refused in one line where not understood."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.simulation.cost.hf_config import from_config
from vllm_ext.simulation.cost.models import MODELS

DOCS = Path(__file__).parents[3] / "docs" / "simulator-inputs.md"
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256,
        "max_position_embeddings": 131_072, "tie_word_embeddings": False,
    },
    "mistral-7b": {
        "model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 32_000, "max_position_embeddings": 32_768,
    },
    "opt-13b": {
        "model_type": "opt", "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40,
        "ffn_dim": 20_480, "vocab_size": 50_272, "max_position_embeddings": 2048,
    },
    "pythia-12b": {
        "model_type": "gpt_neox", "num_hidden_layers": 36, "hidden_size": 5120, "num_attention_heads": 40,
        "intermediate_size": 20_480, "vocab_size": 50_688, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "use_parallel_residual": True,
    },
    "falcon-180b": {
        "model_type": "falcon", "num_hidden_layers": 80, "hidden_size": 14_848, "num_attention_heads": 232,
        "num_kv_heads": 8, "new_decoder_architecture": True, "vocab_size": 65_024,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 32_000, "max_position_embeddings": 32_768,
        "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 151_936, "max_position_embeddings": 40_960, "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "vocab_size": 129_280, "max_position_embeddings": 163_840, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    },
}  # fmt: skip


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hugging_face_config_gives_the_shape_of_the_table(name: str, tmp_path: Path) -> None:
    write(tmp_path, CONFIGS[name])
    ours, table = from_config(tmp_path), MODELS[name]
    same = ("parameters", "linear_parameters", "attention_parameters", "kv_heads", "head_dim", "max_positions",
            "parallel_attention", "experts", "latent", "weight_bytes_per_parameter")  # fmt: skip
    assert {field: getattr(ours, field) for field in same} == {field: getattr(table, field) for field in same}


PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    "qwen2-7b": (
        {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
         "num_key_value_heads": 4, "intermediate_size": 18_944, "vocab_size": 152_064,
         "max_position_embeddings": 32_768, "tie_word_embeddings": False},
        7.62e9, 7.62e9,
    ),
    "gemma-2-9b": (
        {"model_type": "gemma2", "num_hidden_layers": 42, "hidden_size": 3584, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14_336, "vocab_size": 256_000,
         "max_position_embeddings": 8192, "torch_dtype": "float32"},
        9.24e9, 9.24e9,
    ),
    "phi-2": (
        {"model_type": "phi", "num_hidden_layers": 32, "hidden_size": 2560, "num_attention_heads": 32,
         "num_key_value_heads": None, "intermediate_size": 10_240, "vocab_size": 51_200,
         "max_position_embeddings": 2048, "tie_word_embeddings": False},
        2.78e9, 2.78e9,
    ),
    "phi-3-mini": (
        {"model_type": "phi3", "num_hidden_layers": 32, "hidden_size": 3072, "num_attention_heads": 32,
         "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32_064, "max_position_embeddings": 4096},
        3.82e9, 3.82e9,
    ),
    "qwen1.5-moe-a2.7b": (
        {"model_type": "qwen2_moe", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16,
         "num_key_value_heads": 16, "intermediate_size": 5632, "moe_intermediate_size": 1408,
         "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4, "vocab_size": 151_936,
         "max_position_embeddings": 8192, "tie_word_embeddings": False},
        14.3e9, 2.69e9,
    ),
    "deepseek-v2-lite": (
        {"model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16,
         "num_key_value_heads": 16, "intermediate_size": 10_944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
         "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 512,
         "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "vocab_size": 102_400, "max_position_embeddings": 163_840},
        15.7e9, 2.66e9,
    ),
}  # fmt: skip
"""Configuration, all parameters, and those of one token with both tables.

Published, but for the last one's active: 2.4e9 there, which leaves out an embedding table of 0.21e9.
"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_gives_the_published_parameters(name: str, tmp_path: Path) -> None:
    config, total, active = PUBLISHED[name]
    model = from_config(write(tmp_path, config))
    assert model.parameters == pytest.approx(total, rel=0.01)
    assert model.active_parameters == pytest.approx(active, rel=0.01)


LLAMA, MISTRAL, MIXTRAL = CONFIGS["llama-3.1-8b"], CONFIGS["mistral-7b"], CONFIGS["mixtral-8x7b"]
QWEN3_MOE, DEEPSEEK = CONFIGS["qwen3-30b-a3b"], CONFIGS["deepseek-v3"]
OLD_FALCON = {"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
              "vocab_size": 65_024, "multi_query": True, "parallel_attn": True}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**LLAMA, "model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True},
         {"head_dim": 64, "tied_embeddings": True}),
        (OLD_FALCON, {"kv_heads": 1}),
        ({**MISTRAL, "quantization_config": {"quant_method": "awq", "bits": 4}}, {"weight_bytes_per_parameter": 0.5}),
        ({**MISTRAL, "quantization_config": {"quant_method": "fp8"}}, {"weight_bytes_per_parameter": 1.0}),
        ({**MISTRAL, "quantization_config": None, "head_dim": None}, {"weight_bytes_per_parameter": 2.0}),
        ({**LLAMA, "torch_dtype": "float32"}, {"weight_bytes_per_parameter": 2.0}),
        ({**PUBLISHED["gemma-2-9b"][0]}, {"tied_embeddings": True, "gated": True, "head_dim": 256}),
        ({**PUBLISHED["phi-2"][0]}, {"parallel_attention": True, "gated": False, "kv_heads": 32}),
        ({**MIXTRAL, "num_local_experts": None, "num_experts": 8}, {"experts": MODELS["mixtral-8x7b"].experts}),
        ({**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, {"dense_layers": 24 + 1}),
        ({**QWEN3_MOE, "decoder_sparse_step": 49}, {"experts": None, "dense_layers": 48}),
        ({**DEEPSEEK, "moe_layer_freq": 2}, {"dense_layers": 61 - 29}),
    ],
    ids=["qwen3", "old falcon", "awq", "fp8", "null", "fp32", "gemma2", "phi", "transformers 5", "sparse step",
         "no sparse layer", "layer frequency"],
)  # fmt: skip
def test_what_differs_between_model_types_is_read(
    config: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    found = from_config(write(tmp_path, config))
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    "missing", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"]
)
def test_a_missing_field_is_named(missing: str, tmp_path: Path) -> None:
    config = {key: value for key, value in MISTRAL.items() if key != missing}
    with pytest.raises(ValueError, match=rf"{missing}.* (is missing|Field required)"):
        from_config(write(tmp_path, config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "'model_type': must be one of llama, .*found 'mamba'"),
        ({"hidden_size": "wide"}, "'hidden_size': Input should be a valid integer .*found 'wide'"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings': Input should be a valid boolean .*found 'no'"),
        ({"num_local_experts": 8}, "num_local_experts=8: experts are only known of mixtral, .*deepseek_v3"),
        ({"torch_dtype": "int3"}, "torch_dtype': Input should be 'bfloat16'.*found 'int3'"),
        ({"model_type": "mixtral"}, "the field num_experts or num_local_experts or n_routed_experts is missing"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "the field num_experts_per_tok is missing"),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9},
            "per_token=9: must be between 1 and routed=8",
        ),
        ({"model_type": "deepseek_v2", "n_routed_experts": 8}, "the field kv_lora_rank is missing"),
        (
            {"quantization_config": {"quant_method": "other"}},
            r"quant_method': .*'fp8', 'gptq' or 'awq' .*found 'other'",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq': needs its bits"),
        ({"num_key_value_heads": 5}, "kv_heads=5: must divide heads=32"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        from_config(write(tmp_path, {**MISTRAL, **change}))
    assert "\n" not in str(error.value)


def test_the_documentation_lists_the_model_types_that_a_refusal_lists(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be one of") as error:
        from_config(write(tmp_path, {**MISTRAL, "model_type": "mamba"}))
    allowed = str(error.value).partition("must be one of ")[2].partition(" (found")[0].split(", ")
    text = DOCS.read_text(encoding="utf-8")
    rows = text.partition("| kind | model types |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", rows)) == sorted(allowed)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: not a JSON file"):
        from_config(path)
