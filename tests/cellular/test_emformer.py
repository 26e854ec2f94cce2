"""Emformer RNN-T: its weights are those of torchaudio's base model, its answers those of a stream computed alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import gelu, layer_norm

from tests.cellular.plain import lively
from tests.support.extent import HANG_S
from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.models import ModelError, RequestError, build, load, load_torchaudio, save
from vllm_ext.cellular.models.emformer import Emformer
from vllm_ext.cli.cellular import main

TINY = {
    "features": 6, "reduced": 4, "stride": 4, "segment": 8, "right": 4, "left": 5, "layers": 2, "heads": 2, "ffn": 24,
    "hidden": 12, "vocabulary": 9, "embedding": 10, "lstm_layers": 2, "max_symbols": 3,
}  # fmt: skip
BLANK = TINY["vocabulary"] - 1
WEIGHTS = 76_738_049
"""Numbers in the weights of torchaudio's base model with 4,097 symbols."""
EMFORMER_LAYER = {
    "attention.emb_to_key_value": (1024, 512), "attention.emb_to_query": (512, 512), "attention.out_proj": (512, 512),
    "pos_ff.0": (512,), "pos_ff.1": (2048, 512), "pos_ff.4": (512, 2048), "layer_norm_input": (512,),
    "layer_norm_output": (512,),
}  # fmt: skip
LSTM_LAYER = {"x2g": (2048, 512), "p2g": (2048, 512), "c_norm": (512,), "g_norm": (2048,)}
BASE = {
    "transcriber.input_linear": (128, 80),
    **{f"transcriber.transformer.emformer_layers.{n}.{k}": v for n in range(20) for k, v in EMFORMER_LAYER.items()},
    "transcriber.output_linear": (1024, 512), "transcriber.layer_norm": (1024,), "predictor.embedding": (4097, 512),
    "predictor.input_layer_norm": (512,),
    **{f"predictor.lstm_layers.{n}.{k}": v for n in range(3) for k, v in LSTM_LAYER.items()},
    "predictor.linear": (1024, 512), "predictor.output_layer_norm": (1024,), "joiner.linear": (4097, 1024),
}  # fmt: skip
NO_BIAS = ("input_linear", "embedding", "x2g", "p2g")
Weights = dict[str, torch.Tensor]


def tiny(seed: int = 0) -> Emformer:
    """Return a small model whose norms and biases are not what they are by default."""
    model = lively(build("emformer", seed=seed, **TINY), 2.0)
    generator = torch.Generator().manual_seed(seed)
    assert isinstance(model, Emformer)
    for value in model.torchaudio_weights().values():
        value.add_(0.3 * torch.randn(value.shape, generator=generator))
    return model


def exact(model: Emformer) -> Weights:
    return {name: value.double() for name, value in model.torchaudio_weights().items()}


