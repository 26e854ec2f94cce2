"""Readers of workload files and the synthetic workloads."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_ext import datasets
from vllm_ext.datasets import DatasetError, WorkloadRow
from vllm_ext.simulation import synthetic

CONVERSATION = {
    "id": "c1",
    "conversations": [
        {"from": "gpt", "value": "Welcome"},
        {"from": "human", "value": "Why?"},
        {"from": "gpt", "value": "Because."},
        {"from": "human", "value": "Really?"},
        {"from": "gpt", "value": "Yes."},
    ],
}
MONOLOGUE = {"id": "c2", "conversations": [{"from": "human", "value": "Anyone?"}]}
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48,396,109\n"
LMSYS = "index,output_token_length,predicted_length,latency,model\n0,40,0,0.02,vicuna-13b\n1,0,0,0.01,llama\n"
MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]}


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    return path


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@pytest.mark.parametrize("name", ["s.json", "s.jsonl", "s.jsonl.gz"])
def test_sharegpt_row_is_the_first_answered_question(tmp_path: Path, name: str) -> None:
    content = json.dumps([CONVERSATION, MONOLOGUE]) if name == "s.json" else lines(CONVERSATION, MONOLOGUE)
    dataset = datasets.load(write(tmp_path, name, content))
    assert dataset.rows == (WorkloadRow(source_id="c1", prompt="Why?", output_text="Because."),)
    assert (dataset.name, dataset.format, dataset.skipped) == (name, "sharegpt", 1)


def test_alpaca_joins_instruction_and_input(tmp_path: Path) -> None:
    rows = [{"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Hi", "input": "", "output": ""}]
    dataset = datasets.load(write(tmp_path, "a.json", json.dumps(rows)))
    assert [row.prompt for row in dataset.rows] == ["Add.\n\n1 2", "Hi"]
    assert [row.output_text for row in dataset.rows] == ["3", ""]
    assert dataset.rows[1].source_id == "entry 2"


def test_jsonl_takes_texts_or_counts(tmp_path: Path) -> None:
    content = lines({"id": 1, "prompt": "p", "output": "o"}, {"prompt_tokens": 3, "output_tokens": 4, "timestamp": 1.5})
    assert datasets.load(write(tmp_path, "x.jsonl", content)).rows == (
        WorkloadRow(source_id="1", prompt="p", output_text="o"),
        WorkloadRow(source_id="line 2", prompt_tokens=3, output_tokens=4, arrival_s=1.5),
    )


def test_burstgpt_skips_and_counts_failed_requests(tmp_path: Path) -> None:
    dataset = datasets.load(write(tmp_path, "b.csv", BURSTGPT + "9,ChatGPT,10,0,10,API log\n"))
    assert dataset.rows == (WorkloadRow(source_id="line 2", prompt_tokens=472, output_tokens=18, arrival_s=5.0),)
    assert (dataset.format, dataset.skipped) == ("burstgpt", 1)


def test_azure_times_keep_more_decimals_than_datetime_reads(tmp_path: Path) -> None:
    dataset = datasets.load(write(tmp_path, "a.csv.gz", AZURE))
    first, second = (row.arrival_s for row in dataset.rows)
    assert dataset.format == "azure"
    assert first is not None
    assert second is not None
    assert second - first == pytest.approx(1.31941, abs=1e-6)


def test_azure_times_with_an_offset_from_utc_are_read(tmp_path: Path) -> None:
    content = "TIMESTAMP,ContextTokens,GeneratedTokens\n1970-01-01 00:00:10.25+00:00,1,2\n"
    assert datasets.load(write(tmp_path, "a.csv", content)).rows[0].arrival_s == pytest.approx(10.25)


def test_checksum_is_of_the_stored_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, "s.jsonl.gz", lines(CONVERSATION))
    assert datasets.load(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_where_keeps_rows_whose_field_is_or_contains_a_value(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "output": "b", "src": src} for src in ("x", ["y", "x"], ["z"], "z")]
    dataset = datasets.load(write(tmp_path, "w.jsonl", lines(*rows)), where={"src": frozenset({"x"})})
    assert len(dataset.rows) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "p", "output": "o"}\n{oops\n', r"a.jsonl: line 2: not JSON"),
        ("a.jsonl", lines({"prompt": "p", "output": "o"}, {"prompt": "p"}), r"a.jsonl: line 2: output: missing"),
        ("a.jsonl", lines({"prompt": 5, "output": "o"}), r"a.jsonl: line 1: prompt: must be text, found int"),
        ("a.jsonl", lines({"prompt_tokens": 0, "output_tokens": 1}), r"line 1: prompt_tokens: .* at least 1, found 0"),
        ("a.jsonl", lines({"prompt_tokens": 1, "output_tokens": True}), r"line 1: output_tokens: .*found True"),
        ("a.jsonl", lines({"prompt_tokens": 1, "output_tokens": 1, "timestamp": "x"}), r"line 1: timestamp: .*'x'"),
        ("a.jsonl", lines("text"), r"a.jsonl: line 1: must be a JSON object, found str"),
        ("a.jsonl", "\n", r"a.jsonl: the file holds no rows"),
        ("a.jsonl", lines({"text": "?"}), r"a.jsonl: line 1: format not recognised from the fields \['text'\]"),
        ("a.json", json.dumps([{"instruction": "i"}]), r"a.json: entry 1: output: missing"),
        ("a.json", json.dumps([{"conversations": "no"}]), r"a.json: entry 1: conversations: must be a list"),
        ("a.json", json.dumps([{"conversations": [{"from": "human"}]}]), r"entry 1: conversations\[0\]: must be"),
        ("a.json", json.dumps([MONOLOGUE]), r"a.json: no usable row \(1 skipped\)"),
        ("a.csv", "a,b\n1,2\n", r"a.csv: line 1: columns \['a', 'b'\] belong to no known trace format"),
        ("a.csv", BURSTGPT + "7,ChatGPT,many,1,1,x\n", r"a.csv: line 3: Request tokens: .*'many'"),
        ("a.csv", BURSTGPT + "noon,ChatGPT,1,1,1,x\n", r"a.csv: line 3: Timestamp: .*'noon'"),
        ("a.csv", BURSTGPT + "nan,ChatGPT,1,1,1,x\n", r"a.csv: line 3: Timestamp: .*'nan'"),
        ("m.jsonl", lines(MOONCAKE, {"input_length": 5}), r"m.jsonl: line 2: output_length: missing"),
        ("m.jsonl", lines(MOONCAKE | {"timestamp": None}), r"m.jsonl: line 1: timestamp: missing"),
        ("m.jsonl", lines(MOONCAKE | {"timestamp": "x"}), r"m.jsonl: line 1: timestamp: .* milliseconds, found 'x'"),
        ("m.jsonl", lines(MOONCAKE | {"hash_ids": [1]}), r"line 1: hash_ids: must have 2 ids for input_length=600"),
        ("m.jsonl", lines(MOONCAKE | {"hash_ids": [1, -1]}), r"line 1: hash_ids: must be a list of whole numbers"),
        ("m.jsonl", lines(MOONCAKE | {"input_length": -1}), r"line 1: input_length: .* at least 0, found -1"),
        ("l.csv", LMSYS + "2,many,0,0,m\n", r"l.csv: line 4: output_token_length: .*'many'"),
        ("a.csv", AZURE + "2023-11-16 18:15:50,-3,1\n", r"a.csv: line 4: ContextTokens: must be 0 or more"),
    ],
)
def test_bad_row_is_an_error_naming_file_line_and_field(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        datasets.load(write(tmp_path, name, content))


def test_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"'parquet': must be one of auto, sharegpt"):
        datasets.load(tmp_path / "x", format="parquet")


def test_format_that_contradicts_the_header_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"line 1: column 'ContextTokens' of the azure format is missing"):
        datasets.load(write(tmp_path, "b.csv", BURSTGPT), format="azure")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"], ids=["missing", "not-utf8"])
def test_unreadable_file_is_an_error_naming_it(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "u.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"u.jsonl: cannot be read"):
        datasets.load(path)


def test_mooncake_times_are_milliseconds_and_prefix_hashes_are_kept(tmp_path: Path) -> None:
    content = lines(MOONCAKE, MOONCAKE | {"output_length": 0})
    dataset = datasets.load(write(tmp_path, "m.jsonl", content))
    assert dataset.rows == (
        WorkloadRow(source_id="line 1", prompt_tokens=600, output_tokens=7, arrival_s=1.5, hash_ids=(0, 4)),
    )
    assert (dataset.format, dataset.skipped) == ("mooncake", 1)


def test_lmsys_lengths_are_of_use_only_to_who_has_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, "l.csv", LMSYS)
    dataset = datasets.load(path, outputs_only=True)
    assert dataset.rows == (WorkloadRow(source_id="line 2", output_tokens=40),)
    assert (dataset.format, dataset.skipped) == ("lmsys", 1)
    with pytest.raises(DatasetError, match=r"l.csv: the lmsys format has no prompts"):
        datasets.load(path)


def test_where_selects_lines_of_a_csv_by_column(tmp_path: Path) -> None:
    path = write(tmp_path, "b.csv", BURSTGPT + "7,GPT-4,1,2,3,x\n")
    assert [r.prompt_tokens for r in datasets.load(path, where={"Model": frozenset({"GPT-4"})}).rows] == [1]
    with pytest.raises(DatasetError, match=r"b.csv: line 1: the filter names the column 'Modell'"):
        datasets.load(path, where={"Modell": frozenset({"GPT-4"})})


def test_conversations_have_every_answered_question(tmp_path: Path) -> None:
    read = datasets.load_conversations(write(tmp_path, "c.json", json.dumps([CONVERSATION, MONOLOGUE])))
    (turns,) = read.turns
    assert [(t.prompt, t.output_text) for t in turns] == [("Why?", "Because."), ("Really?", "Yes.")]
    assert (read.name, read.skipped) == ("c.json", 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps([MONOLOGUE]), r"c.json: no usable row \(1 skipped\)"),
        ("", r"c.json: the file holds no rows"),
        (lines({"prompt": "p"}), r"c.json: line 1: conversations: must be a list"),
    ],
)
def test_file_without_conversations_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        datasets.load_conversations(write(tmp_path, "c.json", content))


def test_csv_read_as_json_is_an_error_naming_the_line(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"a.csv: line 1: not JSON"):
        datasets.load(write(tmp_path, "a.csv", AZURE), format="jsonl")


def test_synthetic_workload_repeats_for_a_seed_and_has_the_stated_quantiles() -> None:
    made = synthetic.generate("sharegpt-like", rows=4000, seed=3)
    again = synthetic.generate("sharegpt-like", rows=4000, seed=3)
    shape = synthetic.PRESETS["sharegpt-like"].output
    outputs = [row.output_tokens or 0 for row in made.rows]
    assert made == again
    assert made.sha256 != synthetic.generate("sharegpt-like", rows=4000, seed=4).sha256
    assert np.median(outputs) == pytest.approx(shape.median, rel=0.05)
    assert np.percentile(outputs, 90) == pytest.approx(shape.p90, rel=0.05)
    assert min(outputs) >= 1


def test_unknown_synthetic_preset_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="alpaca-like, sharegpt-like"):
        synthetic.generate("made-up", rows=1, seed=0)
