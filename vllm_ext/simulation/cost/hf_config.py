"""Shapes of models outside the table, from the ``config.json`` that Hugging Face repositories come with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_ext.simulation.cost.models import MODELS, ModelShape

_GATED = ("llama", "mistral", "qwen2", "qwen3")
_PLAIN = ("opt", "gpt_neox", "falcon")
_TIED_BY_DEFAULT = ("opt", "falcon")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ALIASES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}


class _Config:
    """A parsed config.json that names its file in every complaint."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def whole(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{self.path}: {name}={value!r}: must be a whole number of at least 1")
            return value
        if default is None:
            raise ValueError(f"{self.path}: the field {' or '.join(names)} is missing")
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.path}: {name}={value!r}: must be true or false")
        return value


def from_config(path: str | Path) -> ModelShape:
    """Read the shape of a model from a Hugging Face configuration.

    Args:
        path: A ``config.json``, or the folder that holds one. Understood are the model types llama, mistral, qwen2,
            qwen3, opt, gpt_neox and falcon.

    Raises:
        OSError: there is no such file, or it can't be read.
        ValueError: it is no such configuration; the message names the field that is missing or not allowed.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not a JSON file ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: holds no JSON object")
    kind = raw.get("model_type")
    if kind not in _GATED + _PLAIN:
        raise ValueError(f"{file}: model_type={kind!r}: must be one of {', '.join(_GATED + _PLAIN)}")
    return _shape(_Config(file, raw), kind)


def find_model(name: str) -> ModelShape:
    """Return a model of the table, or the one whose ``config.json`` lies at a path.

    Raises:
        OSError: the configuration can't be read.
        ValueError: neither is there; the message lists the table's names.
    """
    if name in MODELS:
        return MODELS[name]
    if is_config_path(name):
        return from_config(name)
    known = ", ".join(MODELS)
    raise ValueError(f"model={name!r}: not in the model table, nor a folder with a config.json; known: {known}")


def is_config_path(name: str) -> bool:
    """Return whether a config.json, or a folder with one, lies at this path."""
    path = Path(name)
    return (path.is_file() and path.suffix == ".json") or (path / "config.json").is_file()


def _shape(config: _Config, kind: str) -> ModelShape:
    for name in _EXPERTS:
        if config.raw.get(name):
            raise ValueError(f"{config.path}: {name}={config.raw[name]!r}: mixtures of experts are not modelled")
    layers, hidden, heads, vocab = (config.whole(*names) for names in _ALIASES.values())
    positions = config.whole("max_position_embeddings", default=2048 if kind == "falcon" else None)
    return ModelShape(
        name=str(config.raw.get("_name_or_path") or config.path.parent.name or kind),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(config, kind, heads),
        head_dim=config.whole("head_dim", default=max(1, hidden // heads)),
        ffn=_ffn(config, kind, hidden),
        gated=kind in _GATED,
        vocab=vocab,
        tied_embeddings=config.flag("tie_word_embeddings", kind in _TIED_BY_DEFAULT),
        max_positions=positions,
        learned_positions=positions + 2 if kind == "opt" else 0,  # OPT's table starts with two unused rows
        parallel_attention=_parallel(config, kind),
        weight_bytes_per_parameter=_weight_bytes(config),
        source=f"config.json, model type {kind}",
    )


def _kv_heads(config: _Config, kind: str, heads: int) -> int:
    if kind != "falcon":
        return config.whole("num_key_value_heads", default=heads)
    if config.flag("new_decoder_architecture", False):
        return config.whole("num_kv_heads", "n_head_kv", default=heads)
    return 1 if config.flag("multi_query", True) else heads


def _ffn(config: _Config, kind: str, hidden: int) -> int:
    if kind == "opt":
        return config.whole("ffn_dim")
    if kind == "falcon":
        return config.whole("ffn_hidden_size", default=4 * hidden)
    return config.whole("intermediate_size")


def _parallel(config: _Config, kind: str) -> bool:
    if kind == "falcon":
        return config.flag("new_decoder_architecture", False) or config.flag("parallel_attn", True)
    return kind == "gpt_neox" and config.flag("use_parallel_residual", True)


def _weight_bytes(config: _Config) -> float:
    """Return bytes per parameter: 2, whatever the file's own float type, unless the weights are quantised."""
    quantised = config.raw.get("quantization_config")
    if not quantised:
        return 2.0
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if method == "fp8":
        return 1.0
    if method in ("gptq", "awq") and quantised.get("bits") in (2, 3, 4, 8):
        return float(quantised["bits"]) / 8
    raise ValueError(
        f"{config.path}: quantization_config={quantised!r}: only fp8, and gptq and awq with their bits, are understood"
    )
