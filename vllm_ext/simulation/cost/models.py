"""Shapes of models, which costs and memory follow from: a table, and Hugging Face's ``config.json`` for the others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_ext.simulation.problem import first_problem


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A dense decoder-only transformer. Biases and norms, below 0.2 % of the parameters, are left out."""

    name: str
    layers: int
    hidden: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int
    ffn: int
    """Inner width of the feed-forward block."""
    gated: bool
    """Whether the feed-forward block has a gate: three matrices instead of two."""
    vocab: int
    """Rows of the embedding table as stored, padding included."""
    tied_embeddings: bool
    """Whether the output layer shares the embedding table."""
    max_positions: int
    """Longest context the model was made for, in tokens."""
    learned_positions: int = 0
    """Rows of a learned position table; 0: positions are computed."""
    parallel_attention: bool = False
    """Whether attention and feed-forward read the same input, so that one all-reduce per layer does."""
    weight_bytes_per_parameter: float = 2.0
    source: str = ""
    """Publication or repository whose configuration this is."""
    published_parameters: float = 0.0
    """Parameters its authors state, to check ours against; 0: unknown."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads!r}: must divide heads={self.heads}")

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def linear_parameters(self) -> int:
        """Parameters every token is multiplied with: all layers' matrices, without the output layer."""
        return self.layers * self.layer_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters that are stored."""
        tables = (1 if self.tied_embeddings else 2) * self.head_parameters + self.learned_positions * self.hidden
        return self.linear_parameters + tables

    @property
    def attention_flops_per_pair(self) -> float:
        """Multiplications and additions for one (query, key) pair, over all layers and heads: scores and values."""
        return 4.0 * self.layers * self.heads * self.head_dim

    def weight_bytes(self, tensor_parallel: int = 1) -> float:
        """Return the bytes of weights on each device of a group."""
        return self.parameters * self.weight_bytes_per_parameter / tensor_parallel

    def kv_bytes_per_token(self, kv_dtype_bytes: int = 2, tensor_parallel: int = 1) -> int:
        """Return the bytes of KV each device holds per token; heads are copied where there are fewer than devices."""
        return 2 * self.layers * -(-self.kv_heads // tensor_parallel) * self.head_dim * kv_dtype_bytes

    def check_tensor_parallel(self, tensor_parallel: int) -> None:
        """Refuse a group size the heads can't be divided by, as vLLM does.

        Raises:
            ValueError: naming the heads that do not divide.
        """
        if not self.allows_tensor_parallel(tensor_parallel):
            raise ValueError(
                f"tensor_parallel={tensor_parallel!r}: must divide the {self.heads} heads of {self.name}, and divide "
                f"or be a multiple of its {self.kv_heads} KV heads"
            )

    def allows_tensor_parallel(self, tensor_parallel: int) -> bool:
        """Return whether heads and KV heads can be split over so many devices."""
        if self.heads % tensor_parallel:
            return False
        return self.kv_heads % tensor_parallel == 0 or tensor_parallel % self.kv_heads == 0


def _opt(name: str, layers: int, hidden: int, heads: int, published: float) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads, ffn=4 * hidden,
        gated=False, vocab=50_272, tied_embeddings=True, max_positions=2048, learned_positions=2050,
        source="Zhang et al. 2022, OPT, table 1", published_parameters=published,
    )  # fmt: skip


def _llama(
    name: str, layers: int, hidden: int, heads: int, ffn: int, published: float, *, kv_heads: int | None = None,
    vocab: int = 32_000, max_positions: int = 4096, source: str = "Touvron et al. 2023, Llama 2",
) -> ModelShape:  # fmt: skip
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads or heads, head_dim=hidden // heads,
        ffn=ffn, gated=True, vocab=vocab, tied_embeddings=False, max_positions=max_positions, source=source,
        published_parameters=published,
    )  # fmt: skip


_LLAMA_1 = "Touvron et al. 2023, LLaMA, table 2"
_LLAMA_3 = "Llama 3.1 model card and configuration"

_ROWS = (
    _opt("opt-2.7b", 32, 2560, 32, 2.65e9),
    _opt("opt-6.7b", 32, 4096, 32, 6.66e9),
    _opt("opt-13b", 40, 5120, 40, 12.85e9),
    _opt("opt-66b", 64, 9216, 72, 65.7e9),
    _opt("opt-175b", 96, 12_288, 96, 175e9),
    _llama("llama-7b", 32, 4096, 32, 11_008, 6.74e9, max_positions=2048, source=_LLAMA_1),
    _llama("llama-13b", 40, 5120, 40, 13_824, 13.02e9, max_positions=2048, source=_LLAMA_1),
    _llama("llama-2-7b", 32, 4096, 32, 11_008, 6.74e9),
    _llama("llama-2-13b", 40, 5120, 40, 13_824, 13.02e9),
    _llama("llama-2-13b-gqa10", 40, 5120, 40, 13_824, 0.0, kv_heads=10, source="Pensieve, with 10 of 40 KV heads"),
    _llama("llama-2-70b", 80, 8192, 64, 28_672, 68.98e9, kv_heads=8),
    _llama("llama-3.1-8b", 32, 4096, 32, 14_336, 8.03e9, kv_heads=8, vocab=128_256, max_positions=131_072,
           source=_LLAMA_3),
    _llama("llama-3.1-70b", 80, 8192, 64, 28_672, 70.55e9, kv_heads=8, vocab=128_256, max_positions=131_072,
           source=_LLAMA_3),
    _llama("mistral-7b", 32, 4096, 32, 14_336, 7.24e9, kv_heads=8, max_positions=32_768,
           source="Jiang et al. 2023, Mistral 7B, table 1"),
    _llama("yi-34b", 60, 7168, 56, 20_480, 34.39e9, kv_heads=8, vocab=64_000, source="01.AI 2024, Yi, table 2"),
    ModelShape(
        name="falcon-180b", layers=80, hidden=14_848, heads=232, kv_heads=8, head_dim=64, ffn=4 * 14_848, gated=False,
        vocab=65_024, tied_embeddings=True, max_positions=2048, parallel_attention=True,
        source="Almazrouei et al. 2023, Falcon", published_parameters=180e9,
    ),
    ModelShape(
        name="pythia-12b", layers=36, hidden=5120, heads=40, kv_heads=40, head_dim=128, ffn=20_480, gated=False,
        vocab=50_688, tied_embeddings=False, max_positions=2048, parallel_attention=True,
        source="Biderman et al. 2023, Pythia, table 1", published_parameters=11.85e9,
    ),
)  # fmt: skip

MODELS: dict[str, ModelShape] = {model.name: model for model in _ROWS}
"""The table, by name."""


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


def from_config(path: str | Path) -> ModelShape:
    """Read the shape of a model from a Hugging Face configuration.

    Args:
        path: A ``config.json``, or the folder that holds one.

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
    try:
        config = _Config.model_validate({name: value for name, value in raw.items() if value not in (None, {})})
        return config.shape(str(raw.get("_name_or_path") or file.parent.name or config.model_type))
    except ValueError as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"{file}: {problem}") from error


