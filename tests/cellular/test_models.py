"""Malformed requests name their field, and files of weights are read whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vllm_ext.cellular.models import ModelError, RequestError, build, load, save
from vllm_ext.cellular.models.treelstm import MAX_DEPTH, flattened


def deep(levels: int) -> Any:
    tree: Any = 0
    for _ in range(levels):
        tree = [tree, 1]
    return tree


def chunk(frame: list[Any]) -> dict[str, Any]:
    return {"audio": [frame] * 4}


@pytest.mark.parametrize(
    ("kind", "request_", "said"),
    [
        ("lstm", {}, "tokens=None"),
        ("lstm", {"tokens": "12"}, "tokens='12'"),
        ("lstm", {"tokens": []}, r"tokens=\[\]"),
        ("lstm", {"tokens": [1, 99]}, r"tokens=\[1, 99\]: must be a list of 1 to 4096 token ids from 0 to 31"),
        ("lstm", {"tokens": [1, True]}, "tokens="),
        ("lstm", {"tokens": [1.0]}, "tokens="),
        ("lstm", {"tokens": [10**30]}, "tokens="),
        ("lstm", {"tokens": [1], "token": 3}, "token=3: must be left out; known are tokens"),
        ("seq2seq", {"tokens": [1], "max_steps": 0}, "max_steps=0: must be a whole number from 1 to 4096"),
        ("seq2seq", {"tokens": [1], "max_steps": "9"}, "max_steps='9'"),
        ("seq2seq", {"tokens": [1], "length": 3}, "length=3: must be left out"),
        ("treelstm", {"tree": [1, 2, 3]}, r"tree=\[1, 2, 3\]: must be a token id or a list of two trees"),
        ("treelstm", {"tree": [1, "a"]}, "tree="),
        ("treelstm", {"tree": deep(MAX_DEPTH + 1)}, "at most 200 deep"),
        ("rnnt", {"audio": [0.0] * 7}, "audio="),
        ("rnnt", {"audio": "1" * 128}, "a list of 4 lists of 128 finite numbers"),
        ("rnnt", chunk([0.0, float("nan")] * 64), r"audio\[0\]\[1\]=nan: must be a finite number"),
        ("rnnt", chunk([0.0] * 127 + ["1"]), r"audio\[0\]\[127\]='1': must be a finite number"),
        ("rnnt", chunk([True] * 128), r"audio\[0\]\[0\]=True: must be a finite number"),
        ("rnnt", chunk([0, 10**400] * 64), r"audio\[0\]\[1\]=1000"),
        ("rnnt", chunk([1e300] * 128), r"audio\[0\]\[0\]=1e\+300"),
        ("rnnt", {"audio": [[1], 2, 3, 4]}, r"audio\[0\]=\[1\]: must be a list of 128 finite numbers"),
        ("rnnt", {"audio": {"a": 1}}, "audio="),
    ],
)
def test_a_malformed_request_is_refused_by_field(kind: str, request_: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        build(kind).parse(request_)


def test_a_tree_is_read_from_left_to_right() -> None:
    assert flattened([[1, 2], 3]) == ([1, 2, 3], bytes([0, 0, 1, 0, 1]))
    assert len(flattened(deep(MAX_DEPTH))[0]) == MAX_DEPTH + 1


@pytest.mark.parametrize("kind", ["lstm", "seq2seq", "treelstm", "rnnt"])
def test_a_file_of_weights_gives_the_same_model(kind: str, tmp_path: Path) -> None:
    model = build(kind, seed=5, hidden=8)
    save(model, tmp_path / "m.safetensors")
    again = load(tmp_path / "m.safetensors")
    assert (again.kind, again.config) == (kind, model.config)
    for name, module in model.modules.items():
        for key, value in module.state_dict().items():
            assert torch.equal(again.modules[name].state_dict()[key], value)


def test_weights_that_are_damaged_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"no weights")
    with pytest.raises(ModelError, match=r"m\.safetensors: cannot be read"):
        load(path)
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ModelError, match="has no vllm_ext_cellular"):
        load(path)
    save(build("lstm", hidden=8), path)
    metadata = {"vllm_ext_cellular": '{"kind": "lstm", "sizes": {"hidden": 8}}'}
    tensors = load_file(path)
    tensors["step.gates.bias"][3] = float("nan")
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ModelError, match=r"weights step\.gates\.bias hold values that are not finite"):
        load(path)
    del tensors["step.gates.bias"]
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ModelError, match=r"has no weights step\.gates\.bias \(1 such\)"):
        load(path)


@pytest.mark.parametrize(
    ("kind", "sizes", "said"),
    [
        ("gru", {}, "model='gru'"),
        ("lstm", {"width": 3}, "width=3: lstm has"),
        ("lstm", {"hidden": 0}, "hidden=0 of lstm"),
    ],
)
def test_unknown_models_and_sizes_are_refused(kind: str, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build(kind, **sizes)


def test_field_names_that_cannot_be_printed_or_are_long_are_shown_as_they_can_be() -> None:
    for field, shown in (("\ud800", r"'\ud800'=1: must be left out"), ("x" * 3_000_000, "'" + "x" * 60 + "'=1")):
        with pytest.raises(RequestError) as raised:
            build("lstm").parse({"tokens": [1], field: 1})
        assert str(raised.value).startswith(shown)
        assert str(raised.value).isascii()


def test_weights_of_types_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save(build("lstm", hidden=8), path)
    with safe_open(path, framework="pt") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name).int() for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata=about)
    with pytest.raises(ModelError, match=r"are torch\.int32, must be torch\.float32 or"):
        load(path)
