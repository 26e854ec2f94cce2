"""The embedded tiny model: random weights and a tokenizer, made on the spot, so that nothing is downloaded."""

from vllm_ext.tiny_model.builder import build
from vllm_ext.tiny_model.style import Style

__all__ = ["Style", "build"]
