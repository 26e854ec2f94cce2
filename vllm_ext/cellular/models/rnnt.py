"""A streaming RNN transducer: audio arrives in chunks of several frames, and each frame may emit symbols.

A session keeps the state of encoder and predictor; a chunk is a request of its session. One cell encodes all frames of
a chunk. In the other, which grows, predictor and joint say one symbol of the chunk after the other; a blank, or
``max_symbols`` of a frame, go on to the next frame.

Source: Graves, "Sequence transduction with recurrent neural networks" (2012), greedy; not a model of BatchMaker's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from vllm_ext.cellular.cells import Cell, Port
from vllm_ext.cellular.graphs import CellGraph, Data, Held, Output, Source, Zero
from vllm_ext.cellular.models.base import LstmStep, Model, Parsed, numbers_of

BLANK = 0
Tensors = tuple[torch.Tensor, ...]


class Frames(nn.Module):
    """The encoder: an LSTM over the frames of a chunk."""

    def __init__(self, hidden: int, features: int) -> None:
        super().__init__()
        self.step = LstmStep(hidden, width=features)

    def forward(self, audio: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Tensors:
        """Return (batch, frames, hidden) of (batch, frames, features), and the state behind them."""
        frames = []
        for features in audio.unbind(1):
            h, c = self.step(features, h, c)
            frames.append(h)
        return torch.stack(frames, 1), h, c


class Predictor(nn.Module):
    """What was emitted so far: an LSTM over symbols."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.step = LstmStep(hidden, vocabulary=vocabulary)

    def forward(self, token: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Tensors:
        """Return the output, and the state."""
        h, c = self.step(token, h, c)
        return h, h, c


class Joint(nn.Module):
    """Combines a frame with what was emitted so far."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.project = nn.Linear(2 * hidden, hidden)
        self.emit = nn.Linear(hidden, vocabulary)

    def forward(self, frame: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
        """Return the logits of all symbols."""
        logits: torch.Tensor = self.emit(self.project(torch.cat((frame, said), 1)).tanh())
        return logits


class Transduce(nn.Module):
    """One symbol: predictor and joint, greedy.

    Args:
        predictor: (symbol, state...) -> (output, state...).
        joint: (frame, output) -> logits.
        max_symbols: That a frame may emit.
        blank: The symbol that emits nothing.
    """

    def __init__(self, predictor: nn.Module, joint: nn.Module, max_symbols: int, *, blank: int = BLANK) -> None:
        super().__init__()
        self.predictor, self.joint, self.max_symbols, self.blank = predictor, joint, max_symbols, blank

    def forward(
        self, frames: torch.Tensor, at: torch.Tensor, emitted: torch.Tensor, last: torch.Tensor, *state: torch.Tensor
    ) -> Tensors:
        """Say the next symbol.

        Args:
            frames: Of the chunk, encoded: (batch, frames, hidden).
            at: Which of them is heard.
            emitted: Symbols that it has emitted.
            last: Symbol that was emitted last, of whatever frame; a blank at the beginning.
            state: Of the predictor, before that symbol.

        Returns:
            The symbol; what ``at``, ``emitted``, ``last`` and ``state`` are behind it; whether no frame is left.
        """
        said, *after = self.predictor(last, *state)
        row = torch.arange(len(at), device=at.device)
        token = self.joint(frames[row, at.clamp(max=frames.shape[1] - 1)], said).argmax(1)
        emits = token != self.blank
        emitted = emitted + emits
        passes = ~emits | (emitted >= self.max_symbols)
        at = at + passes
        kept = (torch.where(emits.view(-1, *[1] * (new.dim() - 1)), new, old)
                for new, old in zip(after, state, strict=True))  # fmt: skip
        return (token, at, emitted.where(~passes, emitted.new_zeros(())), token.where(emits, last), *kept,
                at >= frames.shape[1])  # fmt: skip


class Transducer(Model):
    """Two cells: an encoder of chunks, and `Transduce`, which grows until no frame is left."""

    fields = frozenset({"audio"})
    streamed = "tokens"

    def made_of(
        self, encoder: nn.Module, transduce: Transduce, *, audio: tuple[int, int], frames: tuple[int, int],
        heard: Sequence[Port], said: Sequence[Port],
    ) -> None:  # fmt: skip
        """Say what the cells are.

        Args:
            encoder: (audio, state...) -> (frames, state...).
            transduce: The decoder.
            audio: Frames and features of a chunk.
            frames: The same, encoded.
            heard: The encoder's state.
            said: The predictor's state.
        """
        self.modules = {"encoder": encoder, "decoder": transduce}
        self.audio, self.frames, self.heard, self.said = audio, frames, tuple(heard), tuple(said)
        self.blank = transduce.blank
        self.held = {port.name: port for port in (*heard, Port("last", (), "int64"), *said)}

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Encoder and decoder; what ends a chunk goes first."""
        frames, token, done = Port("frames", self.frames), Port("token", (), "int64"), Port("done", (), "bool")
        state = (*(Port(name, (), "int64") for name in ("at", "emitted", "last")), *self.said)
        return (
            Cell(name="encoder", inputs=(Port("audio", self.audio), *self.heard), outputs=(frames, *self.heard),
                 module=self.modules["encoder"]),
            Cell(name="decoder", inputs=(frames, *state), outputs=(token, *state, done), until="done", priority=1,
                 module=self.modules["decoder"]),
        )  # fmt: skip

    def parse(self, request: Mapping[str, Any]) -> Parsed:
        """``audio``: the frames of a chunk, each a list of finite numbers."""
        self.check_fields(request)
        return Parsed(shape=(), data={"audio": numbers_of("audio", request.get("audio"), *self.audio)[None]})

    def unfold(self, parsed: Parsed) -> CellGraph:
        """Encoder, then decoder."""
        graph = CellGraph(data=parsed.data)
        heard, said = ({port.name: port.name for port in ports} for ports in (self.heard, self.said))
        encoder = graph.add("encoder", {"audio": Data("audio"), **{name: Held(name) for name in heard}}, into=heard)
        said["last"] = "last"
        inputs: dict[str, Source] = {"frames": Output(encoder, "frames"), "at": Zero(), "emitted": Zero()}
        decoder = graph.add(
            "decoder", inputs | {name: Held(name) for name in said}, times=self.frames[0] * self.config["max_symbols"],
            feedback={"at": "at", "emitted": "emitted"} | said, collect=["token"], into=said,
        )  # fmt: skip
        graph.result["tokens"] = Output(decoder, "token")
        return graph

    def is_told(self, value: Any) -> bool:
        """A blank says that the frame has no more symbols."""
        return bool(value != self.blank)

    def answer(self, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The symbols, without blanks."""
        return {"tokens": [token for token in values["tokens"].tolist() if self.is_told(token)]}


class Rnnt(Transducer):
    """A transducer of two LSTMs."""

    kind = "rnnt"
    sizes = MappingProxyType({"hidden": 64, "vocabulary": 16, "features": 128, "frames": 4, "max_symbols": 3})

    def __init__(self, config: Mapping[str, int]) -> None:
        super().__init__(config)
        hidden, vocabulary, features, frames, max_symbols = (self.config[name] for name in self.sizes)
        self.made_of(
            Frames(hidden, features), Transduce(Predictor(hidden, vocabulary), Joint(hidden, vocabulary), max_symbols),
            audio=(frames, features), frames=(frames, hidden), heard=[Port(n, (hidden,)) for n in ("heard", "heard_c")],
            said=[Port(name, (hidden,)) for name in ("said", "said_c")],
        )  # fmt: skip
