"""Progress: a bar on a terminal, rare lines elsewhere."""

from __future__ import annotations

import builtins
import io
from typing import Any

import pytest

from vllm_ext.observability.progress import BarProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_without_a_terminal_a_short_run_says_nothing() -> None:
    stream, clock = io.StringIO(), Clock()
    with BarProgress(total_requests=10, stream=stream, clock=clock) as progress:
        for finished in range(11):
            clock.now_s += 2.7
            progress.update(finished / 2, finished)
    assert stream.getvalue() == ""


def test_without_a_terminal_there_is_a_line_every_30_s_with_the_time_that_is_left() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = BarProgress(total_requests=400, label="orca", stream=stream, clock=clock)
    for finished, wall_s in ((50, 1029.0), (100, 1030.0), (150, 1059.0), (200, 1061.0)):
        clock.now_s = wall_s
        progress.update(finished / 10, finished)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "orca: 25.0%, 100 requests ended, 10.0 s simulated, 0:30 elapsed, 1:30 left",
        "orca: 50.0%, 200 requests ended, 20.0 s simulated, 1:01 elapsed, 1:01 left",
    ]


def test_progress_in_virtual_time_goes_before_that_in_requests() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = BarProgress(total_requests=1000, total_time_s=100.0, stream=stream, clock=clock)
    clock.now_s += 5400
    progress.update(75.0, 10)
    assert stream.getvalue() == (
        "simulation: 75.0%, 10 requests ended, 75.0 s simulated, 1:30:00 elapsed, 30:00 left\n"
    )


@pytest.mark.parametrize(("total", "finished"), [(None, 5), (100, 0)], ids=["no-total", "nothing-yet"])
def test_time_left_is_left_out_where_it_is_not_known(total: int | None, finished: int) -> None:
    stream, clock = io.StringIO(), Clock()
    progress = BarProgress(total_requests=total, stream=stream, clock=clock)
    clock.now_s += 31
    progress.update(1.0, finished)
    assert stream.getvalue() == f"simulation: {finished} requests ended, 1.0 s simulated, 0:31 elapsed\n"


def test_a_terminal_gets_a_bar_that_ends_full() -> None:
    stream = Terminal()
    with BarProgress(total_requests=4, label="orca", stream=stream) as progress:
        for finished in range(5):
            progress.update(float(finished), finished)
    last = stream.getvalue().split("\r")[-1]
    assert last.startswith("orca: 100%|")
    assert "4/4 requests" in last


def test_a_bar_in_virtual_time_does_not_run_over() -> None:
    stream = Terminal()
    with BarProgress(total_time_s=10.0, stream=stream) as progress:
        progress.update(4.0, 1)
        progress.update(10.5, 2)
    assert "100%" in stream.getvalue().split("\r")[-1]
    assert "10.0/10.0 s simulated" in stream.getvalue()


def test_a_bar_without_a_total_counts() -> None:
    stream = Terminal()
    with BarProgress(stream=stream) as progress:
        progress.update(1.0, 3)
    assert "3 requests" in stream.getvalue().split("\r")[-1]


def test_a_terminal_without_tqdm_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tqdm":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    stream, clock = Terminal(), Clock()
    with BarProgress(total_requests=2, stream=stream, clock=clock) as progress:
        clock.now_s += 30
        progress.update(1.0, 1)
    assert stream.getvalue() == "simulation: 50.0%, 1 requests ended, 1.0 s simulated, 0:30 elapsed, 0:30 left\n"


def test_closing_twice_is_closing_once() -> None:
    stream = Terminal()
    progress = BarProgress(total_requests=1, stream=stream)
    progress.close()
    written = stream.getvalue()
    progress.close()
    assert stream.getvalue() == written


@pytest.mark.parametrize("totals", [{"total_requests": 0}, {"total_time_s": -1.0}], ids=str)
def test_totals_that_nothing_can_reach_are_refused(totals: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        BarProgress(**totals)
