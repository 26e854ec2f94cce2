"""What the request log says of a finished request, and what it does not reveal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.config import ExtConfig
from vllm_ext.metrics.request_log import RequestLog

from .test_engine import record

SALT = "tenant's secret"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


def logged(path: Path, *records: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    RequestLog(ExtConfig(request_log=str(path), **options)).append(3, records)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_requests_out_of_the_sample_are_not_written(path: Path) -> None:
    found = logged(path, record(req_id="a", sampled=False), record(req_id="b"), request_log_sample=0.5)
    assert [(line["req_id"], line["sample"], line["engine"]) for line in found] == [("b", 0.5, 3)]
    assert "sampled" not in found[0]


def test_without_sampling_there_is_no_share(path: Path) -> None:
    assert "sample" not in logged(path, record())[0]


def test_salts_and_hashes_of_prompts_are_equal_where_they_were_and_mean_nothing_elsewhere(path: Path) -> None:
    records = [
        record(cache_salt=SALT, hash_ids=[7, 8]),
        record(cache_salt="other", hash_ids=[7, 9]),
        record(cache_salt=SALT, hash_ids=[]),
        record(),
    ]
    one, other, again, none = logged(path, *records)
    assert one["salt_tag"] == again["salt_tag"] != other["salt_tag"]
    assert (none["salt_tag"], none["hash_ids"], again["hash_ids"]) == (None, None, [])
    assert one["hash_ids"][0] == other["hash_ids"][0]
    assert len({*one["hash_ids"], *other["hash_ids"], 7, 8, 9}) == 6
    assert SALT not in path.read_text()
    path.unlink()
    later = logged(path, *records)[0]
    assert later["salt_tag"] != one["salt_tag"], "another start has another key"
    assert set(later["hash_ids"]).isdisjoint(one["hash_ids"])


def test_prompts_are_there_only_where_the_scheduler_handed_them_over(path: Path) -> None:
    without, with_ids = logged(path, record(), record(prompt_token_ids=[5, 6]))
    assert "prompt_token_ids" not in without
    assert with_ids["prompt_token_ids"] == [5, 6]


def test_nothing_is_opened_for_nobody(path: Path) -> None:
    assert logged(path, record(sampled=False)) == []
    assert not path.exists()
