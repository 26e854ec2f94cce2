"""Build the embedded tiny model: a directory that `vllm serve` accepts, made on the spot from a seed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from vllm_ext.envs import cache_dir
from vllm_ext.tiny_model.cache import obtain
from vllm_ext.tiny_model.style import Style

FORMAT_VERSION = 1
"""Raised whenever the same style and seed would give other bytes, so that older copies are not used."""


def build(style: Style | str = Style.LLAMA, seed: int = 0, directory: str | Path | None = None) -> Path:
    """Return the directory of a tiny random model, building it first if it is not there (a few seconds).

    It holds configuration, weights (safetensors, float32, about 5 MB) and tokenizer. The same style and seed give
    the same bytes. Nothing is downloaded.

    Args:
        style: "llama" (grouped-query attention, rotary positions, 4096 tokens) or "opt" (learned positions, 2048).
        seed: Seed of the weights, at least 0; the tokenizer is the same for all seeds.
        directory: Folder in which the model's own folder is made; by default the package's cache of this user.

    Raises:
        ValueError: Unknown style or negative seed.
        OSError: The folder cannot be written.
    """
    style = _checked_style(style)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed={seed!r}: must be an integer of at least 0")
    parent = cache_dir() / "tiny-model" if directory is None else Path(directory)
    return obtain(parent.expanduser().resolve() / _name(style, seed), lambda fresh: _write_model(fresh, style, seed))


def _write_model(directory: Path, style: Style, seed: int) -> None:
    # imported here: none of this is needed when the model is in the cache
    from safetensors.numpy import save_file

    from vllm_ext.tiny_model import architectures, tokenizer

    trained = tokenizer.train()
    vocab_size = trained.get_vocab_size()
    tokenizer.save(trained, directory, architectures.MAX_POSITIONS[style])
    _write_json(directory / "config.json", architectures.config(style, vocab_size))
    ids = {"bos_token_id": tokenizer.BOS_ID, "eos_token_id": tokenizer.EOS_ID, "pad_token_id": tokenizer.PAD_ID}
    _write_json(directory / "generation_config.json", ids)
    save_file(architectures.weights(style, vocab_size, seed), directory / "model.safetensors", {"format": "pt"})


def _checked_style(style: Style | str) -> Style:
    try:
        return Style(style)
    except ValueError:
        raise ValueError(f"style={style!r}: must be one of {', '.join(s.value for s in Style)}") from None


def _name(style: Style, seed: int) -> str:
    key = f"{style.value}/{seed}/{FORMAT_VERSION}"
    return f"tiny-{style.value}-seed{seed}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
