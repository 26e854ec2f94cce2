"""Emformer RNN-T: a streaming speech recogniser that attends to a segment, its look-ahead and some left context.

Weights have torchaudio's names and shapes, sizes are by default those of `torchaudio.models.emformer_rnnt_base`. There
all streams of a batch are of one age; here each has its own count of left context. Decoding is greedy; torchaudio's
decoder is a beam search.

Source: Shi et al., "Emformer" (ICASSP 2021), as torchaudio has it, without the memory bank that its base does not use.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from vllm_ext.cellular.cells import Port
from vllm_ext.cellular.models.base import ModelError
from vllm_ext.cellular.models.rnnt import Tensors, Transduce, Transducer

_LSTM_EPS = 1e-3  # of the layer norms in the predictor's LSTM; others have torch's default


class Attention(nn.Module):
    """Multi-head attention of the frames of a chunk to each other and to their left context."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.emb_to_key_value = nn.Linear(width, 2 * width)
        self.emb_to_query, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, left: torch.Tensor, mask: torch.Tensor) -> Tensors:
        """Return what the frames ``x`` (B, T, D) find, and the keys and values of ``left`` (B, L, 2 D) and of them.

        ``mask`` (B, 1, 1, L + T) is true where there is something to attend to.
        """
        context = torch.cat((left, self.emb_to_key_value(x)), 1)
        parts = (self.emb_to_query(x), *context.chunk(2, 2))
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out_proj(found.transpose(1, 2).flatten(2)), context


class EmformerLayer(nn.Module):
    """Attention and a feed-forward network, with layer norms before both and behind."""

    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.pos_ff = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, ffn), nn.GELU(),
            nn.Identity(),  # torchaudio's dropout: the number of the next is part of its name
            nn.Linear(ffn, width),
        )  # fmt: skip
        self.layer_norm_input, self.layer_norm_output = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, left: torch.Tensor, mask: torch.Tensor) -> Tensors:
        """Return the next layer's frames, and keys and values; see `Attention`."""
        found, context = self.attention(self.layer_norm_input(x), left, mask)
        x = x + found
        return self.layer_norm_output(x + self.pos_ff(x)), context


class Transcriber(nn.Module):
    """The encoder of a chunk: ``segment`` frames and ``right`` frames of look-ahead, ``stride`` of which become one."""

    def __init__(self, config: Mapping[str, int]) -> None:
        super().__init__()
        self.width, self.left = config["reduced"] * config["stride"], config["left"]
        self.outputs, self.blank = config["segment"] // config["stride"], config["vocabulary"] - 1
        self.input_linear = nn.Linear(config["features"], config["reduced"], bias=False)
        layers = [EmformerLayer(self.width, config["heads"], config["ffn"]) for _ in range(config["layers"])]
        self.transformer = nn.ModuleDict({"emformer_layers": nn.ModuleList(layers)})
        self.output_linear = nn.Linear(self.width, config["hidden"])
        self.layer_norm = nn.LayerNorm(config["hidden"])

    def forward(self, audio: torch.Tensor, left: torch.Tensor, count: torch.Tensor, last: torch.Tensor) -> Tensors:
        """Encode a chunk.

        Args:
            audio: (B, segment + right, features).
            left: (B, layers, L, 2 D), keys and values of the left context.
            count: (B), how many of the L there are, from the end; 0 when a stream begins.
            last: (B), symbol that was emitted last.

        Returns:
            Frames (B, segment / stride, hidden), and the next left context and count; ``last``, a blank if a stream
            begins.
        """
        x = self.input_linear(audio).reshape(len(audio), -1, self.width)
        place = torch.arange(-self.left, x.shape[1], device=x.device)
        mask = (place >= -count[:, None])[:, None, None]
        kept = []
        for layer, before in zip(self.transformer["emformer_layers"], left.unbind(1), strict=True):
            x, context = layer(x, before, mask)
            kept.append(context[:, self.outputs : self.outputs + self.left])  # without the look-ahead
        frames = self.layer_norm(self.output_linear(x[:, : self.outputs]))
        last = last.where(count > 0, last.new_full((), self.blank))
        return frames, torch.stack(kept, 1), (count + self.outputs).clamp(max=self.left), last


