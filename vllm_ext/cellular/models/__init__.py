"""Models of cells, by name: how a request unfolds, and their weights."""

from vllm_ext.cellular.models.base import Model, ModelError, Parsed, RequestError
from vllm_ext.cellular.models.files import build, load, load_torchaudio, save
from vllm_ext.cellular.models.layers import Layers

__all__ = ["Layers", "Model", "ModelError", "Parsed", "RequestError", "build", "load", "load_torchaudio", "save"]
