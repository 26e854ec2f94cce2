"""Weights in safetensors files, whose metadata say which model they are of; and models by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_ext.cellular.models.base import Model
from vllm_ext.cellular.models.lstm import Lstm
from vllm_ext.cellular.models.rnnt import Rnnt
from vllm_ext.cellular.models.seq2seq import Seq2Seq
from vllm_ext.cellular.models.treelstm import TreeLstm

KINDS: Mapping[str, type[Model]] = {model.kind: model for model in (Lstm, Seq2Seq, TreeLstm, Rnnt)}
_KEY = "vllm_ext_cellular"
_MOST = 1 << 20


class ModelError(ValueError):
    """A model that cannot be built or a file that cannot be read; the message names what is wrong."""


def build(kind: str, *, seed: int = 0, **sizes: int) -> Model:
    """Return a model with random weights.

    Raises:
        ModelError: kind or sizes are unknown or not allowed.
    """
    if kind not in KINDS:
        raise ModelError(f"model={kind!r}: must be one of {', '.join(KINDS)}, or a file of weights")
    defaults = KINDS[kind].sizes
    for name, size in sizes.items():
        least = 0 if defaults.get(name, 1) == 0 or name == "classes" else 1
        if name not in defaults:
            raise ModelError(f"{name}={size!r}: {kind} has {', '.join(defaults)}")
        if type(size) is not int or not least <= size <= _MOST:
            raise ModelError(f"{name}={size!r} of {kind}: must be a whole number from {least} to {_MOST}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = KINDS[kind](sizes)
    for module in model.modules.values():
        module.eval().requires_grad_(False)
    return model


def save(model: Model, path: Path) -> None:
    """Write weights and sizes."""
    about = {_KEY: json.dumps({"kind": model.kind, "sizes": model.config})}
    tensors = {
        f"{cell}.{name}": value.contiguous()
        for cell, module in model.modules.items()
        for name, value in module.state_dict().items()
    }
    save_file(tensors, path, metadata=about)


def load(path: Path) -> Model:
    """Read a model.

    Raises:
        ModelError: the file is none of ours, tensors are missing or of another shape, or a weight is not finite.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ModelError(f"{path.name}: cannot be read as weights in safetensors: {error}") from error
    if not isinstance(about, dict) or not isinstance(about.get("sizes"), dict):
        raise ModelError(f"{path.name}: has no {_KEY} in its metadata; `vllm-ext cellular train` writes such files")
    model = build(str(about.get("kind")), **about["sizes"])
    for name, value in tensors.items():
        if not torch.isfinite(value).all():
            raise ModelError(f"{path.name}: weights {name} hold values that are not finite")
    for cell, module in model.modules.items():
        own = {name.removeprefix(f"{cell}."): v for name, v in tensors.items() if name.startswith(f"{cell}.")}
        try:
            module.load_state_dict(own)
        except RuntimeError as error:
            raise ModelError(f"{path.name}: weights of cell {cell} do not fit: {error}") from error
    return model
