"""The shape of a model: its parameters, the work of a token and its KV bytes follow from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture-of-experts blocks of a model. Each token goes through ``per_token`` of the ``routed`` experts."""

    layers: int
    """Layers whose feed-forward block is a mixture; the others are dense."""
    routed: int
    """Experts of a layer that tokens are routed to."""
    per_token: int
    ffn: int
    """Inner width of one routed expert."""
    shared_ffn: int = 0
    """Inner width of all shared experts of a layer together, which every token goes through."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.routed:
            raise ValueError(f"per_token={self.per_token!r}: must be between 1 and routed={self.routed}")

    def reached(self, tokens: int) -> float:
        """Return how many experts of a layer a step is expected to reach.

        E (1 - (1 - k / E)^T) for T tokens that each choose k of E experts, uniformly and independently of each other.

        Args:
            tokens: Tokens of the step, T.
        """
        return self.routed * (1.0 - (1.0 - self.per_token / self.routed) ** tokens)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: the cache holds one compressed vector per token and layer, for all heads together.

    Source: DeepSeek-AI 2024, DeepSeek-V2, section 2.1.
    """

    kv_rank: int
    """Width of the compressed keys and values (``kv_lora_rank``)."""
    rope_dim: int
    """Width of the rotary key, which all heads share (``qk_rope_head_dim``)."""
    nope_dim: int
    """Width of a head's query and key without the rotary part (``qk_nope_head_dim``)."""
    value_dim: int
    """Width of a head's value (``v_head_dim``)."""
    query_rank: int = 0
    """Width of the compressed queries (``q_lora_rank``); 0: they are not compressed."""

    @property
    def cached_width(self) -> int:
        """Elements that the cache holds per token and layer."""
        return self.kv_rank + self.rope_dim

    def parameters(self, hidden: int, heads: int) -> int:
        """Return the parameters of one layer's attention."""
        queries = heads * (self.nope_dim + self.rope_dim)
        query = self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        key_value = hidden * self.cached_width + self.kv_rank * heads * (self.nope_dim + self.value_dim)
        return query + key_value + heads * self.value_dim * hidden


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer. Biases and norms, below 0.2 % of the parameters, are left out."""

    name: str
    layers: int
    hidden: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int
    """Width of a head's query and key."""
    ffn: int
    """Inner width of the feed-forward block of dense layers."""
    gated: bool
    """Whether the feed-forward block, and each expert, has a gate: three matrices instead of two."""
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
    experts: Experts | None = None
    """None: all layers are dense."""
    latent: LatentAttention | None = None
    """None: the cache holds the keys and values of all KV heads."""
    weight_bytes_per_parameter: float = 2.0
    source: str = ""
    """Publication or repository whose configuration this is."""
    published_parameters: float = 0.0
    """Parameters its authors state, to check ours against; 0: unknown."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads!r}: must divide heads={self.heads}")

    @property
    def dense_layers(self) -> int:
        """Layers without experts."""
        return self.layers - (self.experts.layers if self.experts else 0)

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention."""
        if self.latent is not None:
            return self.latent.parameters(self.hidden, self.heads)
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def linear_parameters(self) -> int:
        """Parameters every token is multiplied with: all layers' matrices but the routed experts, no output layer."""
        linear = self.layers * self.attention_parameters + self.dense_layers * self._ffn_parameters(self.ffn)
        if self.experts is None:
            return linear
        router = self.hidden * self.experts.routed
        return linear + self.experts.layers * (router + self._ffn_parameters(self.experts.shared_ffn))

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert of every layer that has some."""
        return 0 if self.experts is None else self.experts.layers * self._ffn_parameters(self.experts.ffn)

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters that are stored."""
        return self._parameters_with(self.experts.routed if self.experts else 0)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, embedding table and output layer included."""
        return self._parameters_with(self.experts.per_token if self.experts else 0)

    @property
    def attention_flops_per_pair(self) -> float:
        """Multiplications and additions of prefill for one (query, key) pair, over all layers and heads."""
        value_dim = self.head_dim if self.latent is None else self.latent.value_dim
        return 2.0 * self.layers * self.heads * (self.head_dim + value_dim)

    @property
    def decode_flops_per_pair(self) -> float:
        """The same of decode, which with latent attention computes on the compressed vectors."""
        if self.latent is None:
            return self.attention_flops_per_pair
        return 2.0 * self.layers * self.heads * (self.latent.cached_width + self.latent.kv_rank)

    def weight_bytes(self, tensor_parallel: int = 1) -> float:
        """Return the bytes of weights on each device of a group."""
        return self.parameters * self.weight_bytes_per_parameter / tensor_parallel

    def kv_bytes_per_token(self, kv_dtype_bytes: int = 2, tensor_parallel: int = 1) -> int:
        """Return the bytes of KV each device holds per token.

        Heads are copied where there are fewer than devices; a compressed vector is on every device.
        """
        if self.latent is not None:
            return self.layers * self.latent.cached_width * kv_dtype_bytes
        return 2 * self.layers * -(-self.kv_heads // tensor_parallel) * self.head_dim * kv_dtype_bytes

    def widest_activation(self, tensor_parallel: int = 1) -> float:
        """Return the elements of a token's widest projection on each device, in and out.

        Query, key and value with the attention's output, or a feed-forward block's inner rows. Experts have one inner
        row for each that a token goes through, and hold their outputs, which are not split over the devices.
        """
        factor = 3 if self.gated else 2
        attention = (self.heads + 2 * self.kv_heads) * self.head_dim + self.heads * self.head_dim
        widest = max(attention, factor * self.ffn if self.dense_layers else 0) / tensor_parallel
        if self.experts is None:
            return widest
        routed = self.experts.per_token * (factor * self.experts.ffn / tensor_parallel + self.hidden)
        return max(widest, routed, factor * self.experts.shared_ffn / tensor_parallel)

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

    def _ffn_parameters(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden * width

    def _parameters_with(self, experts_per_layer: int) -> int:
        tables = (1 if self.tied_embeddings else 2) * self.head_parameters + self.learned_positions * self.hidden
        return self.linear_parameters + experts_per_layer * self.expert_parameters + tables
