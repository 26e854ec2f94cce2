"""Past-Future, Figures 3, 4 and 9: cosines of windows, traces from files, and that models fit on their devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vllm_ext.experiments.data import Files, files_of
from vllm_ext.experiments.papers import past_future_engines as engines
from vllm_ext.experiments.papers import past_future_windows as windows
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.results import Workload
from vllm_ext.simulation.spec import resolve


def trace(*outputs: int) -> windows.Trace:
    return windows.Trace(Workload(name="t", rows=len(outputs), sha256=""), np.array(outputs))


def test_windows_are_compared_by_how_many_requests_of_each_length_they_have() -> None:
    counts = trace(0, 31, 32, 40, 63, 33, 1000).counts(2)
    assert counts[:, :3].tolist() == [[2, 0, 0], [0, 2, 0], [0, 2, 0]]
    assert counts.sum() == 6, "the last request fills no window"
    assert windows.cosines(counts, counts).round(9).tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    mixed = trace(0, 32, 0, 0).counts(2)
    assert windows.cosines(mixed, mixed)[0, 1] == pytest.approx(1 / np.sqrt(2))


def test_neighbours_are_alike_where_lengths_change_slowly_and_distant_windows_are_not() -> None:
    one, other = [10] * 1000, [500] * 1000
    near, everywhere = windows.neighbours(trace(*one, *other), 200, 100)
    # 18 windows of 100 behind one of 200: that at the change has nothing, the one after it half of its history.
    assert near == pytest.approx((16 + 0 + 1 / np.sqrt(2)) / 18)
    assert everywhere < near
    assert windows.neighbours(trace(*one, *one), 200, 100) == (pytest.approx(1.0), pytest.approx(1.0))


def test_a_window_of_history_is_not_compared_with_its_own_requests() -> None:
    lengths = np.arange(0, 1000) // 100 * windows.BIN_TOKENS  # each hundred has a length of its own
    assert windows.neighbours(trace(*lengths.tolist()), 100, 100) == (0.0, 0.0)


def made(files: Files) -> Runner:
    return Runner(quick=True, seed=0, pool=None, store=None, files=files)  # type: ignore[arg-type]


def test_traces_are_read_in_the_order_of_their_file(tmp_path: Path) -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    numbers = range(1, windows.LEAST_REQUESTS + 2)
    lines = [header, *(f"{number},GPT-4,1,{number},1,Conversation log" for number in numbers)]
    (tmp_path / "burstgpt.csv").write_text("\n".join([*lines, "9,GPT-4,1,7,8,API log"]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"burstgpt\.csv: must have at least 5500 requests, found 1"):
        windows.traces(made(files_of(tmp_path)))
    lines += [f"{number},GPT-4,1,7,8,API log" for number in numbers]
    (tmp_path / "burstgpt.csv").write_text("\n".join(lines), encoding="utf-8")
    files = files_of(tmp_path)
    conversations, api = windows.traces(made(files)).values()
    assert conversations.outputs.tolist() == list(numbers)
    assert {*api.outputs.tolist()} == {7}
    assert conversations.workload.name == "burstgpt.csv"
    assert files.served == {"burstgpt.csv"}


def test_without_files_every_trace_is_drawn_and_one_of_several_services_changes() -> None:
    files = Files({"alpaca": [Path("alpaca.json")]})
    found = windows.traces(made(files))
    assert not files.served
    assert [*found] == [*windows.TRACES]
    assert (windows.traces(made(Files({})))["burstgpt-api"].outputs == found["burstgpt-api"].outputs).all()
    near, everywhere = windows.neighbours(found["burstgpt-api"], 1000, 500)
    assert near > everywhere + 0.02
    near, everywhere = windows.neighbours(found["burstgpt-conversations"], 1000, 500)
    assert near == pytest.approx(everywhere, abs=0.02)


@pytest.mark.parametrize("platform", engines.PLATFORMS.values(), ids=lambda at: f"{at.model}-{at.device[:6]}")
def test_every_model_leaves_memory_for_several_requests_of_any_length(platform: engines.Platform) -> None:
    resolved = resolve(engines._spec(engines.ENGINES[0], platform, 10, 1.0, 0))
    assert resolved.num_blocks * 16 > 3 * engines.CONTEXT
    assert resolved.limits.max_num_seqs == max(platform.clients)
