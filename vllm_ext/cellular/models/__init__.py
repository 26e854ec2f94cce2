"""Models of cells, by name: how a request unfolds, and their weights."""

from vllm_ext.cellular.models.base import Model, Parsed, RequestError
from vllm_ext.cellular.models.files import ModelError, build, load, save

__all__ = ["Model", "ModelError", "Parsed", "RequestError", "build", "load", "save"]
