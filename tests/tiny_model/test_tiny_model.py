"""The embedded tiny model: the same bytes for the same seed, a tokenizer that always streams text, varied output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from vllm_ext.cli import tiny_model as command
from vllm_ext.tiny_model import Style, build
from vllm_ext.tiny_model.tokenizer import SPECIAL_TOKENS


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("style", list(Style))
def test_same_seed_gives_same_bytes_in_another_process(style: Style, cache: Path, tmp_path: Path) -> None:
    here = build(style, 7, cache)
    code = "import sys; from vllm_ext.cli.tiny_model import main; sys.exit(main(sys.argv[1:]))"
    run = [sys.executable, "-c", code, "--style", style.value, "--seed", "7", "--dir", str(tmp_path)]
    there = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert contents(Path(there.rstrip("\n"))) == contents(here)


def test_another_seed_changes_the_weights_only(cache: Path) -> None:
    one, two = contents(build("llama", 1, cache)), contents(build("llama", 2, cache))
    assert {name for name in one if one[name] != two[name]} == {"model.safetensors", "MANIFEST.json"}


@pytest.mark.parametrize("style", list(Style))
def test_tokenizer_is_as_large_as_the_model(style: Style, cache: Path) -> None:
    directory = build(style, 0, cache)
    config = json.loads((directory / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert sorted(tokenizer.get_vocab().values()) == list(range(config["vocab_size"]))
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert config["max_position_embeddings"] >= 2048


def test_every_ordinary_token_decodes_to_ascii_text(cache: Path) -> None:
    tokenizer = Tokenizer.from_file(str(build(seed=0, directory=cache) / "tokenizer.json"))
    texts = [tokenizer.decode([token]) for token in range(len(SPECIAL_TOKENS), tokenizer.get_vocab_size())]
    assert all(text and text.isascii() for text in texts)


@pytest.mark.parametrize(
    ("text", "decoded"),
    [
        ("plain ~ text\n\twith 3 lines\n", "plain ~ text\n\twith 3 lines\n"),
        ("", ""),
        ("Café", "Cafe"),
        ("日 \x00", "? ?"),
    ],
)
def test_any_text_can_be_encoded(text: str, decoded: str, cache: Path) -> None:
    tokenizer = Tokenizer.from_file(str(build(seed=0, directory=cache) / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == decoded


@pytest.mark.parametrize("style", list(Style))
def test_greedy_output_is_varied_and_never_ends_by_itself(style: Style, cache: Path) -> None:
    """A model that repeats itself would hide a KV cache mixed up by a scheduler."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = build(style, 0, cache)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    chat = [{"role": "user", "content": "Why does the gull walk?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, do_sample=False, max_new_tokens=100)[0, prompt["input_ids"].shape[1] :].tolist()
    assert len(output) == 100
    assert len(set(output)) > 60


@pytest.mark.parametrize(
    ("variable", "value", "folder"),
    [("VLLM_EXT_CACHE", "own", "own"), ("XDG_CACHE_HOME", "xdg", "xdg/vllm-ext")],
)
def test_default_folder_follows_the_environment(
    variable: str, value: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_EXT_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / value))
    assert build().is_relative_to(tmp_path / folder)


@pytest.mark.parametrize(
    ("style", "seed", "field"), [("gpt", 0, "style"), ("llama", -1, "seed"), ("llama", True, "seed")]
)
def test_bad_argument_is_named_and_nothing_is_written(style: str, seed: int, field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{field}="):
        build(style, seed, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_command_reports_a_folder_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert command.main(["--dir", str(tmp_path / "file")]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "file" in err
