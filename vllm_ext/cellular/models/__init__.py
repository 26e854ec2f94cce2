"""Models of cells, by name: how a request unfolds, and their weights."""

from vllm_ext.cellular.models.base import Model, ModelError, Parsed, RequestError
from vllm_ext.cellular.models.files import build, load, load_torchaudio, save

__all__ = ["Model", "ModelError", "Parsed", "RequestError", "build", "load", "load_torchaudio", "save"]
