"""Files of decoders: one safetensors file whose metadata is JSON with the format, the decoder's spec and a SHA-256.

One file and not two, so that one rename replaces weights and description together, whoever reads or writes meanwhile.
Equal decoders give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext.observability.files import replaced
from vllm_ext.prediction.decoder import Decoder, DecoderSpec, Floats

FORMAT = "vllm-ext length decoder 1"
_KEY = "vllm_ext"
_LARGEST_BYTES = 256 * 2**20
_HEADER_SIZE_BYTES = 8


def save(decoder: Decoder, path: Path) -> None:
    """Write a decoder atomically; a file that is there is replaced whole or left alone.

    Raises:
        OSError: it can't be written.
    """
    from safetensors.numpy import save as pack

    spec = asdict(decoder.spec)
    description = {"format": FORMAT, "spec": spec, "sha256": _digest(spec, decoder.tensors)}
    data = pack(decoder.tensors, {_KEY: json.dumps(description, sort_keys=True)})
    with replaced(path) as file:
        file.write(data)


def load(path: Path, *, encoder: str | None = None) -> Decoder:
    """Read a file written by `save`.

    Args:
        path: The file. It is left alone whatever it holds.
        encoder: Name of the encoder in use; a decoder of another one is refused. None takes any.

    Raises:
        OSError: there is no such file, or it can't be read.
        ValueError: it is damaged, of another format or encoder, or a decoder that could give what is not finite; the
            message names the file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load as unpack

    if (size := path.stat().st_size) > _LARGEST_BYTES:
        raise ValueError(f"{path}: {size} bytes, more than any decoder has ({_LARGEST_BYTES})")
    data = path.read_bytes()
    try:
        tensors = unpack(data)
        description = _description(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: damaged, or no safetensors file of a decoder ({error})") from error
    if description.get("format") != FORMAT:
        raise ValueError(f"{path}: format={description.get('format')!r}: must be {FORMAT!r}")
    try:
        raw = description["spec"]
        if description["sha256"] != _digest(raw, tensors):
            raise ValueError("its SHA-256 is another one than it says")
        decoder = Decoder(
            DecoderSpec(**{**raw, "hidden": tuple(raw["hidden"]), "features": tuple(raw["features"])}), tensors
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged: {error}") from error
    if encoder is not None and decoder.spec.encoder != encoder:
        raise ValueError(f"{path}: encoder={decoder.spec.encoder!r}: must be the one in use, {encoder!r}")
    return decoder


def _description(data: bytes) -> dict[str, Any]:
    """Return our JSON from the metadata in a safetensors file: 8 bytes of header length, then the header."""
    end = _HEADER_SIZE_BYTES + int.from_bytes(data[:_HEADER_SIZE_BYTES], "little")
    description = json.loads(json.loads(data[_HEADER_SIZE_BYTES:end])["__metadata__"][_KEY])
    if not isinstance(description, dict):
        raise TypeError(f"its description is {type(description).__name__}, not an object")
    return description


def _digest(spec: dict[str, Any], tensors: dict[str, Floats]) -> str:
    """Return the SHA-256 over the spec and every tensor's name, type, shape and values."""
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()
