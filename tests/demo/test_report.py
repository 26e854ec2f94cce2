"""The demo's report: joining answers with the request log, and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_ext.demo.client import Answer
from vllm_ext.demo.report import chosen_metrics, match, read_records, summary, table
from vllm_ext.demo.workload import DemoRequest, Kind


def make_answer(number: int, response_id: str = "", *, kind: Kind = Kind.CHAT, error: str | None = None) -> Answer:
    request = DemoRequest(number=number, kind=kind, stream=True, prompt="p", max_tokens=9, start_s=0.0)
    return Answer(
        request=request,
        response_id=response_id,
        prompt_tokens=5,
        output_tokens=4,
        finish_reason="stop",
        e2e_s=2.0,
        ttft_s=0.25,
        error=error,
    )


def make_record(req_id: str) -> dict[str, object]:
    return {
        "req_id": req_id,
        "predicted_tokens": 7,
        "prediction_source": "hint",
        "num_preemptions": 2,
        "output_tokens": 4,
    }


def test_records_are_matched_by_the_id_that_the_client_saw() -> None:
    answers = [make_answer(1, "chatcmpl-aa"), make_answer(2, "cmpl-bb"), make_answer(3, "cmpl-cc")]
    records = [
        make_record("cmpl-bb-0-12345678"),
        make_record("chatcmpl-aa-12345678"),
        make_record("cmpl-dd-0-12345678"),
    ]
    assert match(answers, records) == {1: records[1], 2: records[0]}


def test_ids_with_dashes_of_their_own_are_matched() -> None:
    record = make_record("chatcmpl-my-own-id-12345678")
    assert match([make_answer(1, "chatcmpl-my-own-id")], [record]) == {1: record}


def test_half_written_line_of_the_log_waits(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_records(log) == []
    log.write_text(json.dumps({"seq": 1}) + "\n" + '{"seq": ')
    assert read_records(log) == [{"seq": 1}]


def test_line_that_is_no_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("[]\n")
    with pytest.raises(ValueError, match="line 1"):
        read_records(tmp_path / "log")


def test_table_shows_prediction_and_preemptions_where_known() -> None:
    answers = [make_answer(1, "chatcmpl-aa"), make_answer(2), make_answer(3, error="refused")]
    known, unknown, failed = table(answers, {1: make_record("")}).splitlines()[2:]
    assert known.split() == ["1", "chat", "stream", "5", "7/4", "hint", "0.250", "0.5000", "2", "stop"]
    assert unknown.split() == ["2", "chat", "stream", "5", "-/4", "-", "0.250", "0.5000", "-", "stop"]
    assert failed.split()[-1] == "failed"


def test_columns_line_up() -> None:
    lines = table([make_answer(1), make_answer(1234)], {}).splitlines()
    assert len({line.index("chat") for line in lines[2:]} | {lines[0].index("kind")}) == 1


def test_summary_counts_failures_and_ignores_their_numbers() -> None:
    text = summary([make_answer(1), make_answer(2, error="refused")], {1: make_record("")}, wall_s=3.0)
    assert text.startswith("1 of 2 requests finished in 3.0 s; normalised latency mean 0.5000, P90 0.5000 s/token")
    assert text.endswith("length off by 3 tokens on average")


def test_summary_of_failures_alone_has_no_averages() -> None:
    assert summary([make_answer(1, error="refused")], {}, wall_s=1.0) == "0 of 1 requests finished in 1.0 s"


def test_metrics_are_chosen_by_name_without_the_labels_they_share() -> None:
    exposition = (
        "# TYPE vllm_ext:preemptions counter\n"
        'vllm_ext:preemptions_total{engine="0",model_name="m",reason="policy"} 3.0\n'
        '# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total{engine="0",model_name="m"} 4.0\n'
        '# TYPE vllm:other gauge\nvllm:other{engine="0"} 5.0\n'
    )
    assert chosen_metrics(exposition) == [
        "vllm_ext:preemptions_total{reason=policy} 3",
        "vllm:num_preemptions_total{} 4",
    ]
