"""Cells: the units of computation whose invocations are batched across requests.

Two invocations can share a batch if they are of one cell. What a scheduler needs to know of a cell is in `CellType`,
which needs no torch; `Cell` adds the module that computes it.

Source: BatchMaker, sections 2.3.1 and 2.4.2.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

_PROBE_ROWS = 3
_INTEGER_BOUND = 2
"""Token ids that a probe draws are below it: every vocabulary has them."""


class CellError(ValueError):
    """A cell that cannot be batched; the message names cell, port and what was found."""


class Kind(NamedTuple):
    """What a row of a value looks like. Values of one kind share storage, so that any can feed any."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Port:
    """A named input or output of a cell; its first dimension, which is the batch, is not part of its shape."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"

    @property
    def kind(self) -> Kind:
        """How a row of it is stored."""
        return Kind(self.dtype, self.shape)


@dataclass(frozen=True, kw_only=True)
class CellType:
    """A cell as a scheduler sees it."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    batch_sizes: tuple[int, ...] = (1, 64)
    """Bsizes of Algorithm 1, increasing: the largest bounds a task; a series of tasks ends when fewer than the smallest
    are ready."""
    priority: int = 0
    """The higher goes first: later stages of a request before earlier ones (section 2.4.3)."""
    until: str | None = None
    """A bool output that ends a growing chain of this cell when it is true."""

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise CellError(f"batch_sizes={sizes!r} of cell {self.name}: must be whole numbers from 1 on, increasing")
        for label, ports in (("inputs", self.inputs), ("outputs", self.outputs)):
            names = [port.name for port in ports]
            if not names or len(set(names)) < len(names):
                raise CellError(f"{label}={names!r} of cell {self.name}: must be one or more different names")
        if self.until is not None and Port(self.until, (), "bool") not in self.outputs:
            raise CellError(f"until={self.until!r} of cell {self.name}: must be an output of dtype bool and shape ()")

    @property
    def max_batch(self) -> int:
        """Most nodes of a task."""
        return self.batch_sizes[-1]

    @property
    def min_batch(self) -> int:
        """Fewest nodes of a task that is not the first of its series."""
        return self.batch_sizes[0]

    def with_batches(self, max_batch: int, min_batch: int = 1) -> CellType:
        """Return the same cell with other batch sizes: powers of two between the two."""
        if not 1 <= min_batch <= max_batch:
            raise CellError(f"max_batch={max_batch!r} of cell {self.name}: must be at least {min_batch}, the smallest")
        between = (2**power for power in range(int(max_batch).bit_length()))
        sizes = {min_batch, max_batch, *(size for size in between if min_batch < size < max_batch)}
        return replace(self, batch_sizes=tuple(sorted(sizes)))


@dataclass(frozen=True, kw_only=True)
class Cell(CellType):
    """A cell that can be computed."""

    module: Any
    """A torch module that takes the inputs in the order of their ports, batch first, and returns the outputs: one
    tensor, or a tuple of them. Its weights are shared by all of the cell's nodes."""

    def call(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Compute a batch; the result has a tensor for each output port."""
        found = self.module(*inputs)
        return found if isinstance(found, tuple) else (found,)

    def check(self, seed: int = 0) -> None:
        """Probe the module with batches of 1 and 2, on the device of its weights.

        Raises:
            CellError: it raises, has other outputs than said, does not give the same twice, or a row of its result
                depends on other rows; the message names the port.
        """
        import torch

        rows = self.random_inputs(_PROBE_ROWS, seed)
        with torch.inference_mode():
            alone = [self._probed([value[row : row + 1] for value in rows], 1) for row in range(_PROBE_ROWS)]
            again = self._probed([value[:1] for value in rows], 1)
            for port, one, other in zip(self.outputs, alone[0], again, strict=True):
                if not torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-6, equal_nan=True):
                    raise CellError(f"output {port.name} of cell {self.name}: differs from call to call with equal "
                                    "inputs; a module with dropout needs eval()")  # fmt: skip
            allowed = self.allowed_error(rows)
            for pair in ([0, 1], [0, 2], [2, 1]):
                together = self._probed([value[pair] for value in rows], 2)
                for place, row in enumerate(pair):
                    self._check_same(alone[row], [value[place : place + 1] for value in together], allowed)

    def random_inputs(self, batch: int, seed: int = 0) -> list[torch.Tensor]:
        """Return inputs that every such cell must accept: normal floats, integers and bools of 0 and 1."""
        import torch

        parameter = next(iter(self.module.parameters()), None)
        generator = torch.Generator().manual_seed(seed)
        made = []
        for port in self.inputs:
            dtype, shape = getattr(torch, port.dtype), (batch, *port.shape)
            if dtype.is_floating_point:
                value = torch.randn(shape, generator=generator).to(dtype)
            else:
                value = torch.randint(_INTEGER_BOUND, shape, generator=generator).to(dtype)
            made.append(value if parameter is None else value.to(parameter.device))
        return made

    def allowed_error(self, inputs: Sequence[torch.Tensor]) -> list[float]:
        """Return, for each output, by how much two correct computations of it may differ.

        That is 8 times the largest difference between this module and itself in double precision, one row at a time,
        and an ulp of the largest value. The order in which a matrix product adds depends on the batch; this is what
        that costs. Integers and bools may not differ.
        """
        import torch

        double = copy.deepcopy(self.module).double()
        allowed = [0.0] * len(self.outputs)
        for row in range(len(inputs[0])):
            one = [value[row : row + 1] for value in inputs]
            exact = double(*(value.double() if value.is_floating_point() else value for value in one))
            for number, (got, want) in enumerate(
                zip(self.call(one), exact if isinstance(exact, tuple) else (exact,), strict=True)
            ):
                if got.is_floating_point():
                    difference = float((got.double() - want).abs().max()) if got.numel() else 0.0
                    size = float(want.abs().max()) if got.numel() else 0.0
                    allowed[number] = max(allowed[number], 8 * difference + torch.finfo(got.dtype).eps * size)
        return allowed

    def _probed(self, inputs: Sequence[torch.Tensor], batch: int) -> tuple[torch.Tensor, ...]:
        try:
            found = self.call(inputs)
        except Exception as error:
            shapes = ", ".join(
                f"{port.name}: {list(value.shape)}" for port, value in zip(self.inputs, inputs, strict=True)
            )
            raise CellError(f"cell {self.name} raised on a probe with {shapes}: {error!r}") from error
        if len(found) != len(self.outputs):
            raise CellError(f"cell {self.name}: returned {len(found)} tensors for {len(self.outputs)} outputs")
        for port, value in zip(self.outputs, found, strict=True):
            is_found = (tuple(value.shape), str(value.dtype).removeprefix("torch."))
            if is_found != ((batch, *port.shape), port.dtype):
                raise CellError(
                    f"output {port.name} of cell {self.name}: {is_found[1]}{list(is_found[0])} for a batch of {batch}, "
                    f"must be {port.dtype}{[batch, *port.shape]}"
                )
        return found

    def _check_same(
        self, alone: Sequence[torch.Tensor], other: Sequence[torch.Tensor], allowed: Sequence[float]
    ) -> None:
        for port, one, two, most in zip(self.outputs, alone, other, allowed, strict=True):
            differs = float((one.double() - two.double()).abs().max()) if one.numel() else 0.0
            if not differs <= most:
                raise CellError(
                    f"output {port.name} of cell {self.name}: a row differs by {differs:.3g} with what else is in the "
                    f"batch, at most {most:.3g} is rounding; a row must depend on its own inputs only and be finite"
                )
