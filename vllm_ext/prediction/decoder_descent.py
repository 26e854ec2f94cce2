"""Gradient descent for the decoder in torch: initial weights, pinball loss, early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_ext.prediction.decoder import DecoderSpec, Floats

P90 = 0.9


class Epoch(NamedTuple):
    """Progress of training. Losses are mean pinball losses of P50 and P90, in nats."""

    number: int
    """From 1."""
    train_loss: float
    validation_loss: float


@dataclass(frozen=True, kw_only=True)
class DescentOptions:
    """How long and how fast to descend."""

    epochs: int
    """At most, at least 1."""
    patience: int
    """Epochs without a better validation loss before it stops, at least 1."""
    batch_size: int
    """Examples per update, at least 1."""
    learning_rate: float
    """Of AdamW, above 0."""
    weight_decay: float
    """Of AdamW, at least 0."""
    threads: int
    """Of torch while it runs, at least 1."""

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "batch_size", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least 1")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate={self.learning_rate!r}: must be finite and above 0")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"weight_decay={self.weight_decay!r}: must be finite and at least 0")


class Descent(NamedTuple):
    """What came of it."""

    weights: dict[str, Floats]
    """Of the epoch with the least validation loss."""
    best_epoch: int
    history: list[Epoch]
    """All epochs; the first is 0, before training."""


def initial_weights(spec: DecoderSpec, constants: Floats, rng: np.random.Generator) -> dict[str, Floats]:
    """He initialisation; the last layer starts at zero with biases that give the constant quantiles."""
    weights: dict[str, Floats] = {}
    last = len(spec.widths) - 2
    for layer, (rows, columns) in enumerate(zip(spec.widths, spec.widths[1:], strict=False)):
        spread = 0.0 if layer == last else math.sqrt(2 / rows)
        # Entries of an embedding are about 1 / sqrt(dim), not 1 as the rule supposes.
        spread *= math.sqrt(rows) if layer == 0 else 1.0
        weights[f"weight{layer}"] = (spread * rng.standard_normal((rows, columns))).astype(np.float32)
        weights[f"bias{layer}"] = np.zeros(columns, dtype=np.float32)
    gap = max(float(constants[1] - constants[0]), 1e-2)
    weights[f"bias{last}"][:] = constants[0], math.log(math.expm1(gap))
    return weights


def descend(
    weights: dict[str, Floats],
    fitted: tuple[Floats, Floats],
    held: tuple[Floats, Floats],
    rng: np.random.Generator,
    options: DescentOptions,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> Descent:
    """Minimise the pinball loss of P50 and P90 from initial weights, which are not changed.

    Args:
        weights: As of `initial_weights`.
        fitted: Inputs [n, width] and log lengths [n] to learn from, float32.
        held: The same, to stop early by.
        rng: Source of the order.
        options: How long and how fast.
        on_epoch: Called after each epoch; what it raises is passed on.

    Raises:
        ValueError: the loss is not finite any more.
    """
    with _torch_threads(options.threads):
        return _descend(weights, fitted, held, rng, options, on_epoch)


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _descend(
    weights: dict[str, Floats],
    fitted: tuple[Floats, Floats],
    held: tuple[Floats, Floats],
    rng: np.random.Generator,
    options: DescentOptions,
    on_epoch: Callable[[Epoch], None] | None,
) -> Descent:
    import torch

    x, y, held_x, held_y = (torch.from_numpy(part) for part in (*fitted, *held))
    parameters = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in weights.items()}
    optimiser = torch.optim.AdamW(parameters.values(), lr=options.learning_rate, weight_decay=options.weight_decay)

    def loss(x: Any, y: Any) -> Any:
        for layer in range(len(parameters) // 2):
            x = torch.relu(x) if layer else x
            x = x @ parameters[f"weight{layer}"] + parameters[f"bias{layer}"]
        p50 = x[:, 0]
        over, far_over = y - p50, y - p50 - torch.nn.functional.softplus(x[:, 1])
        return (0.5 * over.abs() + torch.maximum(P90 * far_over, (P90 - 1) * far_over)).mean()

    def measured(number: int) -> Epoch:
        with torch.no_grad():
            return Epoch(number, loss(x, y).item(), loss(held_x, held_y).item())

    history = [measured(0)]
    best = (0, weights)
    while len(history) <= options.epochs and len(history) - 1 - best[0] < options.patience:
        order = torch.from_numpy(rng.permutation(len(x)))
        for batch in order.split(options.batch_size):
            optimiser.zero_grad()
            loss(x[batch], y[batch]).backward()
            optimiser.step()
        history.append(epoch := measured(len(history)))
        if not (math.isfinite(epoch.train_loss) and math.isfinite(epoch.validation_loss)):
            raise ValueError(
                f"learning_rate={options.learning_rate!r}: training diverged in epoch {epoch.number}; use less"
            )
        if epoch.validation_loss < history[best[0]].validation_loss:
            best = (epoch.number, {name: p.detach().numpy().copy() for name, p in parameters.items()})
        if on_epoch is not None:
            on_epoch(epoch)
    return Descent(best[1], best[0], history)
