"""Weights in safetensors files, whose metadata say which model they are of; and models by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from vllm_ext.cellular.models.base import Model, ModelError
from vllm_ext.cellular.models.emformer import Emformer
from vllm_ext.cellular.models.lstm import Lstm
from vllm_ext.cellular.models.rnnt import Rnnt
from vllm_ext.cellular.models.seq2seq import Seq2Seq
from vllm_ext.cellular.models.treelstm import TreeLstm

KINDS: Mapping[str, type[Model]] = {model.kind: model for model in (Lstm, Seq2Seq, TreeLstm, Rnnt, Emformer)}
_KEY = "vllm_ext_cellular"
_MOST = 1 << 20
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SYMBOLS = "joiner.linear.bias"
"""Has a number for each symbol that torchaudio's model knows."""


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
    save_file({name: value.contiguous() for name, value in _weights(model).items()}, path, metadata=about)


def load(path: Path) -> Model:
    """Read a model: one of ours, or torchaudio's Emformer RNN-T in the sizes of its base model.

    Raises:
        ModelError: the file is neither; a tensor is missing, of another shape or not the model's, or is not finite.
    """
    about, tensors = _read(path)
    if about is None and _SYMBOLS in tensors:
        return _torchaudio(tensors, path.name)
    if not isinstance(about, dict) or not isinstance(about.get("sizes"), dict):
        raise ModelError(f"{path.name}: has no {_KEY} in its metadata, as files of `vllm-ext cellular train` have, nor "
                         f"weights {_SYMBOLS}, as torchaudio's have")  # fmt: skip
    if unknown := {"kind", "seed"} & about["sizes"].keys():
        raise ModelError(f"{path.name}: has a size {unknown.pop()!r} in its metadata, which no model has")
    model = build(str(about.get("kind")), **about["sizes"])
    _fill(_weights(model), tensors, path.name)
    return model


def load_torchaudio(path: Path, **sizes: int) -> Model:
    """Read an Emformer RNN-T with torchaudio's names and shapes, which do not tell all sizes.

    Args:
        path: A state dict that `torch.save` wrote (.pt, .pth), or safetensors.
        sizes: Those that are not the base model's; how many symbols there are is read from the weights.

    Raises:
        ModelError: see `load`.
    """
    return _torchaudio(_read(path)[1], path.name, **sizes)


def _torchaudio(tensors: Mapping[str, torch.Tensor], file: str, **sizes: int) -> Model:
    symbols = {"vocabulary": tensors[_SYMBOLS].numel()} if _SYMBOLS in tensors else {}
    model = build(Emformer.kind, **{**symbols, **sizes})
    _fill(model.torchaudio_weights(), tensors, file)  # type: ignore[attr-defined]
    return model


def _read(path: Path) -> tuple[Any, Mapping[str, torch.Tensor]]:
    """Return what a file's metadata say of the model, or None, and its tensors."""
    if path.suffix in (".pt", ".pth"):
        return None, _read_torch(path)
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(_KEY, "null"))
            return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ModelError(f"{path.name}: cannot be read as weights in safetensors: {error}") from error


def _read_torch(path: Path) -> Mapping[str, torch.Tensor]:
    allowed = "a state dict, names and dense tensors, as torch.save writes it"
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch raises depends on what is wrong, and it advises to trust the file
        raise ModelError(f"{path.name}: cannot be read ({type(error).__name__}): must be {allowed}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path.name}: holds a {type(found).__name__}: must be {allowed}")
    for name, value in found.items():
        dense = isinstance(value, torch.Tensor) and (value.layout, value.device.type) == (torch.strided, "cpu")
        if not dense or not isinstance(name, str):
            raise ModelError(f"{path.name}: {name!r:.60} is a {type(value).__name__}: must be {allowed}")
    return found


def _weights(model: Model) -> dict[str, torch.Tensor]:
    """Return a model's weights by their names in our files."""
    return dict(nn.ModuleDict(model.modules).state_dict())


def _fill(weights: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], file: str) -> None:
    """Set weights to what a file has; see `load` for errors."""
    if unknown := sorted(tensors.keys() - weights.keys()):
        raise ModelError(f"{file}: has weights {unknown[0]}, which the model has not ({len(unknown)} such)")
    if missing := sorted(weights.keys() - tensors.keys()):
        raise ModelError(f"{file}: has no weights {missing[0]} ({len(missing)} such)")
    for name, value in tensors.items():
        if value.shape != weights[name].shape:
            raise ModelError(f"{file}: weights {name} are {list(value.shape)}, must be {list(weights[name].shape)}")
        if value.dtype not in _DTYPES:
            raise ModelError(f"{file}: weights {name} are {value.dtype}, must be {' or '.join(map(str, _DTYPES))}")
        if not torch.isfinite(value).all():
            raise ModelError(f"{file}: weights {name} hold values that are not finite")
        weights[name].copy_(value)
