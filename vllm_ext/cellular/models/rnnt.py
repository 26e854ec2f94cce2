"""A streaming RNN transducer: audio arrives in chunks, and each may emit symbols.

A session keeps the state of encoder and predictor; a chunk is a request of its session. The encoder computes one frame
per chunk; then the joint emits symbols, each of which the predictor takes in, until a blank or ``max_symbols``.

Source: Graves, "Sequence transduction with recurrent neural networks" (2012), greedy; not a model of BatchMaker's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from vllm_ext.cellular.cells import Cell, Port
from vllm_ext.cellular.graphs import MAX_TIMES, CellGraph, Data, Held, Output
from vllm_ext.cellular.models.base import LstmStep, Model, Parsed, numbers_of

BLANK = 0


class Joint(nn.Module):
    """Combines a frame with what was emitted so far."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.project = nn.Linear(2 * hidden, hidden)
        self.emit = nn.Linear(hidden, vocabulary)

    def scores(self, frame: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
        """Return the logits of all symbols."""
        scores: torch.Tensor = self.emit(self.project(torch.cat((frame, said), 1)).tanh())
        return scores

    def forward(self, frame: torch.Tensor, said: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the symbol, and whether it is a blank."""
        token = self.scores(frame, said).argmax(1)
        return token, token == BLANK


class Rnnt(Model):
    """Three cells: encoder of a chunk, joint, predictor."""

    kind = "rnnt"
    sizes = MappingProxyType({"hidden": 64, "vocabulary": 16, "features": 128, "max_symbols": 3})
    fields = frozenset({"audio"})
    streamed = "tokens"

    def __init__(self, config: Mapping[str, int]) -> None:
        super().__init__(config)
        hidden, vocabulary = self.config["hidden"], self.config["vocabulary"]
        self.modules = {
            "encoder": LstmStep(hidden, width=self.config["features"]),
            "joint": Joint(hidden, vocabulary),
            "predictor": LstmStep(hidden, vocabulary=vocabulary),
        }
        names = ("heard", "heard_c", "said", "said_c")
        self.held = {name: Port(name, (hidden,)) for name in names}

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Encoder, joint, predictor; what ends a chunk goes first."""
        h, c = (Port(name, (self.config["hidden"],)) for name in "hc")
        frame, said = Port("frame", h.shape), Port("said", h.shape)
        token, blank = Port("token", (), "int64"), Port("blank", (), "bool")
        audio = Port("audio", (self.config["features"],))
        modules = self.modules
        return (
            Cell(name="encoder", inputs=(audio, h, c), outputs=(h, c), module=modules["encoder"]),
            Cell(name="joint", inputs=(frame, said), outputs=(token, blank), until="blank", priority=1,
                 module=modules["joint"]),
            Cell(name="predictor", inputs=(token, h, c), outputs=(h, c), priority=2, module=modules["predictor"]),
        )  # fmt: skip

    def parse(self, request: Mapping[str, Any]) -> Parsed:
        """``audio``: the features of a chunk, finite numbers."""
        self.check_fields(request)
        audio = numbers_of("audio", request.get("audio"), self.config["features"])
        return Parsed(shape=(), data={"audio": audio[None]})

    def unfold(self, parsed: Parsed) -> CellGraph:
        """Encoder, then joint and predictor in turns."""
        graph = CellGraph(data=parsed.data)
        encoder = graph.add(
            "encoder", {"audio": Data("audio"), "h": Held("heard"), "c": Held("heard_c")},
            into={"h": "heard", "c": "heard_c"},
        )  # fmt: skip
        joint = graph.add(
            "joint", {"frame": Output(encoder, "h"), "said": Held("said")}, times=self.config["max_symbols"],
            collect=["token"], then=encoder + 2,
        )  # fmt: skip
        graph.add(
            "predictor", {"token": Output(joint, "token"), "h": Held("said"), "c": Held("said_c")}, times=MAX_TIMES,
            into={"h": "said", "c": "said_c"}, then=joint,
        )  # fmt: skip
        graph.result["tokens"] = Output(joint, "token")
        return graph

    def is_told(self, value: Any) -> bool:
        """A blank says that there are no more symbols."""
        return bool(value != BLANK)

    def answer(self, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The symbols, without the blank that ends a chunk."""
        return {"tokens": [token for token in values["tokens"].tolist() if self.is_told(token)]}