class NormedLstm(nn.Module):
    """A step of an LSTM whose gates and cell state are layer-normed."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.x2g, self.p2g = (nn.Linear(hidden, 4 * hidden, bias=False) for _ in range(2))
        self.c_norm, self.g_norm = nn.LayerNorm(hidden, eps=_LSTM_EPS), nn.LayerNorm(4 * hidden, eps=_LSTM_EPS)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Tensors:
        """Return the next h and c."""
        i, f, u, o = self.g_norm(self.x2g(x) + self.p2g(h)).chunk(4, 1)
        c = self.c_norm(torch.addcmul(f.sigmoid() * c, i.sigmoid(), u.tanh()))
        return o.sigmoid() * c.tanh(), c


class Predictor(nn.Module):
    """Embedding, layers of LSTM, and a projection on what the joint takes."""

    def __init__(self, config: Mapping[str, int]) -> None:
        super().__init__()
        width = config["embedding"]
        self.embedding, self.input_layer_norm = nn.Embedding(config["vocabulary"], width), nn.LayerNorm(width)
        self.lstm_layers = nn.ModuleList(NormedLstm(width) for _ in range(config["lstm_layers"]))
        self.linear, self.output_layer_norm = nn.Linear(width, config["hidden"]), nn.LayerNorm(config["hidden"])

    def forward(self, token: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Tensors:
        """Take a token in (B) and return the output (B, hidden), and the next h and c (B, layers, D)."""
        x, states = self.input_layer_norm(self.embedding(token)), []
        for layer, *state in zip(self.lstm_layers, h.unbind(1), c.unbind(1), strict=True):
            states.append(layer(x, *state))
            x = states[-1][0]
        h, c = (torch.stack(one, 1) for one in zip(*states, strict=True))
        return self.output_layer_norm(self.linear(x)), h, c


class Joiner(nn.Module):
    """Scores of all symbols."""

    def __init__(self, config: Mapping[str, int]) -> None:
        super().__init__()
        self.linear = nn.Linear(config["hidden"], config["vocabulary"])

    def forward(self, frame: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
        """Return logits (B, vocabulary) of a frame and the predictor's output (B, hidden)."""
        return self.linear((frame + said).relu())


class Emformer(Transducer):
    """A transducer of these; sizes in frames of audio are ``segment`` and ``right``, in frames of layers ``left``."""

    kind = "emformer"
    sizes = MappingProxyType({
        "features": 80, "reduced": 128, "stride": 4, "segment": 16, "right": 4, "left": 30, "layers": 20, "heads": 8,
        "ffn": 2048, "hidden": 1024, "vocabulary": 4097, "embedding": 512, "lstm_layers": 3, "max_symbols": 10,
    })  # fmt: skip

    def __init__(self, config: Mapping[str, int]) -> None:
        super().__init__(config)
        of, width = self.config, self.config["reduced"] * self.config["stride"]
        for name in ("segment", "right"):
            if of[name] % of["stride"]:
                raise ModelError(f"{name}={of[name]!r} of emformer: must be a multiple of stride={of['stride']}")
        if width % of["heads"]:
            raise ModelError(f"heads={of['heads']!r} of emformer: must divide reduced * stride={width}")
        state, last = (of["lstm_layers"], of["embedding"]), Port("last", (), "int64")
        self.made_of(
            Transcriber(of), Transduce(Predictor(of), Joiner(of), of["max_symbols"], blank=of["vocabulary"] - 1),
            audio=(of["segment"] + of["right"], of["features"]), frames=(of["segment"] // of["stride"], of["hidden"]),
            heard=[Port("left", (of["layers"], of["left"], 2 * width)), Port("count", (), "int64"), last],
            said=[Port("h", state), Port("c", state)],
        )  # fmt: skip

    def torchaudio_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by torchaudio's names."""
        decoder = self.modules["decoder"]
        parts = {"transcriber": self.modules["encoder"], "predictor": decoder.predictor, "joiner": decoder.joint}
        return dict(nn.ModuleDict(parts).state_dict())
