"""From a dataset to a store: which rows count, what lengths are counted in, and what becomes of what was there."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_ext.datasets import DatasetError, WorkloadRow
from vllm_ext.prediction import decoder_file, seeding, store_files
from vllm_ext.prediction.folder import DECODER, STORE
from vllm_ext.prediction.prompt_text import PromptText
from vllm_ext.prediction.store_rows import Entries
from vllm_ext.prediction.vector_store import VectorStore

from .folder_parts import make_decoder
from .store_parts import DIM, random_units

MAX_BYTES = 2**20


class FakeEncoder:
    """A text's vector depends on the text and, in its last bits, on the texts beside it, as a real one's does."""

    dim = DIM

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.batches.append(list(texts))
        rows = [random_units(1, DIM, seed=int.from_bytes(text.encode()[:6], "little"))[0] for text in texts]
        return np.stack(rows) * np.float32(1 + 1e-6 * len(texts))


def write_jsonl(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(path: Path, count: int) -> Path:
    rows = [{"prompt": f"question {n}", "output": "word " * n, "kind": f"k{n % 2}"} for n in range(1, count + 1)]
    return write_jsonl(path, rows)


def prompts_of(rows: seeding.Rows) -> list[str | None]:
    return [row.prompt for row in rows.rows]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_come_in_file_order_and_through_the_filter(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 6)
    assert prompts_of(seeding.read_rows(path)) == [f"question {n}" for n in range(1, 7)]
    found = seeding.read_rows(path, where={"kind": frozenset(["k0"])})
    assert prompts_of(found) == ["question 2", "question 4", "question 6"]


def test_a_sample_is_random_under_its_seed_and_in_file_order(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 200)
    samples = [prompts_of(seeding.read_rows(path, max_rows=20, seed=seed)) for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]
    order = [int((prompt or "").split()[1]) for prompt in samples[0]]
    assert order == sorted(set(order))
    assert max(order) > 100, "not the first rows of the file"
    assert len(prompts_of(seeding.read_rows(path, max_rows=999))) == 200


def test_rows_without_a_text_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "output_tokens": 3}, {"prompt_tokens": 7, "output_tokens": 3}]
    found = seeding.read_rows(write_jsonl(tmp_path / "a.jsonl", rows))
    assert (prompts_of(found), found.without_text, len(found.dataset.rows)) == (["a"], 1, 2)


def test_files_that_teach_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,10,20\n")
    with pytest.raises(DatasetError, match=r"trace\.csv: the azure format gives lengths only"):
        seeding.read_rows(tmp_path / "trace.csv")
    with pytest.raises(DatasetError, match=r"none\.jsonl"):
        seeding.read_rows(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="max_rows=0"):
        seeding.read_rows(numbered(tmp_path / "a.jsonl", 3), max_rows=0)


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_a_stated_length_goes_before_a_counted_one_and_none_is_below_1() -> None:
    rows = [
        WorkloadRow(source_id="1", output_text="a b c", output_tokens=40),
        WorkloadRow(source_id="2", output_text="a b c"),
        WorkloadRow(source_id="3", output_text=""),
        WorkloadRow(source_id="4", output_tokens=0),
    ]
    lengths, counted = seeding.lengths_of(rows, lambda text: len(text.split()), "words")
    assert lengths.tolist() == [40, 3, 1, 1]
    assert lengths.dtype == np.int64
    assert counted == {seeding.OF_DATASET: 2, "words": 2}


def test_a_tokenizer_is_a_file_or_its_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    made = Tokenizer(WordLevel({"<s>": 0, "?": 1, "yes": 2}, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        count = seeding.token_counter(path)
        assert [count(text) for text in ("", "yes yes no", "\ud800")] == [0, 3, 1], "special tokens don't count"


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer='.*nothing': must be a tokenizer\.json"):
        seeding.token_counter(tmp_path / "nothing")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json can't be read"):
        seeding.token_counter(tmp_path)


# --- texts and vectors ------------------------------------------------------------------------------------------------


def test_the_text_of_a_prompt_is_that_of_the_service() -> None:
    rendered = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n"
    rows = [WorkloadRow(source_id="1", prompt="Plain."), WorkloadRow(source_id="2", prompt=rendered)]
    rule = PromptText(max_tokens=128)
    assert seeding.texts_of(rows, rule) == ["Plain.", rule.from_rendered(rendered)]
    assert "im_start" not in seeding.texts_of(rows, rule)[1]


def test_equal_texts_are_embedded_once_and_have_equal_vectors() -> None:
    encoder, told = FakeEncoder(), list[int]()
    texts = [f"text {n % 70}" for n in range(200)]
    vectors = seeding.embed(encoder, texts, told.append)
    assert sorted(text for batch in encoder.batches for text in batch) == sorted(set(texts))
    assert len(encoder.batches) == 2, "in several parts, or the bar would not move"
    assert told == sorted(told)
    assert told[-1] == 200
    assert vectors.shape == (200, DIM)
    for n in range(200):
        assert vectors[n].tobytes() == vectors[n % 70].tobytes()
        np.testing.assert_allclose(vectors[n], FakeEncoder().encode([texts[n]])[0], atol=1e-3)


def test_the_longest_texts_are_embedded_first() -> None:
    encoder = FakeEncoder()
    seeding.embed(encoder, ["a", "a" * 900, "b" * 30])
    assert encoder.batches == [["a" * 900, "b" * 30, "a"]]


# --- store ------------------------------------------------------------------------------------------------------------


def make_entries(count: int, seed: int, *, prompts: bool = False) -> Entries:
    texts = [f"prompt {seed} {n}" for n in range(count)] if prompts else None
    return Entries.checked(DIM, random_units(count, DIM, seed), range(1, count + 1), ["m"] * count, prompts=texts)


def test_what_is_added_comes_after_what_was_there() -> None:
    before, added = make_entries(3, 1), make_entries(2, 2)
    store = seeding.filled(before, added, encoder="enc", capacity=10, keep_prompts=False)
    assert store.entries().lengths.tolist() == [1, 2, 3, 1, 2]
    assert (store.encoder, store.index, store.keeps_prompts) == ("enc", "flat", False)
    full = seeding.filled(before, added, encoder="enc", capacity=4, keep_prompts=False)
    assert full.entries().lengths.tolist() == [2, 3, 1, 2], "the oldest go"


def test_texts_are_kept_only_if_they_are_to_be() -> None:
    before, added = make_entries(1, 1, prompts=True), make_entries(1, 2, prompts=True)
    assert seeding.filled(before, added, encoder="e", capacity=9, keep_prompts=False).entries().prompts is None
    kept = seeding.filled(before, added, encoder="e", capacity=9, keep_prompts=True).entries().prompts
    assert kept == ("prompt 1 0", "prompt 2 0")


def make_store(count: int) -> VectorStore:
    return seeding.filled(None, make_entries(count, 5), encoder="enc", capacity=99, keep_prompts=False)


def test_store_and_decoder_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert seeding.commit(folder, make_store(3), make_decoder(), keep_decoder=False, max_bytes=MAX_BYTES) == 3
    assert len(store_files.read(folder / STORE)[0]) == 3
    assert decoder_file.load(folder / DECODER).spec.encoder == "enc"


@pytest.mark.parametrize("keep", [True, False])
def test_without_a_new_decoder_the_old_one_stays_only_if_it_may(tmp_path: Path, keep: bool) -> None:
    seeding.commit(tmp_path, make_store(3), make_decoder(), keep_decoder=False, max_bytes=MAX_BYTES)
    seeding.commit(tmp_path, make_store(5), None, keep_decoder=keep, max_bytes=MAX_BYTES)
    assert len(store_files.read(tmp_path / STORE)[0]) == 5
    assert (tmp_path / DECODER).exists() == keep


def test_a_store_that_can_not_be_written_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeding.commit(tmp_path, make_store(3), make_decoder(), keep_decoder=False, max_bytes=MAX_BYTES)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        seeding.commit(tmp_path, make_store(5), None, keep_decoder=False, max_bytes=MAX_BYTES)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_ctrl_c_waits_while_files_are_written() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    outside = signal.signal(signal.SIGINT, interrupt)
    try:
        with seeding.uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(ZeroDivisionError), seeding.uninterrupted():
            raise ZeroDivisionError
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGINT, outside)


def test_gzipped_datasets_are_read(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 3)
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert prompts_of(seeding.read_rows(packed)) == prompts_of(seeding.read_rows(path))