class Alone:
    """One stream in plain tensors and double precision; its left context grows, and what is too old is not looked at.

    Args:
        w: Weights by torchaudio's names.
    """

    def __init__(self, w: Weights) -> None:
        self.w = w
        self.past: list[list[torch.Tensor]] = [[] for _ in range(TINY["layers"])]
        self.state = [(torch.zeros(TINY["embedding"], dtype=torch.float64),) * 2 for _ in range(TINY["lstm_layers"])]
        self.said = self.predict(BLANK)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, x: torch.Tensor, name: str, eps: float = 1e-5) -> torch.Tensor:
        return layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps)

    def encode(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the encoder's outputs (segment / stride, hidden) of a chunk (segment + right, features)."""
        stride, outputs = TINY["stride"], TINY["segment"] // TINY["stride"]
        mixed = self.linear(chunk, "transcriber.input_linear")
        x = torch.stack([mixed[i : i + stride].flatten() for i in range(0, len(mixed), stride)])
        for number, past in enumerate(self.past):
            x = self.layer(x, past, f"transcriber.transformer.emformer_layers.{number}", outputs)
        return self.norm(self.linear(x[:outputs], "transcriber.output_linear"), "transcriber.layer_norm")

    def layer(self, x: torch.Tensor, past: list[torch.Tensor], name: str, outputs: int) -> torch.Tensor:
        normed = self.norm(x, f"{name}.layer_norm_input")
        own = [*self.linear(normed, f"{name}.attention.emb_to_key_value")]
        key, value = torch.stack([*past[-TINY["left"] :], *own]).chunk(2, 1)
        past += own[:outputs]
        query, found = self.linear(normed, f"{name}.attention.emb_to_query"), []
        for q, k, v in zip(*(part.chunk(TINY["heads"], 1) for part in (query, key, value)), strict=True):
            found.append((q @ k.T / math.sqrt(q.shape[1])).softmax(1) @ v)
        x = x + self.linear(torch.cat(found, 1), f"{name}.attention.out_proj")
        inner = gelu(self.linear(self.norm(x, f"{name}.pos_ff.0"), f"{name}.pos_ff.1"))
        return self.norm(x + self.linear(inner, f"{name}.pos_ff.4"), f"{name}.layer_norm_output")

    def predict(self, token: int) -> torch.Tensor:
        x = self.norm(self.w["predictor.embedding.weight"][token], "predictor.input_layer_norm")
        for number, (h, before) in enumerate(self.state):
            name = f"predictor.lstm_layers.{number}"
            gates = self.norm(self.linear(x, f"{name}.x2g") + self.linear(h, f"{name}.p2g"), f"{name}.g_norm", 1e-3)
            into, forget, cell, out = gates.chunk(4)
            c = self.norm(forget.sigmoid() * before + into.sigmoid() * cell.tanh(), f"{name}.c_norm", 1e-3)
            x = out.sigmoid() * c.tanh()
            self.state[number] = (x, c)
        return self.norm(self.linear(x, "predictor.linear"), "predictor.output_layer_norm")

    def hear(self, chunk: torch.Tensor) -> list[list[int]]:
        """Return the symbols of each frame of a chunk."""
        emitted: list[list[int]] = []
        for frame in self.encode(chunk):
            emitted.append([])
            while len(emitted[-1]) < TINY["max_symbols"]:
                token = int(self.linear((frame + self.said).relu(), "joiner.linear").argmax())
                if token == BLANK:
                    break
                emitted[-1].append(token)
                self.said = self.predict(token)
        return emitted


def speech(streams: int, chunks: int) -> torch.Tensor:
    """Return (streams, chunks, segment + right, features); the look-ahead is the beginning of the next chunk."""
    frames = torch.randn(streams, chunks * TINY["segment"] + TINY["right"], TINY["features"],
                         generator=torch.Generator().manual_seed(1))  # fmt: skip
    return frames.unfold(1, TINY["segment"] + TINY["right"], TINY["segment"]).transpose(2, 3)


def test_the_base_model_has_the_weights_of_torchaudios() -> None:
    model = build("emformer")
    assert isinstance(model, Emformer)
    found = {name: tuple(value.shape) for name, value in model.torchaudio_weights().items()}
    want = {f"{name}.weight": shape for name, shape in BASE.items()}
    want |= {f"{name}.bias": shape[:1] for name, shape in BASE.items() if not name.endswith(NO_BIAS)}
    assert found == want
    assert sum(map(math.prod, found.values())) == WEIGHTS
    for cell in model.cells:
        outputs = cell.call(cell.random_inputs(1))
        assert [tuple(value.shape) for value in outputs] == [(1, *port.shape) for port in cell.outputs]
        assert all(value.isfinite().all() for value in outputs)
    audio, frames = model.cells[0].inputs[0], model.cells[0].outputs[0]
    assert (audio.shape, frames.shape) == ((20, 80), (4, 1024))


def test_rows_of_a_batch_are_independent() -> None:
    for cell in tiny().cells:
        cell.check()


def test_streams_of_different_age_share_a_batch() -> None:
    """The second begins when the first has more left context than it looks at. All is in double precision."""
    model, late = tiny(), 4
    encoder = model.modules["encoder"].double()
    first, second = speech(2, 9).double()
    alone = [Alone(exact(model)) for _ in range(2)]
    state = [torch.zeros(2, *port.shape, dtype=getattr(torch, port.dtype)) for port in model.heard]
    state[0] = state[0].double()
    for place, chunk in enumerate(first):
        if place == late:
            for value in state:
                value[1] = 0
        frames, *state = encoder(torch.stack((chunk, second[max(0, place - late)])), *state)
        assert (frames[0] - alone[0].encode(chunk)).abs().max() < 1e-9
        if place >= late:
            assert (frames[1] - alone[1].encode(second[place - late])).abs().max() < 1e-9
    assert state[1].tolist() == [TINY["left"]] * 2


def test_predictor_and_joiner_are_those_of_a_stream_alone() -> None:
    model = tiny()
    alone, decoder = Alone(exact(model)), model.modules["decoder"].double()
    frame = torch.ones(1, TINY["hidden"], dtype=torch.float64)
    state = [torch.zeros(1, *port.shape, dtype=torch.float64) for port in model.said]
    _, *state = decoder.predictor(torch.tensor([BLANK]), *state)
    for token in [3, 3, 0, BLANK]:
        said, *state = decoder.predictor(torch.tensor([token]), *state)
        want = alone.predict(token)
        assert (said[0] - want).abs().max() < 1e-9
        logits = alone.linear((frame[0] + want).relu(), "joiner.linear")
        assert (decoder.joint(frame, said)[0] - logits).abs().max() < 1e-9


def test_sessions_say_what_each_stream_says_alone() -> None:
    model = tiny(seed=2)
    audio = speech(4, 8)
    alone = [Alone(exact(model)) for _ in audio]
    want = [[one.hear(chunk.double()) for chunk in chunks] for one, chunks in zip(alone, audio, strict=True)]
    per_frame = {len(frame) for chunks in want for frames in chunks for frame in frames}
    assert per_frame >= {0, 1, TINY["max_symbols"]}, "some frames are silent, some are cut at their bound"
    with CellularEngine(model) as engine:
        handles = []
        for chunks in audio:  # each begins when those before it have been served in part
            session = engine.open_session()
            handles.append([session.submit({"audio": chunk.tolist()}) for chunk in chunks])
            handles[-1][0].result(HANG_S)
        found = [[handle.result(HANG_S)["tokens"] for handle in of_one] for of_one in handles]
    assert found == [[[t for frame in frames for t in frame] for frames in chunks] for chunks in want]


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_torchaudios_files_and_ours_give_the_same_model(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    theirs, ours = tmp_path / f"theirs{suffix}", tmp_path / "ours.safetensors"
    (save_file if suffix == ".safetensors" else torch.save)(model.torchaudio_weights(), theirs)
    save(model, ours)
    sizes = {name: size for name, size in TINY.items() if name != "vocabulary"}
    for again in (load(ours), load_torchaudio(theirs, **sizes)):
        assert (again.kind, again.config) == ("emformer", TINY)
        weights = again.torchaudio_weights()  # type: ignore[attr-defined]
        assert all(weights[name].equal(value) for name, value in model.torchaudio_weights().items())
    monkeypatch.setattr(Emformer, "sizes", {**TINY, "vocabulary": 1})
    assert load(theirs).config == TINY
    assert main(["profile", str(theirs), "--batches", "1,2", "--repeats", "1"]) == 0


def changed(name: str, value: Any) -> dict[str, Any]:
    weights: dict[str, Any] = dict(tiny().torchaudio_weights())
    return {other: kept for other, kept in {**weights, name: value}.items() if kept is not None}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (changed("transcriber.layer_norm.bias", None), r"has no weights transcriber\.layer_norm\.bias \(1 such\)"),
        (changed("joiner.linear.bias", None), r"has no weights joiner\.linear\.bias \(1 such\)"),
        (changed("joiner.scale", torch.ones(1)), r"has weights joiner\.scale, which the model has not \(1 such\)"),
        (changed("joiner.linear.weight", torch.ones(9, 3)), r"linear\.weight are \[9, 3\], must be \[9, 12\]"),
        (changed("predictor.linear.bias", torch.full((12,), math.inf)), r"linear\.bias hold values that are not fin"),
        (
            changed("predictor.linear.bias", torch.ones(12).to_sparse()),
            "linear.bias' is a Tensor: must be a state dict",
        ),
        (changed("epoch", 3), "'epoch' is a int: must be a state dict"),
        ({"state_dict": {}}, "'state_dict' is a dict: must be a state dict"),
        ([torch.ones(1)], "holds a list: must be a state dict"),
        (Path("code"), r"cannot be read \(UnpicklingError\): must be a state dict"),
        (None, r"cannot be read \(EOFError\): must be a state dict"),
    ],
)
def test_a_file_that_is_not_such_a_model_is_refused_in_one_line(found: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.touch()
    if found is not None:
        torch.save(found, path)
    sizes = {name: size for name, size in TINY.items() if name != "vocabulary"}
    with pytest.raises(ModelError, match=rf"^m\.pt: .*{said}.*$"):
        load_torchaudio(path, **sizes)


def test_weights_of_neither_format_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "m.pt")
    with pytest.raises(ModelError, match=r"m\.pt: has no vllm_ext_cellular .* nor weights joiner\.linear\.bias"):
        load(tmp_path / "m.pt")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"segment": 10}, "segment=10 of emformer: must be a multiple of stride=4"),
        ({"right": 3}, "right=3 of emformer: must be a multiple of stride=4"),
        ({"heads": 3}, r"heads=3 of emformer: must divide reduced \* stride=16"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build("emformer", **{**TINY, **sizes})


FRAMES = [[0.0] * 6] * 12


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({}, "audio=None: must be a list of 12 lists of 6 finite numbers"),
        ({"audio": FRAMES[1:]}, "must be a list of 12 lists of 6 finite numbers"),
        ({"audio": [*FRAMES[1:], [0.0] * 5]}, r"audio\[11\]=\[.*\]: must be a list of 6 finite numbers"),
        ({"audio": [[0.0] * 5 + [math.nan], *FRAMES[1:]]}, r"audio\[0\]\[5\]=nan: must be a finite number"),
        ({"audio": [*FRAMES[1:], ["1"] * 6]}, r"audio\[11\]\[0\]='1': must be a finite number"),
        ({"audio": FRAMES, "tokens": [1]}, r"tokens=\[1\]: must be left out; known are audio"),
    ],
)
def test_a_malformed_chunk_is_refused_by_field(request_: dict[str, Any], said: str) -> None:
    model = build("emformer", **TINY)
    with pytest.raises(RequestError, match=said):
        model.parse(request_)
