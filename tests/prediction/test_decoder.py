"""Decoder: its network by hand, bounds that hold for every input, and its files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.prediction import decoder_file
from vllm_ext.prediction.decoder import Decoder, DecoderSpec
from vllm_ext.prediction.decoder_file import FORMAT, load, save

SPEC = DecoderSpec(dim=3, hidden=(4,), features=("log_prompt_tokens",), encoder="toy 1", max_tokens=5000)


def tensors(spec: DecoderSpec = SPEC, seed: int = 0, scale: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    made = {name: (scale * rng.standard_normal(s)).astype(np.float32) for name, s in spec.shapes().items()}
    return {**made, "feature_scale": np.abs(made["feature_scale"]) + np.float32(0.1)}


def decoder(seed: int = 0, scale: float = 1.0) -> Decoder:
    return Decoder(SPEC, tensors(seed=seed, scale=scale))


def directions(n: int, seed: int = 1) -> Any:
    v = np.random.default_rng(seed).standard_normal((n, 3))
    return (v / np.linalg.norm(v, axis=1, keepdims=True)).astype(np.float32)


def test_the_network_by_hand() -> None:
    """Hidden unit max(0, x0 - x1 + 0.5 * feature): (1, 0, 0), feature (9 - 5) / 2 = 2 gives 2, so m = 2 * 2 + 1 = 5 and
    g = 2 - 2 = 0, softplus(0) = ln 2: P50 = e^5 = 148.4, P90 twice that."""
    spec = replace(SPEC, hidden=(1,))
    parts = {
        "feature_mean": [5.0], "feature_scale": [2.0], "weight0": [[1.0], [-1.0], [0.0], [0.5]], "bias0": [0.0],
        "weight1": [[2.0, 1.0]], "bias1": [1.0, -2.0],
    }  # fmt: skip
    d = Decoder(spec, {name: np.array(value, np.float32) for name, value in parts.items()})
    (e,) = d.predict([[1, 0, 0]], [[9.0]])
    assert e[:3] == (148, 297, "decoder")
    (e,) = d.predict([[0, 1, 0]], [[5.0]])
    assert e.tokens == round(math.e), "the unit is off: only the bias is left"
    assert d.predict([[1, 0, 0]], [[9.0]], 200)[0][:2] == (148, 200)
    assert [e.tokens for e in d.predict([[1, 0, 0]] * 2, [[9.0]] * 2, [20, 90])] == [20, 90]


@given(
    seed=st.integers(0, 50), scale=st.floats(0, 100), feature=st.floats(width=32, allow_nan=False, allow_infinity=False)
)
def test_estimates_are_ordered_and_bounded_for_any_weights_and_input(seed: int, scale: float, feature: float) -> None:
    for e in decoder(seed, scale).predict(directions(4), np.full((4, 1), feature)):
        assert 1 <= e.tokens <= e.p90 <= SPEC.max_tokens


def test_no_prompt_is_no_estimate() -> None:
    assert decoder().predict(np.zeros((0, 3)), np.zeros((0, 1))) == []


@pytest.mark.parametrize(
    ("embeddings", "features", "message"),
    [
        (np.zeros((2, 4)), np.zeros((2, 1)), r"embeddings: shape \[2, 4\], must be \[n, 3\]"),
        (np.zeros(3), np.zeros((1, 1)), r"embeddings: shape \[3\]"),
        (np.full((1, 3), 1.0), np.zeros((1, 1)), "L2-normalised"),
        (np.full((1, 3), np.nan), np.zeros((1, 1)), "finite"),
        (np.zeros((2, 3)), np.zeros((1, 1)), r"features: shape \[1, 1\], must be \[2, 1\]"),
        (np.zeros((2, 3)), None, "features"),
        (np.zeros((1, 3)), np.full((1, 1), np.inf), "features: must be finite"),
    ],
)
def test_wrong_inputs_are_refused(embeddings: Any, features: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder().predict(embeddings, features)
    with pytest.raises(ValueError, match="1 bounds for 2 prompts"):
        decoder().predict(np.zeros((2, 3)), np.zeros((2, 1)), [5])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bias1", lambda t: np.array([np.nan, 0], np.float32), "bias1: has values that are not finite"),
        ("weight0", lambda t: t * np.float32(1e31), "weight0: a unit can reach"),
        ("weight0", lambda t: t[:2], r"weight0: float32 \[2, 4\], must be float32 \[4, 4\]"),
        ("weight0", lambda t: t.astype(np.float64), "must be float32"),
        ("feature_scale", lambda t: t * 0, "feature_scale: must be greater than 0"),
    ],
)
def test_weights_that_could_give_nan_are_refused(name: str, change: Callable[[Any], Any], message: str) -> None:
    good = tensors()
    with pytest.raises(ValueError, match=message):
        Decoder(SPEC, {**good, name: change(good[name])})


def test_missing_tensors_and_wrong_specs_are_refused() -> None:
    with pytest.raises(ValueError, match="must be"):
        Decoder(SPEC, {})
    for change, message in (({"dim": 0}, "dim=0"), ({"hidden": (4, -1)}, "hidden=-1"), ({"min_tokens": 9999}, "ascend"),
                            ({"skill": math.nan}, "skill=nan"), ({"num_examples": -1}, "num_examples=-1"),
                            ({"skill": 10**400}, "skill=1000.*must be a finite number"), ({"skill": "x"}, "skill='x'"),
                            ({"p90_coverage": -math.inf}, "p90_coverage=-inf"), ({"max_tokens": 9e3}, "max_tokens=9"),
                            ({"num_examples": 1.5}, "num_examples=1.5"), ({"encoder": None}, "encoder=None"),
                            ({"features": ("log", 3)}, "features=")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            replace(SPEC, **change)


def test_a_decoder_cannot_be_changed_from_outside() -> None:
    given_tensors = tensors()
    d = Decoder(SPEC, given_tensors)
    before = d.predict(directions(3), np.zeros((3, 1)))
    given_tensors["weight0"][:] = 0
    with pytest.raises(ValueError, match="read-only"):
        d.tensors["weight0"][:] = 0
    assert d.predict(directions(3), np.zeros((3, 1))) == before


# ---- files


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    d, path = decoder(), tmp_path / "new" / "decoder.safetensors"
    save(d, path)
    again = load(path, encoder="toy 1")
    assert again.spec == d.spec
    assert again.predict(directions(9), np.ones((9, 1))) == d.predict(directions(9), np.ones((9, 1)))
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_equal_decoders_give_equal_bytes(tmp_path: Path) -> None:
    save(decoder(), tmp_path / "a")
    save(load(tmp_path / "a"), tmp_path / "b")
    save(decoder(seed=1), tmp_path / "c")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "decoder.safetensors"
    save(decoder(), path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"decoder\.safetensors"):
            load(path)


@pytest.mark.parametrize("size", [0, 4, 8, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "decoder.safetensors"
    save(decoder(), path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"decoder\.safetensors: damaged"):
        load(path)


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a toy decoder whose description was changed and whose container is intact."""
    from safetensors.numpy import save as pack

    save(decoder(), path)
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    description = json.loads(header["__metadata__"]["vllm_ext"])
    change(description)
    path.write_bytes(pack(decoder().tensors, {"vllm_ext": json.dumps(description)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="vllm-ext length decoder 2"), f"must be '{FORMAT}'"),
        (lambda d: d["spec"].update(skill=0.9), "SHA-256"),
        (lambda d: d.pop("spec"), "damaged: 'spec'"),
        (lambda d: d.update(sha256="0"), "SHA-256"),
    ],
    ids=["other format", "spec changed", "no spec", "other digest"],
)
def test_a_changed_description_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    rewritten(tmp_path / "decoder", change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "decoder")


