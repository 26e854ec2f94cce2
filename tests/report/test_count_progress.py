"""Progress in parts: a bar on a terminal, rare lines elsewhere, nothing if asked to be quiet."""

from __future__ import annotations

import io

import pytest

from vllm_ext.report.count_progress import CountProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_without_a_terminal_there_is_a_line_every_30_s_with_the_time_that_is_left() -> None:
    stream, clock = io.StringIO(), Clock()
    with CountProgress(400, label="embedding", unit="prompt", stream=stream, clock=clock) as progress:
        for done, wall_s in ((50, 1029.0), (100, 1030.0), (150, 1059.0), (200, 1061.0)):
            clock.now_s = wall_s
            progress.update(done, "note")
    assert stream.getvalue().splitlines() == [
        "embedding: 100 of 400 prompts, note, at most 90 s left",
        "embedding: 200 of 400 prompts, note, at most 61 s left",
    ]


def test_number_of_parts_may_turn_out_to_be_another() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = CountProgress(10, label="sweep", unit="run", stream=stream, clock=clock)
    for done, total in ((2, 6), (8, 7)):
        clock.now_s += 40
        progress.update(done, total=total)
    assert stream.getvalue().splitlines() == [
        "sweep: 2 of 6 runs, at most 80 s left",
        "sweep: 8 of 8 runs, at most 0 s left",
    ]


def test_without_a_total_there_is_the_time_that_went_by() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = CountProgress(None, label="alise", unit="request", stream=stream, clock=clock)
    clock.now_s += 40
    progress.update(7)
    assert stream.getvalue() == "alise: 7 requests, 40 s elapsed\n"


def test_nothing_done_has_no_time_left_to_tell() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = CountProgress(4, label="x", unit="y", stream=stream, clock=clock)
    clock.now_s += 100
    progress.update(0)
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_with_the_note() -> None:
    stream = Terminal()
    with CountProgress(3, label="training", unit="epoch", stream=stream) as progress:
        for done in range(1, 4):
            progress.update(done, f"loss {done}")
    last = stream.getvalue().split("\r")[-1]
    assert last.startswith("training: 100%|")
    assert "3/3" in last
    assert "loss 3" in last


def test_quiet_is_quiet_on_a_terminal_and_elsewhere() -> None:
    for stream in (Terminal(), io.StringIO()):
        clock = Clock()
        with CountProgress(3, label="training", unit="epoch", quiet=True, stream=stream, clock=clock) as progress:
            clock.now_s += 100
            progress.update(2)
        assert stream.getvalue() == ""


def test_a_job_without_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="total=0: must be at least 1"):
        CountProgress(0, label="x", unit="y")
