"""A model to judge, as transformers loads it, and which models can be judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_ext.quality.outputs import UnsupportedModel

_SUPPORTED = (
    "judged can be decoders with full attention in every layer, as Llama, Qwen3 or OPT: no sliding window, no MLA, "
    "no Mamba or other recurrent layers, no encoder"
)


class Unloadable(ValueError):
    """The model can't be had; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model with its tokenizer."""

    model: Any
    tokenizer: Any
    max_tokens: int | None
    """Longest sequence it was made for, where it says so."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special ones in front that the tokenizer sets."""
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        return ids

    def count(self, text: str) -> int:
        """Return how many tokens a text has, special ones left out."""
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def load(name: str, dtype: str, device: str) -> Loaded:
    """Load a model and its tokenizer; code that comes with a model is never run.

    Args:
        name: A folder, or a model of the Hugging Face hub.
        dtype: ``float32`` or another of torch's; ``auto`` is the checkpoint's.
        device: ``cpu``, ``cuda`` or ``auto``, which is a GPU if torch sees one.

    Raises:
        Unloadable: there is no such model in reach, or it can't be read, or torch sees no such device.
        UnsupportedModel: it has KV of another kind; no weights are read then.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if device == "cuda" and not torch.cuda.is_available():
        raise Unloadable("device cuda: torch sees no GPU")
    place = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(name)
        if problem := unsupported(config):
            raise UnsupportedModel(f"{name}: {problem}; {_SUPPORTED}")
        tokenizer = AutoTokenizer.from_pretrained(name)
        wanted = dtype if dtype == "auto" else getattr(torch, dtype)
        model, found = AutoModelForCausalLM.from_pretrained(name, dtype=wanted, output_loading_info=True)
    except UnsupportedModel:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise Unloadable(f"{name}: cannot be loaded: {' '.join(str(error).split())}") from error
    if missing := sorted(found["missing_keys"]):
        raise Unloadable(f"{name}: {len(missing)} weights are missing, {missing[0]} the first")
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return Loaded(model=model.to(place).eval(), tokenizer=tokenizer, max_tokens=longest)


def unsupported(config: Any) -> str:
    """Return why a model of this configuration can't be judged; nothing if it can."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as MODELS

    decoder = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or type(config) not in MODELS:
        return f"{config.model_type} is no decoder that generates text"
    if getattr(decoder, "kv_lora_rank", None):
        return f"{config.model_type} has multi-head latent attention (MLA)"
    if getattr(MODELS[type(config)], "_is_stateful", False):
        return f"{config.model_type} has recurrent layers"
    others = {type(layer).__name__ for layer in DynamicCache(config=config).layers if type(layer) is not DynamicLayer}
    return f"{config.model_type} has layers without KV of all tokens ({', '.join(sorted(others))})" if others else ""
