"""What the tests of a predictor's folder share."""

from __future__ import annotations

import numpy as np

from vllm_ext.prediction.decoder import Decoder, DecoderSpec

from .store_parts import DIM


def make_decoder(*, encoder: str = "enc") -> Decoder:
    """A decoder of random weights."""
    spec = DecoderSpec(dim=DIM, hidden=(3,), encoder=encoder)
    rng = np.random.default_rng(0)
    return Decoder(spec, {name: rng.random(shape).astype(np.float32) for name, shape in spec.shapes().items()})
