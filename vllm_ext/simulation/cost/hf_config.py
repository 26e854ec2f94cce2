"""Reads a model's shape from Hugging Face's ``config.json``: a folder, the file, or an id in the local cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_ext.config.model import first_problem
from vllm_ext.simulation.cost.model_shape import Experts, LatentAttention, ModelShape


def config_path(name: str) -> Path | None:
    """Return where a model's configuration lies; None: nowhere on this machine.

    Args:
        name: A ``config.json``, a folder that holds one, or an id whose configuration is in the Hugging Face cache.
    """
    path = Path(name)
    if path.is_file() and path.suffix == ".json":
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    return _cached(name)


def _cached(repo_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # not needed for the models of the table
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo_id, "config.json")
    except HFValidationError:  # such as a path that does not exist
        return None
    return Path(found) if isinstance(found, str) else None


def from_config(path: str | Path, name: str = "") -> ModelShape:
    """Read the shape of a model from a Hugging Face configuration.

    Args:
        path: A ``config.json``, or the folder that holds one.
        name: The model's name; empty: the one in the file, or its folder's.

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
        config = _Config.model_validate({key: value for key, value in raw.items() if value not in (None, {})})
        return config.shape(str(name or raw.get("_name_or_path") or file.parent.name or config.model_type))
    except ValueError as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"{file}: {problem}") from error


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What a model type implies and its configuration does not say."""

    gated: bool = True
    tied: bool = False
    """Whether the embeddings are tied where ``tie_word_embeddings`` is missing: the default of transformers."""
    parallel: bool = False
    """Whether attention and feed-forward read the same input."""
    mixture: bool = False
    """Whether there are experts."""
    latent: bool = False
    """Whether attention is multi-head latent attention."""


_LLAMA_LIKE, _MIXTURE, _DEEPSEEK = _Family(), _Family(mixture=True), _Family(mixture=True, latent=True)
_TIED = _Family(tied=True)
_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "granite"), _LLAMA_LIKE),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _TIED),
    "opt": _Family(gated=False, tied=True),
    "starcoder2": _Family(gated=False, tied=True),
    "phi": _Family(gated=False, parallel=True),
    "gpt_neox": _Family(gated=False, parallel=True),
    "falcon": _Family(gated=False, tied=True, parallel=True),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe"), _MIXTURE),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _DEEPSEEK),
}
"""The model types that are understood."""


def _types(*, mixture: bool = False) -> str:
    return ", ".join(name for name, family in _FAMILIES.items() if family.mixture or not mixture)


_FFN = "intermediate_size"
_ROUTED = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields that say how many experts a layer has."""

