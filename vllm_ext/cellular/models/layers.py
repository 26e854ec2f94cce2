"""Any list of layers as cells, with early exit: a request leaves at the first layer whose head is sure of its answer.

Requests of one padded length share the batches of a layer, whenever they came; who leaves makes room for others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from vllm_ext.cellular.cells import Cell, Port
from vllm_ext.cellular.graphs import CellGraph, Data, Output, Source
from vllm_ext.cellular.models.base import MAX_LENGTH, Model, ModelError, Parsed, tokens_of
from vllm_ext.cellular.models.lstm import labelled

Sure = Callable[[torch.Tensor], torch.Tensor]
"""Scores, [batch, classes], to whether each row leaves with them, bool, [batch]."""
_ANSWER = ("scores", "layers")


class Layers(Model):
    """A cell per padded length and layer; those of one layer share its weights. Made by `from_modules`."""

    kind = "layers"
    sizes = MappingProxyType({"vocabulary": 1, "padding": 0})
    fields = frozenset({"tokens"})

    def __init__(self, layers: Sequence[_Layer], lengths: Sequence[int], config: Mapping[str, int]) -> None:
        super().__init__(config)
        self.modules = {f"layer{place}": layer.eval() for place, layer in enumerate(layers)}
        self._cells = {length: _cells(layers, length) for length in lengths}

    @classmethod
    def from_modules(
        cls, modules: Sequence[nn.Module], exit: nn.Module | Sequence[nn.Module | None], *, vocabulary: int,
        sure: float | Sure = 0.9, lengths: Sequence[int] = (16, 32, 64, 128), padding: int = 0,
    ) -> Self:  # fmt: skip
        """Wrap layers, and put them into evaluation mode.

        Args:
            modules: The first is called with tokens, int64, [batch, length], every other with the state that the one
                before returned; all with a mask, bool, [batch, length], which is true where there is a token. A row of
                what they return may depend on no other row.
            exit: The head of all layers, or one per layer, None where no request leaves. It is called with state and
                mask and returns scores, [batch, classes]. Who gets to the last layer is answered there.
            vocabulary: Token ids are below it.
            sure: With which probability of the best class (softmax of the scores) a request leaves; or a function.
            lengths: Requests are padded to the next of them.
            padding: The token id for that.

        Raises:
            ModelError: an argument is not allowed, or modules and heads do not fit each other.
        """
        modules, lengths = list(modules), list(lengths)
        heads = [*exit] if isinstance(exit, Sequence | nn.ModuleList) else [exit] * len(modules)
        if not modules or len(heads) != len(modules) or heads[-1] is None:
            raise ModelError(f"exit: {len(heads)} heads for {len(modules)} modules, must be as many, at least one, and "
                             "not None for the last")  # fmt: skip
        if not lengths or any(type(one) is not int or not 1 <= one <= MAX_LENGTH for one in lengths):
            raise ModelError(f"lengths={lengths!r}: must be whole numbers from 1 to {MAX_LENGTH}")
        if type(vocabulary) is not int or type(padding) is not int or not 0 <= padding < vocabulary:
            raise ModelError(f"padding={padding!r}: must be a token id below vocabulary={vocabulary!r}")
        if not callable(sure) and (type(sure) not in (int, float) or not 0 < sure <= 1):
            raise ModelError(f"sure={sure!r}: must be a probability above 0, or a function of scores")
        layers = [
            _Layer(module, head, number, sure if number < len(modules) else None)
            for number, (module, head) in enumerate(zip(modules, heads, strict=True), 1)
        ]
        return cls(layers, sorted({*lengths}), {"vocabulary": vocabulary, "padding": padding})

    @property
    def cells(self) -> tuple[Cell, ...]:
        """``layer0_16`` and so on; later layers go first."""
        return tuple(cell for cells in self._cells.values() for cell in cells)

    def parse(self, request: Mapping[str, Any]) -> Parsed:
        """``tokens``: ids."""
        self.check_fields(request)
        lengths = [*self._cells]
        tokens = tokens_of("tokens", request.get("tokens"), self.config["vocabulary"], longest=lengths[-1])
        length = lengths[bisect_left(lengths, len(tokens))]
        padded = np.full((1, length), self.config["padding"])
        padded[0, : len(tokens)] = tokens
        seen = np.arange(length)[None] < len(tokens)
        return Parsed(shape=length, data={"tokens": padded, "mask": seen}, details=length)

    def unfold(self, parsed: Parsed) -> CellGraph:
        """A node per layer; the first whose head is sure ends the request."""
        graph = CellGraph(data=parsed.data)
        before: dict[str, Source] = {"tokens": Data("tokens")}
        answers = []
        for cell in self._cells[parsed.details]:
            node = graph.add(cell.name, {**before, "mask": Data("mask")}, exits=cell.until is not None)
            before = {"state": Output(node, "state")}
            answers += [node] if len(cell.outputs) > 1 else []
        graph.result = {name: tuple(Output(node, name) for node in answers) for name in _ANSWER}
        return graph

    def answer(self, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Scores, the best class, and the number of layers after which the request left."""
        return labelled(values)


class _Layer(nn.Module):
    """A layer and its head, the ``number``-th from 1 on; without ``sure`` it is the last."""

    def __init__(self, module: nn.Module, head: nn.Module | None, number: int, sure: float | Sure | None) -> None:
        super().__init__()
        self.module, self.head, self.number, self.sure = module, head, number, sure
        self.names = ("state",) if head is None else _ANSWER if sure is None else ("state", *_ANSWER, "sure")

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what `names` says."""
        mask = mask.clone()
        mask[:, 0] = True  # as in all requests; in probes and rows of padding there may be no token at all
        state = self.module(state, mask)
        if self.head is None:
            return (state,)
        scores = self.head(state, mask)
        found = (scores, torch.full((len(scores),), self.number, device=scores.device))
        if self.sure is None:
            return found
        sure = self.sure(scores) if callable(self.sure) else scores.softmax(1).amax(1) >= self.sure
        return (state, *found, sure)


def _cells(layers: Sequence[_Layer], length: int) -> list[Cell]:
    """Return a length's cells; what they exchange is found by computing a row."""
    made: list[Cell] = []
    device = next((one.device for layer in layers for one in layer.parameters()), None)
    state, seen = (torch.zeros((1, length), dtype=dtype, device=device) for dtype in (torch.int64, torch.bool))
    port, mask = Port("tokens", (length,), "int64"), Port("mask", (length,), "bool")
    for place, layer in enumerate(layers):
        try:
            with torch.inference_mode():
                found = layer(state, seen)
            outputs = tuple(
                Port(name, tuple(value.shape[1:]), str(value.dtype).removeprefix("torch."))
                for name, value in zip(layer.names, found, strict=True)
            )
        except Exception as error:
            raise ModelError(f"modules[{place}] or its exit, with {length} tokens: {error!r}") from error
        made.append(Cell(name=f"layer{place}_{length}", inputs=(port, mask), outputs=outputs, priority=place,
                         until="sure" if "sure" in layer.names else None, module=layer))  # fmt: skip
        port, state = outputs[0], found[0]
    scores = {port.kind for cell in made for port in cell.outputs if port.name == "scores"}
    if len(scores) > 1 or len(next(iter(scores)).shape) != 1:
        raise ModelError(f"exit: gives a row {' or '.join(sorted(map(str, scores)))}, must be a score per class, of as "
                         "many classes after every layer")  # fmt: skip
    return made
