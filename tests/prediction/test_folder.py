"""A predictor's folder: one per served model, and a decoder that is used only if it is whole and fits."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.extent import HANG_S
from vllm_ext.prediction import decoder_file, folder
from vllm_ext.prediction.folder import DECODER, default_folder, load_decoder

from .folder_parts import make_decoder


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "cache"))


def test_each_model_has_a_folder_of_its_own_in_the_cache(tmp_path: Path) -> None:
    names = [
        "a/b",
        "a-b",
        "a--b",
        "A/b",
        "/models/a/b",
        "../a/b",
        "..",
        ".",
        "日本",
        "中国",
        "x" * 300,
        "y" * 300,
        "\ud800",
    ]
    folders = [default_folder(name) for name in names]
    assert {path.parent for path in folders} == {tmp_path / "cache" / "predictors"}
    assert len({path.name for path in folders}) == len(names)
    assert max(len(path.name) for path in folders) < 140
    assert default_folder("a/b") == folders[0]
    assert folders[0].name.startswith("a-b-")
    assert not (tmp_path / "cache").exists(), "it is only named"


@pytest.mark.parametrize("name", ["", "  "])
def test_a_model_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"model=.*must be the name"):
        default_folder(name)


@pytest.mark.parametrize("place", ["nowhere", "empty", "file"])
def test_no_decoder_is_none_and_nothing_to_warn_about(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    assert load_decoder(tmp_path / place, "enc") is None
    assert not caplog.records
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_a_decoder_of_the_encoder_is_used(tmp_path: Path) -> None:
    decoder = make_decoder()
    decoder_file.save(decoder, tmp_path / DECODER)
    found = load_decoder(tmp_path, "enc")
    assert found is not None
    assert found.spec == decoder.spec
    assert all((found.tensors[name] == tensor).all() for name, tensor in decoder.tensors.items())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 0x10
    path.write_bytes(raw)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "flipped": flip,
    "empty": lambda path: path.write_bytes(b""),
    "foreign": lambda path: path.write_text("not a decoder"),
    "a folder": make_folder,
    "another encoder": lambda path: decoder_file.save(make_decoder(encoder="other"), path),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_decoder_that_can_not_be_used_is_reported_and_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    path = tmp_path / DECODER
    for number in (1, 2):
        caplog.clear()
        decoder_file.save(make_decoder(), path)
        damage(path)
        with caplog.at_level(logging.WARNING):
            assert load_decoder(tmp_path, "enc") is None
        (record,) = caplog.records
        assert str(path) in record.getMessage()
        assert f"set aside as {DECODER}.damaged-{number}" in record.getMessage()
        assert (tmp_path / f"{DECODER}.damaged-{number}").exists()
        assert not path.exists()
    caplog.clear()
    assert load_decoder(tmp_path, "enc") is None
    assert not caplog.records, "once is enough"


def test_one_that_can_not_be_set_aside_is_reported_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / DECODER).write_text("damaged")

    def read_only(self: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder.Path, "rename", read_only)
    with caplog.at_level(logging.WARNING):
        assert load_decoder(tmp_path, "enc") is None
    (record,) = caplog.records
    assert "can't be set aside" in record.getMessage()
    assert [path.name for path in tmp_path.iterdir()] == [DECODER]


def test_one_that_can_not_be_read_is_an_error_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder_file.save(make_decoder(), tmp_path / DECODER)

    def failing(self: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(folder.Path, "read_bytes", failing)
    with pytest.raises(OSError, match="Input/output"):
        load_decoder(tmp_path, "enc")
    assert [path.name for path in tmp_path.iterdir()] == [DECODER]


def test_reading_a_decoder_needs_no_torch(tmp_path: Path) -> None:
    decoder_file.save(make_decoder(), tmp_path / DECODER)
    code = (
        "import sys; from pathlib import Path\n"
        "from vllm_ext.prediction.folder import load_decoder\n"
        "assert load_decoder(Path(sys.argv[1]), 'enc') is not None\n"
        "print([name for name in ('torch', 'faiss', 'scipy', 'sentence_transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    assert done.stdout == "[]\n"
