"""A binary TreeLSTM, with a classifier on the root.

Source: BatchMaker, section 2.7.5; the cells are those of Tai et al. (2015), section 3.2, with N = 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from vllm_ext.cellular.cells import Cell, Port
from vllm_ext.cellular.graphs import CellGraph, Data, Output
from vllm_ext.cellular.models.base import MAX_LENGTH, Model, Parsed, RequestError, tokens_of
from vllm_ext.cellular.models.lstm import classified, head_cell, labelled

MAX_DEPTH = 200
LEAF = 0


class Leaf(nn.Module):
    """State of a word."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.gates = nn.Linear(hidden, 3 * hidden)

    def forward(self, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return h and c."""
        i, o, u = self.gates(self.embed(token)).chunk(3, 1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c


class Internal(nn.Module):
    """State of a phrase from those of its two halves; each has a forget gate of its own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * hidden, 5 * hidden)

    def forward(
        self, h_left: torch.Tensor, c_left: torch.Tensor, h_right: torch.Tensor, c_right: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return h and c."""
        i, left, right, o, u = self.gates(torch.cat((h_left, h_right), 1)).chunk(5, 1)
        c = i.sigmoid() * u.tanh() + left.sigmoid() * c_left + right.sigmoid() * c_right
        return o.sigmoid() * c.tanh(), c


class TreeLstm(Model):
    """Two cells: internal nodes have priority over leaves; a third for the classifier unless ``classes`` is 0."""

    kind = "treelstm"
    sizes = MappingProxyType({"hidden": 64, "vocabulary": 32, "classes": 2})
    fields = frozenset({"tree"})

    def __init__(self, config: Mapping[str, int]) -> None:
        super().__init__(config)
        hidden = self.config["hidden"]
        self.modules = {"leaf": Leaf(hidden, self.config["vocabulary"]), "internal": Internal(hidden)}
        if self.config["classes"]:
            self.modules["head"] = nn.Linear(hidden, self.config["classes"])

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Leaf and internal node, of which the paper batches 64; and the classifier."""
        shape = (self.config["hidden"],)
        sides = tuple(Port(f"{name}_{side}", shape) for side in ("left", "right") for name in "hc")
        state = (Port("h", shape), Port("c", shape))
        return (
            Cell(name="leaf", inputs=(Port("token", (), "int64"),), outputs=state, module=self.modules["leaf"]),
            Cell(name="internal", inputs=sides, outputs=state, priority=1, module=self.modules["internal"]),
            *head_cell(self),
        )

    def parse(self, request: Mapping[str, Any]) -> Parsed:
        """``tree``: a token id, or a list of two trees."""
        self.check_fields(request)
        leaves, shape = flattened(request.get("tree"))
        tokens = tokens_of("tree", leaves, self.config["vocabulary"])
        return Parsed(shape=shape, data={"tokens": tokens})

    def unfold(self, parsed: Parsed) -> CellGraph:
        """Leaves from the left to the right, each phrase behind its halves."""
        graph = CellGraph(data=parsed.data)
        open_parts: list[int] = []
        leaves = 0
        for part in parsed.shape:  # type: ignore[attr-defined]
            if part == LEAF:
                open_parts.append(graph.add("leaf", {"token": Data("tokens", first=leaves)}))
                leaves += 1
                continue
            right, left = open_parts.pop(), open_parts.pop()
            sides = {
                f"{name}_{side}": Output(node, name)
                for side, node in (("left", left), ("right", right))
                for name in "hc"
            }
            open_parts.append(graph.add("internal", sides))
        return classified(self, graph, open_parts[0])

    def answer(self, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Scores of the classes and the best of them, or the root's state."""
        return labelled(values)


def flattened(tree: Any) -> tuple[list[Any], bytes]:
    """Return leaves from left to right, and the tree in postfix form: 0 for a leaf, 1 joins the two before.

    Raises:
        RequestError: it is no binary tree, too deep or too large.
    """
    leaves: list[Any] = []
    shape = bytearray()
    stack: list[tuple[Any, int, bool]] = [(tree, 0, False)]
    while stack:
        part, depth, joined = stack.pop()
        if joined:
            shape.append(1)
        elif isinstance(part, list):
            if len(part) != 2 or depth >= MAX_DEPTH:
                raise RequestError("tree", part, f"a token id or a list of two trees, at most {MAX_DEPTH} deep")
            stack += [(part, depth, True), (part[1], depth + 1, False), (part[0], depth + 1, False)]
        else:
            leaves.append(part)
            shape.append(0)
            if len(leaves) > MAX_LENGTH:
                raise RequestError("tree", len(leaves), f"of at most {MAX_LENGTH} leaves")
    return leaves, bytes(shape)
