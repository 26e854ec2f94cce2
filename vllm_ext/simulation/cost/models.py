"""Model table: the shapes that costs and memory follow from."""

from __future__ import annotations

from dataclasses import dataclass


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
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_positions"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)!r}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads!r}: must divide heads={self.heads}")
        if not self.weight_bytes_per_parameter > 0:
            raise ValueError(f"weight_bytes_per_parameter={self.weight_bytes_per_parameter!r}: must be greater than 0")

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
    def linear_flops_per_token(self) -> float:
        """Multiplications and additions of one token in all layers' matrices."""
        return 2.0 * self.linear_parameters

    @property
    def head_flops_per_row(self) -> float:
        """Multiplications and additions of one sampled row in the output layer."""
        return 2.0 * self.head_parameters

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