_Whole = Annotated[int, Field(ge=1)]


class _Quantisation(BaseModel):
    model_config = ConfigDict(strict=True)

    quant_method: Literal["fp8", "gptq", "awq"]
    bits: Literal[2, 3, 4, 8] = 8

    @model_validator(mode="after")
    def _bits_are_known(self) -> _Quantisation:
        if self.quant_method != "fp8" and "bits" not in self.model_fields_set:
            raise ValueError(f"quant_method={self.quant_method!r}: needs its bits")
        return self

    @property
    def bytes_per_parameter(self) -> float:
        return 1.0 if self.quant_method == "fp8" else self.bits / 8


class _Config(BaseModel):
    """What a configuration says of a shape, by the names it has there; the model types it is understood of."""

    model_config = ConfigDict(strict=True)

    model_type: Literal["llama", "mistral", "qwen2", "qwen3", "opt", "gpt_neox", "falcon"]
    num_hidden_layers: _Whole = Field(validation_alias=AliasChoices("num_hidden_layers", "n_layer"))
    hidden_size: _Whole
    num_attention_heads: _Whole = Field(validation_alias=AliasChoices("num_attention_heads", "n_head"))
    vocab_size: _Whole
    max_position_embeddings: _Whole | None = None
    num_key_value_heads: _Whole | None = None
    num_kv_heads: _Whole | None = Field(default=None, validation_alias=AliasChoices("num_kv_heads", "n_head_kv"))
    head_dim: _Whole | None = None
    intermediate_size: _Whole | None = None
    ffn_dim: _Whole | None = None
    ffn_hidden_size: _Whole | None = None
    tie_word_embeddings: bool | None = None
    new_decoder_architecture: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    use_parallel_residual: bool = True
    quantization_config: _Quantisation | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_dense(cls, raw: dict[str, Any]) -> dict[str, Any]:
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            if raw.get(name):
                raise ValueError(f"{name}={raw[name]!r}: mixtures of experts are not modelled")
        return raw

    def shape(self, name: str) -> ModelShape:
        kind, heads, hidden = self.model_type, self.num_attention_heads, self.hidden_size
        kv_heads, parallel = self.num_key_value_heads or heads, kind == "gpt_neox" and self.use_parallel_residual
        ffn, positions = self.intermediate_size, self.max_position_embeddings
        if kind == "opt":
            ffn = self.ffn_dim
        if kind == "falcon":
            ffn, positions = self.ffn_hidden_size or 4 * hidden, positions or 2048
            parallel = self.new_decoder_architecture or self.parallel_attn
            kv_heads = 1 if self.multi_query else heads
            if self.new_decoder_architecture:
                kv_heads = self.num_kv_heads or heads
        if ffn is None or positions is None:
            missing = "max_position_embeddings" if ffn else "ffn_dim" if kind == "opt" else "intermediate_size"
            raise ValueError(f"the field {missing} is missing")
        return ModelShape(
            name=name,
            layers=self.num_hidden_layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self.head_dim or max(1, hidden // heads),
            ffn=ffn,
            gated=kind in ("llama", "mistral", "qwen2", "qwen3"),
            vocab=self.vocab_size,
            tied_embeddings=kind in ("opt", "falcon") if self.tie_word_embeddings is None else self.tie_word_embeddings,
            max_positions=positions,
            learned_positions=positions + 2 if kind == "opt" else 0,  # OPT's table starts with two unused rows
            parallel_attention=parallel,
            weight_bytes_per_parameter=2.0 if (q := self.quantization_config) is None else q.bytes_per_parameter,
            source=f"config.json, model type {kind}",
        )
