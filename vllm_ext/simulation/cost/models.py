"""The table of models, and the one way to find a model by name."""

from __future__ import annotations

from pathlib import Path

from vllm_ext.simulation.cost.hf_config import config_path, from_config
from vllm_ext.simulation.cost.model_shape import Experts, LatentAttention, ModelShape


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
    ModelShape(
        name="mixtral-8x7b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14_336, gated=True,
        vocab=32_000, tied_embeddings=False, max_positions=32_768,
        experts=Experts(layers=32, routed=8, per_token=2, ffn=14_336),
        source="Jiang et al. 2024, Mixtral of Experts, table 1", published_parameters=46.7e9,
    ),
    ModelShape(
        name="qwen3-30b-a3b", layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=6144, gated=True,
        vocab=151_936, tied_embeddings=False, max_positions=40_960,
        experts=Experts(layers=48, routed=128, per_token=8, ffn=768),
        source="Qwen3-30B-A3B model card and configuration", published_parameters=30.5e9,
    ),
    ModelShape(
        name="deepseek-v3", layers=61, hidden=7168, heads=128, kv_heads=128, head_dim=192, ffn=18_432, gated=True,
        vocab=129_280, tied_embeddings=False, max_positions=163_840,
        experts=Experts(layers=58, routed=256, per_token=8, ffn=2048, shared_ffn=2048),
        latent=LatentAttention(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=1536),
        weight_bytes_per_parameter=1.0,  # published in fp8
        source="DeepSeek-AI 2024, DeepSeek-V3, section 4.2", published_parameters=671e9,
    ),
)  # fmt: skip

MODELS: dict[str, ModelShape] = {model.name: model for model in _ROWS}
"""The table, by name."""


def find_model(name: str) -> ModelShape:
    """Return a model of the table, or the one whose ``config.json`` is on this machine.

    Args:
        name: Of the table; or a folder with a ``config.json``, that file, or an id in the Hugging Face cache.

    Raises:
        OSError: the configuration can't be read.
        ValueError: there is none, or it is not understood; the first message lists the table's names.
    """
    if name in MODELS:
        return MODELS[name]
    path = config_path(name)
    if path is None:
        raise ValueError(
            f"model={name!r}: not in the model table, no folder with a config.json, and not in the local Hugging Face "
            f"cache; give the folder of its config.json, or one of the known: {', '.join(MODELS)}"
        )
    return from_config(path, "" if Path(name).exists() else name)