_Whole = Annotated[int, Field(ge=1)]
_Count = Annotated[int, Field(ge=0)]


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
    """What a configuration says of a shape, by the names it has there."""

    model_config = ConfigDict(strict=True)

    model_type: str
    num_hidden_layers: _Whole = Field(validation_alias=AliasChoices("num_hidden_layers", "n_layer"))
    hidden_size: _Whole
    num_attention_heads: _Whole = Field(validation_alias=AliasChoices("num_attention_heads", "n_head"))
    vocab_size: _Whole
    max_position_embeddings: _Whole | None = None
    num_key_value_heads: _Whole | None = None
    head_dim: _Whole | None = None
    intermediate_size: _Whole | None = None
    ffn_dim: _Whole | None = None
    """The inner width as OPT names it."""
    tie_word_embeddings: bool | None = None
    dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        default=None, validation_alias=AliasChoices("dtype", "torch_dtype")
    )
    """Checked, and without effect: vLLM serves weights of 32 bits in 16 by default."""
    quantization_config: _Quantisation | None = None
    use_parallel_residual: bool = True
    """GPT-NeoX."""

    num_kv_heads: _Whole | None = Field(default=None, validation_alias=AliasChoices("num_kv_heads", "n_head_kv"))
    """Falcon, with the next four."""
    ffn_hidden_size: _Whole | None = None
    new_decoder_architecture: bool = False
    multi_query: bool = True
    parallel_attn: bool = True

    num_experts: _Count = 0
    num_local_experts: _Count = 0
    n_routed_experts: _Count = 0
    num_experts_per_tok: _Whole | None = None
    moe_intermediate_size: _Whole | None = None
    """Inner width of an expert; None: ``intermediate_size`` is."""
    shared_expert_intermediate_size: _Count = 0
    """Of Qwen's one shared expert."""
    n_shared_experts: _Count = 0
    """DeepSeek's shared experts, each as wide as a routed one."""
    first_k_dense_replace: _Count = 0
    moe_layer_freq: _Whole = 1
    decoder_sparse_step: _Whole = 1
    mlp_only_layers: list[_Count] = []

    kv_lora_rank: _Whole | None = None
    q_lora_rank: _Whole | None = None
    qk_nope_head_dim: _Whole | None = None
    qk_rope_head_dim: _Whole | None = None
    v_head_dim: _Whole | None = None

    @field_validator("model_type")
    @classmethod
    def _type_is_known(cls, model_type: str) -> str:
        if model_type not in _FAMILIES:
            raise ValueError(f"must be one of {_types()}")
        return model_type

    @property
    def _family(self) -> _Family:
        return _FAMILIES[self.model_type]

    def shape(self, name: str) -> ModelShape:
        """Return the shape.

        Raises:
            ValueError: a field that this model type needs is missing, or heads or experts do not fit each other.
        """
        family, heads, latent, experts = self._family, self.num_attention_heads, self._latent(), self._experts()
        opt, tied = self.model_type == "opt", self.tie_word_embeddings
        if self.model_type == "falcon":
            positions, ffn = self.max_position_embeddings or 2048, self.ffn_hidden_size or 4 * self.hidden_size
            kv_heads = self.num_kv_heads if self.new_decoder_architecture else 1 if self.multi_query else None
            parallel = self.new_decoder_architecture or self.parallel_attn
        else:
            positions, ffn = self._needed("max_position_embeddings"), self._needed("ffn_dim" if opt else _FFN)
            kv_heads = None if family.latent else self.num_key_value_heads
            parallel = family.parallel and self.use_parallel_residual
        return ModelShape(
            name=name,
            layers=self.num_hidden_layers,
            hidden=self.hidden_size,
            heads=heads,
            kv_heads=kv_heads or heads,
            head_dim=self._head_dim(latent),
            ffn=ffn,
            gated=family.gated,
            vocab=self.vocab_size,
            tied_embeddings=family.tied if tied is None else tied,
            max_positions=positions,
            learned_positions=positions + 2 if opt else 0,  # the first two rows are not used
            parallel_attention=parallel,
            experts=experts,
            latent=latent,
            weight_bytes_per_parameter=2.0 if (q := self.quantization_config) is None else q.bytes_per_parameter,
            source=f"config.json, model type {self.model_type}",
        )

    def _head_dim(self, latent: LatentAttention | None) -> int:
        if latent is not None:  # head_dim, where it is given, is that of the rotary part
            return latent.nope_dim + latent.rope_dim
        return self.head_dim or max(1, self.hidden_size // self.num_attention_heads)

    def _experts(self) -> Experts | None:
        field, routed = self._routed()
        if not self._family.mixture:
            if routed:
                raise ValueError(f"{field}={routed!r}: experts are only known of {_types(mixture=True)}")
            return None
        if not routed:
            raise ValueError(f"the field {' or '.join(_ROUTED)} is missing")
        width, layers = self.moe_intermediate_size or self._needed(_FFN), self._expert_layers()
        shared = self.n_shared_experts * width + self.shared_expert_intermediate_size
        per_token = self._needed("num_experts_per_tok")
        if not layers:
            return None
        return Experts(layers=layers, routed=routed, per_token=per_token, ffn=width, shared_ffn=shared)

    def _routed(self) -> tuple[str, int]:
        """Return the field that says how many experts a layer has, and its value; 0: none does."""
        return next(((name, value) for name in _ROUTED if (value := getattr(self, name))), (_ROUTED[0], 0))

    def _expert_layers(self) -> int:
        """Return how many layers have experts, by the rules of DeepSeek and of Qwen; the defaults mean all."""
        return sum(
            layer % self.moe_layer_freq == 0
            and (layer + 1) % self.decoder_sparse_step == 0
            and layer not in self.mlp_only_layers
            for layer in range(self.first_k_dense_replace, self.num_hidden_layers)
        )

    def _latent(self) -> LatentAttention | None:
        if not self._family.latent:
            return None
        return LatentAttention(
            kv_rank=self._needed("kv_lora_rank"),
            rope_dim=self._needed("qk_rope_head_dim"),
            nope_dim=self._needed("qk_nope_head_dim"),
            value_dim=self._needed("v_head_dim"),
            query_rank=self.q_lora_rank or 0,
        )

    def _needed(self, field: str) -> int:
        """Return a field that this model type needs.

        Raises:
            ValueError: it is missing.
        """
        value: int | None = getattr(self, field)
        if value is None:
            raise ValueError(f"the field {field} is missing")
        return value
