"""An LSTM over tokens, with a classifier on its last state.

Source: BatchMaker, section 2.7.2; the classifier is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from vllm_ext.cellular.cells import Cell, Port
from vllm_ext.cellular.graphs import CellGraph, Data, Output, Source, Zero
from vllm_ext.cellular.models.base import LstmStep, Model, Parsed, head, tokens_of


class Lstm(Model):
    """One cell, and a second for the classifier unless ``classes`` is 0; then the result is the last state."""

    kind = "lstm"
    sizes = MappingProxyType({"hidden": 64, "vocabulary": 32, "classes": 4})
    fields = frozenset({"tokens"})

    def __init__(self, config: Mapping[str, int]) -> None:
        super().__init__(config)
        self.modules = {"step": LstmStep(self.config["hidden"], vocabulary=self.config["vocabulary"])}
        if self.config["classes"]:
            self.modules["head"] = head(self.config["hidden"], self.config["classes"])

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The step, and the classifier."""
        h, c = (Port(name, (self.config["hidden"],)) for name in "hc")
        step = Cell(
            name="step", inputs=(Port("token", (), "int64"), h, c), outputs=(h, c), batch_sizes=(1, 64, 512),
            module=self.modules["step"],
        )  # fmt: skip
        return (step, *head_cell(self))

    def parse(self, request: Mapping[str, Any]) -> Parsed:
        """``tokens``: ids."""
        self.check_fields(request)
        tokens = tokens_of("tokens", request.get("tokens"), self.config["vocabulary"])
        return Parsed(shape=len(tokens), data={"tokens": tokens})

    def unfold(self, parsed: Parsed) -> CellGraph:
        """One chain."""
        graph = CellGraph(data=parsed.data)
        return classified(self, graph, chain(graph, "step"))

    def answer(self, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Scores of the classes and the best of them, or the state."""
        return labelled(values)


def chain(graph: CellGraph, cell: str) -> int:
    """Add a chain over all of a graph's tokens."""
    inputs: dict[str, Source] = {"token": Data("tokens", each=True), "h": Zero(), "c": Zero()}
    return graph.add(cell, inputs, times=len(graph.data["tokens"]), feedback={"h": "h", "c": "c"})


def head_cell(model: Model) -> tuple[Cell, ...]:
    """Return the classifier's cell, if the model has one."""
    if not model.config["classes"]:
        return ()
    state, scores = Port("h", (model.config["hidden"],)), Port("scores", (model.config["classes"],))
    module = model.modules["head"]
    return (Cell(name="head", inputs=(state,), outputs=(scores,), batch_sizes=(1, 512), priority=2, module=module),)


def classified(model: Model, graph: CellGraph, last: int) -> CellGraph:
    """Add the classifier to a graph whose last state is a node's ``h``."""
    if model.config["classes"]:
        graph.result["scores"] = Output(graph.add("head", {"h": Output(last, "h")}), "scores")
    else:
        graph.result["h"] = Output(last, "h")
    return graph


def labelled(values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the answer of a classifier."""
    found: dict[str, Any] = {name: value.tolist() for name, value in values.items()}
    return {"label": int(values["scores"].argmax()), **found} if "scores" in values else found
