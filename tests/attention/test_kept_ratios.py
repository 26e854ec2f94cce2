"""A later start takes what an earlier one measured with the same, and nothing that is damaged or of something else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import pytest

from vllm_ext.attention import kept_ratios
from vllm_ext.attention.kept_ratios import kept_or_measured, path_of
from vllm_ext.attention.plan import Kind

KEY = {"sizes": "small", "vllm": "1"}
FOUND = dict(zip(Kind, (0.41, 1.5, 1 / 3), strict=True))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    kept_ratios.logger.addHandler(caplog.handler)
    yield caplog
    kept_ratios.logger.removeHandler(caplog.handler)


def never() -> dict[Kind, float]:
    raise AssertionError("measured again")


def test_second_start_measures_nothing_and_decides_by_the_same_numbers() -> None:
    first = kept_or_measured(KEY, lambda: FOUND)
    assert (first.by_kind, first.kept_from) == (FOUND, None)
    second = kept_or_measured(KEY, never)
    assert second.by_kind == FOUND
    assert isinstance(second.kept_from, date)


@pytest.mark.parametrize("field", KEY)
def test_what_was_measured_with_something_else_is_not_taken(field: str) -> None:
    kept_or_measured(KEY, lambda: FOUND)
    other = dict.fromkeys(Kind, 2.0)
    assert kept_or_measured({**KEY, field: "another"}, lambda: other).by_kind == other
    assert kept_or_measured(KEY, never).by_kind == FOUND


def test_deleting_the_file_measures_again(cache: Path) -> None:
    kept_or_measured(KEY, lambda: FOUND)
    (file,) = (cache / "attention").glob("*.json")
    file.unlink()
    assert kept_or_measured(KEY, lambda: FOUND).kept_from is None


def damaged(text: str, how: str) -> str:
    """Return the content of a file after an accident."""
    content = json.loads(text)
    content["ratios"] = {
        "negative": {**content["ratios"], "DECODE": -1.0},
        "infinite": {**content["ratios"], "DECODE": float("inf")},
        "no number": {**content["ratios"], "DECODE": "fast"},
        "another kind": {**content["ratios"], "IDLE": 1.0},
        "a kind less": {"DECODE": 1.0},
        "a list": [1.0],
    }.get(how, content["ratios"])
    if how == "no day":
        content["measured"] = "yesterday"
    if how == "copied from another machine":
        content["key"] = {**KEY, "vllm": "2"}
    return {"cut off": text[:40], "empty": "", "no object": "[]"}.get(how, json.dumps(content))


@pytest.mark.parametrize(
    "how",
    [
        "cut off", "empty", "no object", "negative", "infinite", "no number", "another kind", "a kind less", "a list",
        "no day", "copied from another machine",
    ],
)  # fmt: skip
def test_damaged_file_is_reported_set_aside_and_measured_again(how: str, log: pytest.LogCaptureFixture) -> None:
    kept_or_measured(KEY, lambda: FOUND)
    path = path_of(KEY)
    path.write_text(damaged(path.read_text(), how))
    again = dict.fromkeys(Kind, 2.0)
    assert kept_or_measured(KEY, lambda: again).by_kind == again
    assert "set aside as" in log.text
    assert "attention kernels are measured again" in log.text
    assert len(list(path.parent.glob("*.damaged-1"))) == 1
    assert kept_or_measured(KEY, never).by_kind == again


def test_file_that_is_no_text_is_set_aside() -> None:
    path_of(KEY).parent.mkdir(parents=True)
    path_of(KEY).write_bytes(b"\xff\xfe\x00")
    assert kept_or_measured(KEY, lambda: FOUND).by_kind == FOUND
    assert kept_or_measured(KEY, never).by_kind == FOUND


def test_cache_that_cannot_be_written_costs_a_warning(cache: Path, log: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file where the folder belongs")
    assert kept_or_measured(KEY, lambda: FOUND).by_kind == FOUND
    assert "not kept for later starts" in log.text


def test_user_without_a_home_measures_at_each_start(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(kept_ratios.envs, "cache_dir", homeless)
    assert kept_or_measured(KEY, lambda: FOUND).kept_from is None
    assert "not kept for later starts: Could not determine home directory." in log.text


def test_failed_measurement_leaves_nothing() -> None:
    with pytest.raises(AssertionError, match="measured again"):
        kept_or_measured(KEY, never)
    assert not path_of(KEY).exists()


def test_processes_that_need_the_same_at_once_measure_it_once() -> None:
    """Locks of a file are its descriptor's, so that threads wait for one another as processes do."""
    measured = []

    def measure() -> dict[Kind, float]:
        measured.append(len(measured) + 1.0)
        return dict.fromkeys(Kind, measured[-1])

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: kept_or_measured(KEY, measure), range(4)))
    assert measured == [1.0]
    assert {ratios.by_kind[Kind.DECODE] for ratios in found} == {1.0}