def test_foreign_files_and_encoders_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save as pack

    path = tmp_path / "decoder"
    save(decoder(), path)
    with pytest.raises(ValueError, match="encoder='toy 1': must be the one in use, 'toy 2'"):
        load(path, encoder="toy 2")
    path.write_bytes(pack({"x": np.zeros(3, np.float32)}))
    with pytest.raises(ValueError, match="no safetensors file of a decoder"):
        load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="damaged"):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")


@pytest.mark.parametrize("nested", ["[" * 200_000, '{"format":' * 200_000], ids=["lists", "objects"])
def test_a_description_nested_without_end_is_damage(tmp_path: Path, nested: str) -> None:
    from safetensors.numpy import save as pack

    (tmp_path / "decoder").write_bytes(pack(decoder().tensors, {"vllm_ext": nested}))
    with pytest.raises(ValueError, match="damaged, or no safetensors file of a decoder"):
        load(tmp_path / "decoder")


@pytest.mark.parametrize(
    "change",
    [{"skill": 10**400}, {"num_examples": [10]}, {"features": [1]}, {"encoder": 7}],
    ids=lambda c: next(iter(c)),
)
def test_a_spec_that_can_not_be_is_damage_though_its_digest_is_right(tmp_path: Path, change: dict[str, Any]) -> None:
    def redigested(description: dict[str, Any]) -> None:
        description["spec"].update(change)
        description["sha256"] = decoder_file._digest(description["spec"], decoder().tensors)

    rewritten(tmp_path / "decoder", redigested)
    with pytest.raises(ValueError, match=f"decoder: damaged: {next(iter(change))}="):
        load(tmp_path / "decoder")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "decoder"
    save(decoder(), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("vllm_ext.observability.files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(decoder(seed=1), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["decoder"]
