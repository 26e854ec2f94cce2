"""What the engine needs of a model, and checks of what clients send."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vllm_ext.cellular.cells import Cell, Port
from vllm_ext.cellular.graphs import CellGraph

MAX_LENGTH = 4096
"""Longest input, in tokens or leaves."""
_SHOWN = 60
_LARGEST = float(np.finfo(np.float32).max)


class ModelError(ValueError):
    """A model that cannot be built or a file that cannot be read; the message names what is wrong."""


class RequestError(ValueError):
    """A request that the model cannot serve; the message names field, value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        field = field if field.isprintable() and len(field) <= _SHOWN else f"{field[:_SHOWN]!r}"
        super().__init__(f"{field}={shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '...'}: must be {allowed}")
        self.field = field


@dataclass(frozen=True, kw_only=True, eq=False)
class Parsed:
    """A request that was checked."""

    shape: Hashable
    """Requests of equal shape have the same graph, but for their data."""
    data: Mapping[str, NDArray[Any]]
    """In the order in which the graph has them."""
    details: Any = None
    """What else the model needs to unfold the request."""


class Model:
    """A model of cells.

    Args:
        config: Sizes, as the file of its weights has them.
    """

    kind: ClassVar[str]
    sizes: ClassVar[Mapping[str, int]]
    """Sizes and their defaults."""
    fields: frozenset[str]
    """What a request may have."""
    streamed: ClassVar[str | None] = None
    """Result that grows while the graph does."""

    def __init__(self, config: Mapping[str, int]) -> None:
        self.config = {**self.sizes, **config}
        self.modules: dict[str, nn.Module] = {}
        self.held: Mapping[str, Port] = {}
        """Values that a session keeps; empty if requests have nothing to do with each other."""

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells, with modules."""
        raise NotImplementedError

    def parse(self, request: Mapping[str, Any]) -> Parsed:
        """Check a request.

        Raises:
            RequestError: it has a field too many, or a value that is not allowed.
        """
        raise NotImplementedError

    def unfold(self, parsed: Parsed) -> CellGraph:
        """Return the graph of a request."""
        raise NotImplementedError

    def answer(self, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return what a client gets, as JSON has it, of the results of a graph."""
        return {name: value.tolist() for name, value in values.items()}

    def is_told(self, value: Any) -> bool:  # noqa: ARG002 - for models that need it
        """Return whether a value of the streamed result is part of the answer."""
        return True

    def check_fields(self, request: Mapping[str, Any]) -> None:
        """Refuse fields that the model does not know."""
        for field in request:
            if field not in self.fields:
                raise RequestError(field, request[field], f"left out; known are {', '.join(sorted(self.fields))}")


class LstmStep(nn.Module):
    """A step of an LSTM on embedded tokens, or on features of ``width``.

    Its one matrix product takes input and state side by side.
    """

    def __init__(self, hidden: int, *, vocabulary: int | None = None, width: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden) if vocabulary else nn.Identity()
        self.gates = nn.Linear((width or hidden) + hidden, 4 * hidden)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next h and c."""
        i, f, o, u = self.gates(torch.cat((self.embed(x), h), 1)).chunk(4, 1)
        c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), u.tanh())
        return o.sigmoid() * c.tanh(), c


def head(size: int, classes: int) -> nn.Module:
    """Return the classifier on a final state."""
    return nn.Linear(size, classes)


def tokens_of(field: str, value: Any, vocabulary: int, *, longest: int = MAX_LENGTH) -> NDArray[np.int64]:
    """Return a checked list of token ids."""
    allowed = f"a list of 1 to {longest} token ids from 0 to {vocabulary - 1}"
    if not isinstance(value, Sequence) or isinstance(value, str) or not 1 <= len(value) <= longest:
        raise RequestError(field, value, allowed)
    if any(type(token) is not int for token in value):
        raise RequestError(field, value, allowed)
    tokens = np.array(value)
    if tokens.dtype != np.int64 or tokens.min() < 0 or tokens.max() >= vocabulary:
        raise RequestError(field, value, allowed)
    return tokens


def numbers_of(field: str, value: Any, *shape: int) -> NDArray[np.float32]:
    """Return checked numbers: a list of lists of them for two sizes, or an array."""
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(listed, list) or len(listed) != shape[0]:
        raise RequestError(field, value, f"a list of {' lists of '.join(map(str, shape))} finite numbers")
    if len(shape) > 1:
        return np.stack([numbers_of(f"{field}[{place}]", one, *shape[1:]) for place, one in enumerate(listed)])
    for place, one in enumerate(listed):
        if type(one) not in (int, float) or not abs(one) <= _LARGEST:
            raise RequestError(f"{field}[{place}]", one, "a finite number of 32 bits")
    return np.array(listed, np.float32)


def whole(field: str, value: Any, least: int, most: int) -> int:
    """Return a checked whole number."""
    if type(value) is not int or not least <= value <= most:
        raise RequestError(field, value, f"a whole number from {least} to {most}")
    return value
