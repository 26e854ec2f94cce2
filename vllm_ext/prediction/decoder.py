"""All-MLP decoder of ALISE: regress the output length from the prompt's embedding.

Prediction is numpy: a prompt costs two small matrix products, and a process that only predicts needs no torch for it.
Training is in `decoder_train`, files are in `decoder_file`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction.estimate import DECODER, Estimate, bounded
from vllm_ext.prediction.estimate import LONGEST_TOKENS as LONGEST_TOKENS  # those who train import it from here

Floats = npt.NDArray[np.float32]

_LARGEST_FEATURE = 8.0
"""Standardised features are cut to this many standard deviations, so that an odd prompt can't be extrapolated far."""
_LARGEST_VALUE = 1e30
"""Bound on any value inside the network, far from where float32 overflows."""


LENGTH_FEATURE = "log_prompt_tokens"
"""Logarithm of the prompt's length in tokens, plus 1."""
KNOWN_FEATURES: tuple[tuple[str, ...], ...] = ((), (LENGTH_FEATURE,))
"""Inputs beside the embedding that the service can give."""


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Shape of a decoder, and what it was trained on."""

    dim: int
    """Length of an embedding."""
    hidden: tuple[int, ...] = (512, 256)
    """Widths of the hidden layers. The paper gives none."""
    features: tuple[str, ...] = ()
    """Names of further inputs, such as ``log_prompt_tokens``, in order."""
    encoder: str = ""
    """Name of the encoder whose embeddings it understands; empty where nobody said."""
    min_tokens: int = 1
    """Shortest output it was trained on: no estimate is below."""
    max_tokens: int = LONGEST_TOKENS
    """Longest output it was trained on: no estimate is above."""
    num_examples: int = 0
    """Examples it was trained on."""
    skill: float = 0.0
    """1 - loss / loss of constant quantiles, on held-out examples: 0 or below is no better than a constant."""
    p90_coverage: float = 0.0
    """Share of held-out examples that ended within their P90."""
    kernel_width: float = 0.2
    """Width of `blend.Shrunk` that suits these examples (`selection`), above 0."""

    def __post_init__(self) -> None:
        for name, value in (("dim", self.dim), *(("hidden", width) for width in self.hidden)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
                raise ValueError(f"{name}={value!r}: must be a whole number of 1 to 65536")
        for name in ("min_tokens", "max_tokens", "num_examples"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int):
                raise ValueError(f"{name}={count!r}: must be a whole number")
        if not 1 <= self.min_tokens <= self.max_tokens <= LONGEST_TOKENS:
            raise ValueError(
                f"min_tokens={self.min_tokens!r}, max_tokens={self.max_tokens!r}: must be 1 to {LONGEST_TOKENS} and "
                "ascend"
            )
        if self.num_examples < 0:
            raise ValueError(f"num_examples={self.num_examples!r}: must be at least 0")
        if not isinstance(self.encoder, str):
            raise ValueError(f"encoder={self.encoder!r}: must be a text")
        if not all(isinstance(name, str) for name in self.features):
            raise ValueError(f"features={self.features!r}: must be texts")
        for name, number in (("skill", self.skill), ("p90_coverage", self.p90_coverage)):
            # Compared, not converted: a whole number may be too large for a float.
            if not isinstance(number, (int, float)) or not abs(number) <= sys.float_info.max:
                raise ValueError(f"{name}={number!r:.50}: must be a finite number")
        if not isinstance(self.kernel_width, (int, float)) or not 0 < self.kernel_width <= sys.float_info.max:
            raise ValueError(f"kernel_width={self.kernel_width!r:.50}: must be finite and above 0")

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of all layers, input and output included."""
        return (self.dim + len(self.features), *self.hidden, 2)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the decoder by name."""
        shapes: dict[str, tuple[int, ...]] = {"feature_mean": (len(self.features),)}
        shapes["feature_scale"] = shapes["feature_mean"]
        for layer, (rows, columns) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            shapes[f"weight{layer}"] = (rows, columns)
            shapes[f"bias{layer}"] = (columns,)
        return shapes


class Decoder:
    """Feed-forward network with ReLU whose two outputs m, g stand for quantiles of the log length.

        P50 = exp(m),  P90 = exp(m + softplus(g))

    so P90 is never below P50. Immutable: threads may share one. One built is finite for every possible input: the
    largest value each unit can take is bounded by the weights, and weights that allow an overflow are refused.

    Source: ALISE, section 3.1, the all-MLP decoder (Algorithm 1, line 8); log length and quantiles are ours.
    """

    def __init__(self, spec: DecoderSpec, tensors: dict[str, Floats]) -> None:
        """Build from the tensors that `DecoderSpec.shapes` lists, float32.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape or type, or the network is not finite.
        """
        shapes = spec.shapes()
        if tensors.keys() != shapes.keys():
            raise ValueError(f"tensors={sorted(tensors)}: must be {sorted(shapes)}")
        for name, shape in shapes.items():
            tensor = tensors[name]
            if tensor.shape != shape or tensor.dtype != np.float32:
                raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, must be float32 {list(shape)}")
            if not np.isfinite(tensor).all():
                raise ValueError(f"{name}: has values that are not finite")
        if (tensors["feature_scale"] <= 0).any():
            raise ValueError("feature_scale: must be greater than 0")
        self.spec = spec
        self.tensors = {name: tensor.copy() for name, tensor in tensors.items()}
        for tensor in self.tensors.values():
            tensor.setflags(write=False)
        self._layers = [(self.tensors[f"weight{i}"], self.tensors[f"bias{i}"]) for i in range(len(spec.widths) - 1)]
        _check_bounded(spec, self._layers)

    def log_quantiles(
        self, embeddings: npt.ArrayLike, features: npt.ArrayLike | None = None
    ) -> npt.NDArray[np.float64]:
        """Return P50 and P90 of the natural logarithm of the output length, shape [n, 2].

        The last bits of a row can differ with n, as matrix products of other shapes add up in another order.

        Args:
            embeddings: [n, dim], L2-normalised.
            features: [n, number of features], as they are; None for a decoder without.

        Raises:
            ValueError: a shape is another one, a value is not finite, or an embedding is longer than 1.
        """
        x = inputs(self.spec, embeddings, features, self.tensors["feature_mean"], self.tensors["feature_scale"])
        for layer, (weight, bias) in enumerate(self._layers):
            x = x @ weight + bias
            if layer + 1 < len(self._layers):
                np.maximum(x, 0, out=x)
        p50, gap = x[:, 0].astype(np.float64), np.logaddexp(0, x[:, 1].astype(np.float64))
        quantiles = np.stack((p50, p50 + gap), axis=1)
        return np.clip(quantiles, math.log(self.spec.min_tokens), math.log(self.spec.max_tokens))

    def predict(
        self,
        embeddings: npt.ArrayLike,
        features: npt.ArrayLike | None = None,
        max_tokens: int | Sequence[int] = LONGEST_TOKENS,
    ) -> list[Estimate]:
        """Return an estimate per prompt.

        Args:
            embeddings: As of `log_quantiles`.
            features: As of `log_quantiles`.
            max_tokens: The clients' bounds in tokens, one for all or one for each.

        Raises:
            ValueError: as of `log_quantiles`, or there is not a bound of at least 1 for each prompt.
        """
        quantiles = np.exp(self.log_quantiles(embeddings, features)).tolist()
        bounds = [max_tokens] * len(quantiles) if isinstance(max_tokens, int) else max_tokens
        if len(bounds) != len(quantiles):
            raise ValueError(f"max_tokens: {len(bounds)} bounds for {len(quantiles)} prompts")
        return [bounded(p50, p90, DECODER, bound) for (p50, p90), bound in zip(quantiles, bounds, strict=True)]


def inputs(
    spec: DecoderSpec, embeddings: npt.ArrayLike, features: npt.ArrayLike | None, mean: Floats, scale: Floats
) -> Floats:
    """Return the network's input, [n, dim + features]: embeddings beside standardised, bounded features.

    Raises:
        ValueError: as of `Decoder.log_quantiles`.
    """
    x = np.asarray(embeddings, dtype=np.float32)
    if x.ndim != 2 or x.shape[1] != spec.dim:
        raise ValueError(f"embeddings: shape {list(x.shape)}, must be [n, {spec.dim}]")
    squared = np.einsum("nd,nd->n", x, x)
    if not (squared <= 1.02).all():  # False for NaN as well
        raise ValueError("embeddings: must be finite and L2-normalised")
    extra = np.zeros((len(x), 0), np.float32) if features is None else np.asarray(features, dtype=np.float32)
    if extra.shape != (len(x), len(spec.features)):
        raise ValueError(f"features: shape {list(extra.shape)}, must be {[len(x), len(spec.features)]} {spec.features}")
    if not np.isfinite(extra).all():
        raise ValueError("features: must be finite")
    with np.errstate(over="ignore"):  # an overflow is cut like any other large value
        standardised = np.clip((extra - mean) / scale, -_LARGEST_FEATURE, _LARGEST_FEATURE)
    return np.concatenate((x, standardised), axis=1)


def _check_bounded(spec: DecoderSpec, layers: Sequence[tuple[Floats, Floats]]) -> None:
    """Raise ValueError unless no input can make a unit overflow: interval arithmetic through the layers."""
    largest = np.full(spec.widths[0], _LARGEST_FEATURE, dtype=np.float64)
    largest[: spec.dim] = 1.01
    for layer, (weight, bias) in enumerate(layers):
        largest = largest @ np.abs(weight.astype(np.float64)) + np.abs(bias.astype(np.float64))
        if not (largest < _LARGEST_VALUE).all():
            raise ValueError(f"weight{layer}: a unit can reach {largest.max():.3g}, which overflows; allowed is 1e30")
