"""A predictor's folder: what length prediction learned of one served model, and what `vllm-ext predictor train` wrote.

    <folder>/store/                 past prompts' embeddings with their output lengths (`store_files`)
    <folder>/decoder.safetensors    the decoder trained from them (`decoder_file`); missing until there was enough
    <folder>/encoder/               the encoder tuned for lengths (`tuned_encoder`), if one was

Each is replaced whole, on its own: a decoder may be older than the store beside it.
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path

from vllm_ext.envs import cache_dir
from vllm_ext.observability.files import set_aside
from vllm_ext.prediction import decoder_file
from vllm_ext.prediction.decoder import KNOWN_FEATURES, Decoder

logger = logging.getLogger(__name__)

STORE = "store"
DECODER = "decoder.safetensors"
_LONGEST_SLUG = 120


def default_folder(model: str) -> Path:
    """Return where the predictor of a served model is kept: a folder of its own in the cache. It need not exist.

    Args:
        model: Name of the served model: an id on the hub, or a path. Different names give different folders.

    Raises:
        ValueError: the name is empty or blank.
    """
    if not model.strip():
        raise ValueError(f"model={model!r}: must be the name of the served model")
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.")[-_LONGEST_SLUG:]
    # The slug alone would be the same for "a/b" and "a-b".
    digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return cache_dir() / "predictors" / f"{slug or 'model'}-{digest}"


def load_decoder(folder: Path, encoder: str) -> Decoder | None:
    """Read the decoder of a folder for use; None where there is none that can be used.

    A damaged one, or one of another encoder or format, is reported by a warning and renamed to
    ``decoder.safetensors.damaged-N``: it can be trained again from the store.

    Args:
        folder: The predictor's folder; it need not exist.
        encoder: `Encoder.name` of the encoder in use.

    Raises:
        OSError: it is there but can't be read (permissions, a failing disk); it is left alone.
    """
    path = folder / DECODER
    try:
        decoder = decoder_file.load(path, encoder=encoder)
        if decoder.spec.features not in KNOWN_FEATURES:
            raise ValueError(f"{path}: features={decoder.spec.features!r}: must be one of {KNOWN_FEATURES}")
        return decoder
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, IsADirectoryError) as damage:
        set_aside(path, damage, what="length decoder", instead="going on without", logger=logger)
        return None
