"""Sequence to sequence: an LSTM encoder and a decoder that feeds its output back, greedy.

Source: BatchMaker, section 2.7.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from vllm_ext.cellular.cells import Cell, Port
from vllm_ext.cellular.graphs import CellGraph, Data, Output, Source
from vllm_ext.cellular.models.base import LstmStep, Model, Parsed, tokens_of, whole
from vllm_ext.cellular.models.lstm import chain

GO, EOS = 0, 1
"""Token that starts the decoder, and the one that ends it."""
EXTRA_STEPS = 50
"""Steps beyond the input's length that the decoder may take by default."""
MAX_STEPS = 4096


class Decoder(nn.Module):
    """A step of the decoder: LSTM, projection on the vocabulary, argmax."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.step = LstmStep(hidden, vocabulary=vocabulary)
        self.project = nn.Linear(hidden, vocabulary)

    def forward(self, token: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return h, c, the next token and whether it ends the sequence."""
        h, c = self.step(token, h, c)
        token = self.project(h).argmax(1)
        return h, c, token, token == EOS


class ForcedDecoder(Decoder):
    """Ends after as many steps as its last input says, as benchmarks need it; no scheduler sees that number."""

    def forward(  # type: ignore[override]
        self, token: torch.Tensor, h: torch.Tensor, c: torch.Tensor, left: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return what the decoder does, with the number of steps that are left, and whether there are none."""
        h, c, token, _ = super().forward(token, h, c)
        return h, c, token, left - 1, left <= 1


class Seq2Seq(Model):
    """Two cells: the decoder has priority over the encoder.

    With ``forced``, a request says after how many steps the decoder ends.
    """

    kind = "seq2seq"
    sizes = MappingProxyType({"hidden": 64, "vocabulary": 32, "forced": 0})
    fields = frozenset({"tokens", "max_steps"})
    streamed = "tokens"

    def __init__(self, config: Mapping[str, int]) -> None:
        super().__init__(config)
        hidden, vocabulary = self.config["hidden"], self.config["vocabulary"]
        if self.config["forced"]:
            self.fields = Seq2Seq.fields | {"length"}
        decoder = ForcedDecoder if self.config["forced"] else Decoder
        self.modules = {"encoder": LstmStep(hidden, vocabulary=vocabulary), "decoder": decoder(hidden, vocabulary)}

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Encoder and decoder; the paper's batches of 512 and 256."""
        h, c = (Port(name, (self.config["hidden"],)) for name in "hc")
        token, done, left = Port("token", (), "int64"), Port("done", (), "bool"), Port("left", (), "int64")
        forced = (left,) if self.config["forced"] else ()
        return (
            Cell(name="encoder", inputs=(token, h, c), outputs=(h, c), batch_sizes=(1, 64, 512),
                 module=self.modules["encoder"]),
            Cell(name="decoder", inputs=(token, h, c, *forced), outputs=(h, c, token, *forced, done), until="done",
                 batch_sizes=(1, 64, 256), priority=1, module=self.modules["decoder"]),
        )  # fmt: skip

    def parse(self, request: Mapping[str, Any]) -> Parsed:
        """``tokens``: ids; ``max_steps``: bound of the decoder."""
        self.check_fields(request)
        tokens = tokens_of("tokens", request.get("tokens"), self.config["vocabulary"])
        steps = whole("max_steps", request.get("max_steps", len(tokens) + EXTRA_STEPS), 1, MAX_STEPS)
        control = [GO]
        if self.config["forced"]:
            control.append(whole("length", request.get("length"), 1, steps))
        data = {"tokens": tokens, "control": np.array(control)}
        return Parsed(shape=(len(tokens), steps), data=data, details=steps)

    def unfold(self, parsed: Parsed) -> CellGraph:
        """Two chains; the second grows."""
        graph = CellGraph(data=parsed.data)
        encoder = chain(graph, "encoder")
        inputs: dict[str, Source] = {"token": Data("control"), "h": Output(encoder, "h"), "c": Output(encoder, "c")}
        feedback = {"h": "h", "c": "c", "token": "token"}
        if self.config["forced"]:
            inputs["left"], feedback["left"] = Data("control", first=1), "left"
        decoder = graph.add("decoder", inputs, times=parsed.details, feedback=feedback, collect=["token"])
        graph.result["tokens"] = Output(decoder, "token")
        return graph

    def answer(self, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The tokens, and whether the decoder ended by itself or was cut at its bound."""
        tokens = values["tokens"].tolist()
        return {"tokens": tokens, "finish_reason": "stop" if tokens[-1] == EOS else "length"}
