"""Readers of workload files."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ext import datasets
from vllm_ext.datasets import DatasetError, WorkloadRow

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
LOGGED = {
    "engine": 0, "seq": 3, "req_id": "cmpl-1-0-ab12", "arrival_unix_s": 8.25, "prompt_tokens": 30, "output_tokens": 7,
    "max_tokens": 64, "predicted_tokens": 9, "prediction_source": "history", "e2e_s": 1.5, "finish_reason": "stop",
    "conversation_id": "c",
}  # fmt: skip
MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]}


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    return path


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def row(source_id: str, prompt: int | None, output: int, arrival_s: float | None = None, **more: Any) -> WorkloadRow:
    return WorkloadRow(source_id=source_id, prompt_tokens=prompt, output_tokens=output, arrival_s=arrival_s, **more)


def said(source_id: str, prompt: str, output: str, *later: WorkloadRow) -> WorkloadRow:
    return WorkloadRow(source_id=source_id, prompt=prompt, output_text=output, later=later)


CHAT = (said("c1", "Why?", "Because.", said("c1", "Really?", "Yes.")),)


@pytest.mark.parametrize(
    ("name", "content", "format", "rows", "skipped"),
    [
        ("s.json", json.dumps([CONVERSATION, MONOLOGUE]), "sharegpt", CHAT, 1),
        ("s.jsonl", lines(CONVERSATION, MONOLOGUE), "sharegpt", CHAT, 1),
        ("s.jsonl.gz", lines(CONVERSATION, MONOLOGUE), "sharegpt", CHAT, 1),
        (
            "a.json",
            json.dumps([{"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Hi", "output": ""}]),
            "alpaca",
            (said("entry 1", "Add.\n\n1 2", "3"), said("entry 2", "Hi", "")),
            0,
        ),
        (
            "x.jsonl",
            lines({"id": 1, "prompt": "p", "output": "o"}, {"prompt_tokens": 3, "output_tokens": 4, "timestamp": 1.5}),
            "jsonl",
            (said("1", "p", "o"), row("line 2", 3, 4, 1.5)),
            0,
        ),
        (
            "x.jsonl",
            lines({"prompt_tokens": 3, "output_tokens": 4, "output_quantiles": list(range(1, 10))}),
            "jsonl",
            (row("line 1", 3, 4, output_quantiles=tuple(range(1, 10))),),
            0,
        ),
        ("m.jsonl", lines(MOONCAKE, MOONCAKE | {"output_length": 0}), "mooncake",
         (row("line 1", 600, 7, 1.5, hash_ids=(0, 4)),), 1),
        ("r.jsonl", lines(LOGGED | {"arrival_unix_s": 9.5}, LOGGED | {"conversation_id": None},
                          LOGGED | {"output_tokens": 0, "finish_reason": "abort"}), "request-log",
         (row("line 2", 30, 7, 8.25), row("line 1", 30, 7, 9.5, conversation="c")), 1),
        ("r.jsonl", lines(LOGGED | {"conversation_id": None, "hash_ids": [9], "sample": 0.5, "wait": {}},
                          LOGGED | {"prompt_tokens": 2, "prompt_token_ids": [5, 6], "hash_ids": [9]}), "request-log",
         (row("line 1", 30, 7, 8.25, hash_ids=(9,), share=0.5),
          row("line 2", 2, 7, 8.25, token_ids=(5, 6), conversation="c")), 0),
        ("v.json", json.dumps({"model_id": "m", "input_lens": [5, 6, 7], "output_lens": [2, 0, 3],
                               "start_times": [4.5, 4.25, 4.0]}), "vllm-bench",
         (row("line 1: request 3", 7, 3, 4.0), row("line 1: request 1", 5, 2, 4.5)), 1),
        ("b.csv", BURSTGPT + "9,ChatGPT,10,0,10,API log\n", "burstgpt", (row("line 2", 472, 18, 5.0),), 1),
        ("l.csv.gz", "num_prefill_tokens,num_decode_tokens\n5,6\n0,1\n", "lengths", (row("line 2", 5, 6),), 1),
        ("l.csv", LMSYS, "lmsys", (row("line 2", None, 40),), 1),
    ],
)  # fmt: skip
def test_rows_of_every_format(
    tmp_path: Path, name: str, content: str, format: str, rows: tuple[WorkloadRow, ...], skipped: int
) -> None:
    path = write(tmp_path, name, content)
    dataset = datasets.load(path, outputs_only=True)
    assert dataset.rows == rows
    assert (dataset.name, dataset.format, dataset.skipped) == (name, format, skipped)
    assert dataset.sha256 == hashlib.sha256(path.read_bytes()).hexdigest(), "of the stored bytes"
    assert datasets.load(path, format, outputs_only=True) == dataset


def test_a_log_knows_which_share_of_the_requests_it_holds(tmp_path: Path) -> None:
    """Each line stands for 1 / sample requests: these two for 4 and 1, of which 2 were logged."""
    path = write(tmp_path, "r.jsonl", lines(LOGGED | {"sample": 0.25}, LOGGED))
    assert datasets.load(path).share == 2 / 5
    assert datasets.load(write(tmp_path, "all.jsonl", lines(LOGGED, LOGGED))).share == 1


def test_azure_times_keep_more_decimals_than_datetime_reads(tmp_path: Path) -> None:
    dataset = datasets.load(write(tmp_path, "a.csv.gz", AZURE))
    first, second = (row.arrival_s for row in dataset.rows)
    assert dataset.format == "azure"
    assert first is not None
    assert second is not None
    assert second - first == pytest.approx(1.31941, abs=1e-6)


@pytest.mark.parametrize(
    ("time", "since_1970_s"),
    [
        ("1970-01-01 00:00:10.25", 10.25),
        ("1970-01-01 00:00:10.25+00:00", 10.25),
        ("1970-01-01T01:00:10.25+01:00", 10.25),
        ("1970-01-01 00:00:10-0230", 9010.0),
        ("1970-01-01T00:00:10Z", 10.0),
        ("1970-01-01T00:00:10.2500000Z", 10.25),
        ("1970-01-02", 86400.0),
    ],
)
def test_azure_times_count_from_utc(tmp_path: Path, time: str, since_1970_s: float) -> None:
    """Rows a second apart, one with an offset of an hour, once arrived 3,601 s apart."""
    content = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{time},1,2\n"
    assert datasets.load(write(tmp_path, "o.csv", content)).rows[0].arrival_s == since_1970_s


@pytest.mark.parametrize("time", ["1970-01-01 00:00:10.25.5", "noon", "1970-01-01 00:00:10.2x+01", ".5"])
def test_what_is_no_time_is_refused(tmp_path: Path, time: str) -> None:
    content = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{time},1,2\n"
    with pytest.raises(DatasetError, match=r"o.csv: line 2: TIMESTAMP: must be a date and time"):
        datasets.load(write(tmp_path, "o.csv", content))


def test_damage_is_one_line_that_names_the_file_and_the_place(tmp_path: Path) -> None:
    """Of wrong bytes within a gzip, a CSV field and a number beyond the readers' limits, and JSON nested too deep."""
    stored = bytearray(
        gzip.compress(lines(*({"prompt_tokens": i, "output_tokens": 7 * i} for i in range(1, 500))).encode())
    )
    stored[40:60] = bytes(20)
    (tmp_path / "g.jsonl.gz").write_bytes(stored)
    write(tmp_path, "long.csv", BURSTGPT + f"9,{'x' * 131_073},1,2,3,x\n")
    write(tmp_path, "deep.jsonl", lines({"prompt_tokens": 1, "output_tokens": 1}) + "[" * 20_000 + "]" * 20_000)
    write(tmp_path, "digits.jsonl", '{"prompt_tokens": 1, "output_tokens": ' + "7" * 5000 + "}")
    for name, said in (
        ("g.jsonl.gz", "g.jsonl.gz: cannot be read"),
        ("long.csv", "long.csv: line 3: not CSV: field larger than field limit (131072)"),
        ("deep.jsonl", "deep.jsonl: line 2: not JSON that can be read"),
        ("digits.jsonl", "digits.jsonl: line 1: not JSON that can be read"),
    ):
        with pytest.raises(DatasetError) as refused:
            datasets.load(tmp_path / name)
        assert str(refused.value).startswith(said)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", lines({"prompt_tokens": 3, "output_tokens": 4}) + "{oops\n[]\n" + lines({"prompt_tokens": 5})),
        ("a.json", json.dumps([{"prompt": "?", "output": "!"}, 5, {"prompt_tokens": 5}, {"output_tokens": 1}])),
        ("a.csv", BURSTGPT + "x,ChatGPT,1,1,1,x\n7,ChatGPT,many,1,1,x\n8,ChatGPT\n"),
    ],
)  # fmt: skip
def test_bad_rows_are_an_error_unless_they_are_to_be_left_out_and_then_they_are_counted(
    tmp_path: Path, name: str, content: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(DatasetError):
        datasets.load(path)
    dataset = datasets.load(path, skip_bad_rows=True)
    assert (len(dataset.rows), dataset.skipped, dataset.bad_rows) == (1, 0, 3)


def test_where_keeps_rows_whose_field_or_column_is_or_contains_a_value(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "output": "b", "src": src} for src in ("x", ["y", "x"], ["z"], "z")]
    assert len(datasets.load(write(tmp_path, "w.jsonl", lines(*rows)), where={"src": frozenset({"x"})}).rows) == 2
    path = write(tmp_path, "b.csv", BURSTGPT + "7,GPT-4,1,2,3,x\n")
    assert [r.prompt_tokens for r in datasets.load(path, where={"Model": frozenset({"GPT-4"})}).rows] == [1]
    with pytest.raises(DatasetError, match=r"b.csv: line 2: Modell: the filter names a field .* found \['Timestamp'"):
        datasets.load(path, where={"Modell": frozenset({"GPT-4"})})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "p", "output": "o"}\n{oops\n', r"a.jsonl: line 2: not JSON"),
        ("a.jsonl", lines({"prompt": "p", "output": "o"}, {"prompt": "p"}), r"a.jsonl: line 2: output: missing"),
        ("a.jsonl", lines({"prompt": 5, "output": "o"}), r"a.jsonl: line 1: prompt: must be text, found int"),
        ("a.jsonl", lines({"prompt_tokens": 0, "output_tokens": 1}), r"line 1: prompt_tokens: .* at least 1, found 0"),
        ("a.jsonl", lines({"prompt_tokens": 1, "output_tokens": True}), r"line 1: output_tokens: .*found True"),
        ("a.jsonl", lines({"prompt_tokens": 1, "output_tokens": 1, "timestamp": "x"}), r"line 1: timestamp: .*'x'"),
        *(
            (
                "a.jsonl",
                lines({"prompt_tokens": 1, "output_tokens": 1, "output_quantiles": wrong}),
                r"line 1: output_quantiles: must be a list of 9 ascending whole numbers of at least 1",
            )
            for wrong in (5, [1] * 8, [9, *range(1, 9)], [0, *range(1, 9)], [1.5] * 9, "123456789")
        ),
        ("r.jsonl", lines(LOGGED | {"conversation_id": 5}), r"line 1: conversation_id: must be text, found int"),
        (
            "r.jsonl",
            lines(LOGGED | {"hash_ids": [1, 2]}),
            r"line 1: hash_ids: must have 1 ids for prompt_tokens=30, found 2",
        ),
        ("r.jsonl", lines(LOGGED | {"prompt_token_ids": "x"}), r"line 1: prompt_token_ids: must be a list of whole"),
        (
            "r.jsonl",
            lines(LOGGED | {"prompt_token_ids": [1]}),
            r"line 1: prompt_token_ids: must have prompt_tokens=30 ids",
        ),
        ("r.jsonl", lines(LOGGED | {"sample": 0}), r"line 1: sample: must be above 0 and at most 1, found 0.0"),
        ("r.jsonl", lines(LOGGED | {"sample": "half"}), r"line 1: sample: must be a number, found 'half'"),
        (
            "v.jsonl",
            lines({"input_lens": [1], "output_lens": [], "start_times": [0.0]}),
            r"line 1: output_lens: must be",
        ),
        ("v.jsonl", lines({"input_lens": [1], "output_lens": [1]}), r"line 1: start_times: missing"),
        ("a.jsonl", lines("text"), r"a.jsonl: line 1: must be a JSON object, found str"),
        ("a.jsonl", "\n", r"a.jsonl: the file holds no rows"),
        ("a.jsonl", lines({"text": "?"}), r"a.jsonl: line 1: format not recognised from the fields \['text'\]"),
        ("a.json", json.dumps([{"instruction": "i"}]), r"a.json: entry 1: output: missing"),
        ("a.json", json.dumps([{"conversations": "no"}]), r"a.json: entry 1: conversations: must be a list"),
        ("a.json", json.dumps([{"conversations": [{"from": "human"}]}]), r"entry 1: conversations\[0\]: must be"),
        ("a.json", json.dumps([MONOLOGUE]), r"a.json: no usable row \(1 skipped\)"),
        ("a.csv", "a,b\n1,2\n", r"a.csv: line 2: format not recognised from .*\['a', 'b'\]"),
        ("a.csv", BURSTGPT + "7,ChatGPT,many,1,1,x\n", r"a.csv: line 3: Request tokens: .*'many'"),
        ("a.csv", BURSTGPT + "nan,ChatGPT,1,1,1,x\n", r"a.csv: line 3: Timestamp: .*'nan'"),
        ("m.jsonl", lines(MOONCAKE, {"input_length": 5}), r"m.jsonl: line 2: output_length: missing"),
        ("m.jsonl", lines(MOONCAKE | {"timestamp": None}), r"m.jsonl: line 1: timestamp: missing"),
        ("m.jsonl", lines(MOONCAKE | {"timestamp": "x"}), r"m.jsonl: line 1: timestamp: .* milliseconds, found 'x'"),
        ("m.jsonl", lines(MOONCAKE | {"hash_ids": [1]}), r"line 1: hash_ids: must have 2 ids for input_length=600"),
        ("m.jsonl", lines(MOONCAKE | {"hash_ids": [1, -1]}), r"line 1: hash_ids: must be a list of whole numbers"),
        ("e.csv", "num_prefill_tokens,num_decode_tokens\n", r"e.csv: the file holds no rows"),
        ("a.csv", AZURE + "noon,3,1\n", r"a.csv: line 4: TIMESTAMP: must be a date and time, found 'noon'"),
        ("l.csv", LMSYS, r"l.csv: the lmsys format has no prompts"),
        ("a.csv", AZURE + "2023-11-16 18:15:50,-3,1\n", r"a.csv: line 4: ContextTokens: .* at least 0, found '-3'"),
    ],
)
def test_bad_row_is_an_error_naming_file_line_and_field(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        datasets.load(write(tmp_path, name, content))


def test_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"'parquet': must be one of auto, sharegpt"):
        datasets.load(tmp_path / "x", format="parquet")


