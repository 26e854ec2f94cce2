"""Shapes: parameters and KV bytes follow from the configuration and agree with what was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.simulation.cost.models import MODELS, find_model, from_config

PUBLISHED = [name for name, model in MODELS.items() if model.published_parameters]


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
    ],
)
def test_kv_bytes_per_token_follow_from_the_shape(name: str, kib: int) -> None:
    assert MODELS[name].kv_bytes_per_token() == kib * 1024


def test_kv_bytes_shrink_with_the_group_until_heads_are_copied() -> None:
    model = MODELS["llama-3.1-8b"]  # 8 KV heads
    kib = [model.kv_bytes_per_token(2, split) // 1024 for split in (1, 2, 8, 16)]
    assert kib == [128, 64, 16, 16]
    assert model.kv_bytes_per_token(1) == 64 * 1024


def test_work_follows_from_the_shape() -> None:
    model = MODELS["llama-3.1-8b"]
    assert model.linear_parameters == pytest.approx(6.98e9, rel=0.001)
    assert model.head_parameters == 128_256 * 4096
    assert model.attention_flops_per_pair == 4 * 32 * 4096  # the 2 L d T^2 of a prompt, with T^2 / 2 pairs


@pytest.mark.parametrize(("name", "split"), [("opt-2.7b", 3), ("llama-2-13b-gqa10", 4), ("yi-34b", 16)])
def test_a_split_the_heads_do_not_allow_is_refused(name: str, split: int) -> None:
    with pytest.raises(ValueError, match=rf"tensor_parallel={split}: must divide .* heads of {name}"):
        MODELS[name].check_tensor_parallel(split)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"model='opt-14b'.*opt-2.7b.*pythia-12b"):
        find_model("opt-14b")


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
}  # fmt: skip


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hugging_face_config_gives_the_shape_of_the_table(name: str, tmp_path: Path) -> None:
    write(tmp_path, CONFIGS[name])
    ours, table = find_model(str(tmp_path)), MODELS[name]
    for field in ("parameters", "layer_parameters", "kv_heads", "head_dim", "max_positions", "parallel_attention"):
        assert getattr(ours, field) == getattr(table, field), field


LLAMA, MISTRAL = CONFIGS["llama-3.1-8b"], CONFIGS["mistral-7b"]
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
    ],
    ids=["qwen3", "old falcon", "awq", "fp8", "null"],
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
        ({"model_type": "mamba"}, "'model_type': Input should be 'llama', .*found 'mamba'"),
        ({"hidden_size": "wide"}, "'hidden_size': Input should be a valid integer .*found 'wide'"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings': Input should be a valid boolean .*found 'no'"),
        ({"num_local_experts": 8}, "num_local_experts=8: mixtures of experts"),
        (
            {"quantization_config": {"quant_method": "other"}},
            r"quant_method': .*'fp8', 'gptq' or 'awq' .*found 'other'",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq': needs its bits"),
        ({"num_key_value_heads": 5}, "kv_heads=5: must divide heads=32"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(write(tmp_path, {**MISTRAL, **change}))


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: not a JSON file"):
        from_config(path)