@pytest.mark.parametrize(
    ("content", "format", "message"),
    [
        (BURSTGPT, "azure", r"b.csv: line 2: ContextTokens: missing; found .*'Timestamp'"),
        (AZURE, "jsonl", r"b.csv: line 1: not JSON"),
        (lines({"prompt": "p"}), "sharegpt", r"b.csv: line 1: conversations: must be a list"),
    ],
)
def test_format_that_contradicts_the_file_is_an_error(tmp_path: Path, content: str, format: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        datasets.load(write(tmp_path, "b.csv", content), format=format)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"], ids=["missing", "not-utf8"])
def test_unreadable_file_is_an_error_naming_it(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "u.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"u.jsonl: cannot be read"):
        datasets.load(path)


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.txt", "one text\n\nof two parts", ["one text\n\nof two parts"]),
        ("a.txt.gz", "packed", ["packed"]),
        ("a.jsonl", lines({"text": "one"}, {"text": "two", "id": 7}), ["one", "two"]),
        ("a.jsonl", lines({"prompt": "one"}, {"prompt": "two", "output_tokens": 3}), ["one", "two"]),
        ("a.jsonl", lines({"prompt": "Why?", "output": "Because."}), ["Why?\nBecause."]),
        ("a.json", json.dumps([CONVERSATION, MONOLOGUE]), ["Why?\nBecause.\nReally?\nYes."]),
    ],
    ids=["txt", "gz", "text", "prompt", "prompt and output", "conversations"],
)
def test_texts_are_read(name: str, content: str, texts: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, name, content)
    found = datasets.load_texts(path)
    assert list(found.texts) == texts
    assert (found.name, found.sha256) == (name, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", " \n", "holds no texts"),
        ("a.jsonl", lines(LOGGED), "holds no texts"),
        ("a.csv", LMSYS, "holds no texts"),
        ("a.jsonl", lines({"text": "one"}, {"text": 2}), "line 2: text: must be text, found int"),
        ("a.jsonl", lines({"body": "one"}), "format not recognised"),
        ("a.jsonl", "", "no rows"),
    ],
    ids=["empty", "log", "csv", "no text", "unknown", "no rows"],
)
def test_file_without_texts_is_refused(name: str, content: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=told):
        datasets.load_texts(write(tmp_path, name, content))
