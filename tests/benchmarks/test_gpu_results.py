"""Results of benchmarks of engines: what is in the file when the process is killed, and exit statuses."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.extent import HANG_S

from .conftest import GPU
from .fake_gpu_engine import FakeEngine


def load(name: str) -> Any:
    return importlib.import_module(name)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_result_is_incomplete_until_its_end(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    report = load("on_gpu").Report(out, name="it")
    assert read(out) == {"name": "it", "complete": False}
    report.found["cell"] = 1
    report.write()
    assert read(out) == {"name": "it", "complete": False, "cell": 1}
    assert report.end() == 0
    assert read(out) == {"name": "it", "complete": True, "cell": 1}


@pytest.mark.parametrize(
    ("wrong", "complete", "status"), [([], True, 0), ([], False, 3), (["it"], True, 1), (["it"], False, 1)]
)
def test_a_result_names_what_is_wrong_wherever_the_status_is_1(
    wrong: list[str], complete: bool, status: int, tmp_path: Path
) -> None:
    report = load("on_gpu").Report(tmp_path / "found.json")
    for name in wrong:
        report.add_wrong(name)
    assert report.end(complete=complete) == status
    assert read(tmp_path / "found.json") == {"complete": complete, **({"wrong": wrong} if wrong else {})}


CHILD = """
import json, os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
def write(**found):
    new = out.with_suffix(".new")
    new.write_text(json.dumps(found))
    new.replace(out)
"""


def engines(
    tmp_path: Path, text: str, settings: list[str], limit_s: float = HANG_S, *, at_once: int = 1
) -> tuple[Any, Any]:
    """Return a report, and what runs a child process for each setting; the file is ``found.json``."""
    script = tmp_path / "child.py"
    script.write_text(CHILD + text)
    args = argparse.Namespace(settings=settings, seed=0, dry=True, limit_s=limit_s, at_once=at_once)
    report = load("on_gpu").Report(tmp_path / "found.json")
    return report, load("gpu_engine").in_processes(str(script), args, report)


def test_an_engine_that_died_keeps_what_it_wrote_and_is_a_problem(tmp_path: Path) -> None:
    report, running = engines(
        tmp_path, "write(cell=1, problems=[])\nprint('no memory', flush=True)\nos.kill(os.getpid(), 9)", ["own"]
    )
    ((name, found),) = list(running)
    assert name == "own"
    assert (found["cell"], found["problems"], found["complete"]) == (1, ["the engine failed"], False)
    assert "no memory" in found["tail"]
    assert not load("gpu_engine").all_complete(report)
    assert read(tmp_path / "found.json")["settings"]["own"]["cell"] == 1


def test_an_engine_is_ended_at_its_limit_and_the_next_begins(tmp_path: Path) -> None:
    text = "if 'slow' in sys.argv: time.sleep(1e6)\nwrite(complete=True)"
    _, running = engines(tmp_path, text, ["slow"], limit_s=0.0)
    ((_, found),) = list(running)
    assert found["problems"] == ["the engine failed"]
    assert found["tail"].startswith("not done in 0 s")
    report, running = engines(tmp_path, text, ["fast"])
    assert [name for name, _ in running] == ["fast"]
    assert load("gpu_engine").all_complete(report)


def test_what_an_engine_has_measured_is_in_the_file_while_it_runs(tmp_path: Path) -> None:
    """The child goes on only when its first cell is in the file of the whole."""
    text = f"""
write(cell=1)
while '"cell": 1' not in pathlib.Path({str(tmp_path / "found.json")!r}).read_text():
    time.sleep(0.01)
write(cell=2, complete=True)
"""
    _, running = engines(tmp_path, text, ["own"], limit_s=60.0)
    ((_, found),) = list(running)
    assert (found["cell"], found["problems"]) == (2, [])


def test_bytes_that_are_no_text_are_kept_as_such(tmp_path: Path) -> None:
    _, running = engines(tmp_path, "os.write(1, bytes([255])); sys.exit(3)", ["own"])
    ((_, found),) = list(running)
    assert found["tail"] == "status 3; \ufffd"


def test_a_setting_named_twice_is_another_engine(tmp_path: Path) -> None:
    _, running = engines(tmp_path, "write(complete=True)", ["stock", "own", "stock"])
    assert [name for name, _ in running] == ["stock", "own", "stock, again"]


def test_engines_that_run_at_once_come_in_the_order_of_the_settings(tmp_path: Path) -> None:
    """The first ends only when the second has, and the third begins only when one of both has."""
    text = f"""
folder, one = pathlib.Path({str(tmp_path)!r}), sys.argv[sys.argv.index("--one") + 1]
while one == "stock" and not (folder / "own").exists():
    time.sleep(0.01)
others = sorted(path.name for path in folder.iterdir() if path.name in ("stock", "own"))
(folder / one).touch()
write(complete=True, problems=[], others=others)
"""
    report, running = engines(tmp_path, text, ["stock", "own", "tier-8"], at_once=2)
    found = dict(running)
    assert [*found] == ["stock", "own", "tier-8"]
    assert found["own"]["others"] == []
    assert "own" in found["tier-8"]["others"]
    assert load("gpu_engine").all_complete(report)


@pytest.mark.parametrize("name", ["gpu_right", "gpu_decode", "gpu_return", "gpu_talks"])
def test_a_setting_that_is_unknown_is_an_error_of_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        load(name).main(["--dry", "--settings", "none"])
    assert raised.value.code == 2
    assert "'none' unknown, must be of" in capsys.readouterr().err


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize(("batch", "context"), [(1, 512), (32, 2048), (128, 1024), (256, 1024)])
def test_no_request_of_a_batch_ends_within_the_timed_steps(batch: int, context: int, in_flight: int) -> None:
    """The first of a batch decode while the prompts of the others are computed, here in up to 33 steps."""
    engine = FakeEngine(in_flight=in_flight, filled=False)
    decode = load("gpu_decode")
    taken = decode.batch_ms(engine, batch, context, 8192, 3, 20)
    assert len(taken) == 3
    timed = engine.steps[-60:]
    assert timed == [(batch, 0)] * 60
    assert not engine.is_busy


def test_a_batch_of_which_a_request_ended_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = load("gpu_decode")
    monkeypatch.setattr(decode, "output_tokens", lambda *_: 30)
    assert decode.batch_ms(FakeEngine(filled=False), 8, 1024, 8192, 3, 20) == []


def test_each_batch_is_in_the_file_when_it_has_been_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, seen = load("gpu_decode"), []
    monkeypatch.setattr(load("gpu_engine"), "Engine", lambda *_, **__: FakeEngine(budget=128, filled=False))
    report = load("on_gpu").Report(tmp_path / "found.json")
    batch_ms = decode.batch_ms

    def observed(*args: Any) -> Any:
        seen.append({name for name in read(tmp_path / "found.json") if name.endswith("_ms")})
        return batch_ms(*args)

    monkeypatch.setattr(decode, "batch_ms", observed)
    decode.timed("stock", report, dry=True)
    assert seen == [set(), {"batch_1_context_32_ms"}]


class FakeWindows:
    """Serves windows of a budget at once; the clock is the engine's."""

    def __init__(self, engine: FakeEngine, out: Path, window_s: float) -> None:
        self.engine, self._out, self._window_s = engine, out, window_s
        self.served: list[tuple[int, int]] = []
        self.before: list[list[str]] = []

    def __call__(
        self, engine: FakeEngine, _requests: Any, _seconds: float, _drain_s: float, _cost: Any
    ) -> dict[str, float]:
        assert not engine.is_busy
        scheduler = engine.scheduler
        self.served.append((scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs))
        self.before.append(list(read(self._out)["windows"]))
        engine._clock_s += self._window_s
        return {"mean_e2e_s": 1.0, "requests": 3.0}


def budget_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str, start_s: float = 35.0
) -> tuple[int, Any, FakeWindows]:
    """Measure on a fake H100 whose clock begins when the engine has started; return status, result and windows."""
    budget, engine, out = load("gpu_budget"), FakeEngine(kv_tokens=400_000, in_flight=1), tmp_path / "found.json"
    windows = FakeWindows(engine, out, window_s=38.0)
    monkeypatch.setattr(load("gpu_engine"), "Engine", lambda *_, **__: engine)
    monkeypatch.setattr(budget, "served", windows)
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=engine.now))
    monkeypatch.setattr(load("on_gpu").torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(load("on_gpu").torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    init = budget.Run.__init__

    def started(run: Any, args: Any) -> None:
        init(run, args)
        engine._clock_s += start_s

    monkeypatch.setattr(budget.Run, "__init__", started)
    status = budget.main(["--out", str(out), "--profile", str(tmp_path / "profile.json"), *options])
    return status, read(out), windows


def test_three_windows_and_a_whole_grid_fit_into_the_time_of_an_h100(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """35 s of start, 26 s of grid, three windows of 38 s; the middle budget is last, and seats are as in a server."""
    status, found, windows = budget_run(tmp_path, monkeypatch)
    assert status == 0
    assert windows.served == [(8192, 256), (512, 256), (1024, 256)]
    assert windows.before == [[], ["8192"], ["8192", "512"]], "written after each window"
    assert (found["complete"], found["grid_dropped"], "grid_cut_off" in found) == (True, [], False)
    assert windows.engine.now() <= 190.0
    assert 0 < found["rate_per_s"] < found["saturation_per_s"]


def test_a_slow_start_is_at_the_cost_of_the_grid_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("gpu_budget"), "_LEAST_GRID_S", 5.0)
    status, found, windows = budget_run(tmp_path, monkeypatch, start_s=57.0)
    assert status == 0
    assert found["grid_cut_off"]
    assert found["grid_s"] < 16.0
    assert len(windows.served) == 3
    assert windows.engine.now() <= 190.0


def test_a_window_without_time_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, found, windows = budget_run(tmp_path, monkeypatch, start_s=80.0)
    assert status == 3
    assert (found["complete"], found["windows_left_out"]) == (False, [1024])
    assert [tokens for tokens, _ in windows.served] == [8192, 512]
    assert windows.engine.now() <= 190.0


def test_the_grid_is_in_the_file_after_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, counts = load("gpu_grid"), []
    measure = grid.Grid.measure

    def observed(self: Any, spec: Any) -> Any:
        for _ in measure(self, spec):
            yield
            counts.append((len(read(tmp_path / "found.json")["grid"]), len(self.cells)))

    monkeypatch.setattr(grid.Grid, "measure", observed)
    budget_run(tmp_path, monkeypatch)
    assert len(counts) > 50
    assert all(written == measured for written, measured in counts)


def test_too_few_steps_for_a_fit_are_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load("gpu_budget"), "_LEAST_GRID_S", 0.0)
    status, found, _ = budget_run(tmp_path, monkeypatch, "--grid-s", "1")
    assert status == 3
    assert found["complete"] is False
    assert len(found["grid"]) >= 1
    assert "steps were measured, at least 50 are needed" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"complete": false}', '{"complete": false, "windows": {}}', "no JSON"])
def test_nothing_to_simulate_is_a_failure_of_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measured.json").write_text(text)
    assert load("gpu_budget").main(["--simulate", str(tmp_path / "measured.json")]) == 3
    assert capsys.readouterr().err.startswith("gpu_budget: error: ")


def test_a_benchmark_killed_in_its_grid_leaves_the_cells(tmp_path: Path) -> None:
    """A process that kills itself after the third cell: nothing more is written, and the file is whole."""
    script = f"""
import os, sys
sys.path[:0] = [{str(GPU)!r}, {str(GPU.parents[1])!r}]
import gpu_engine, gpu_budget, gpu_grid, on_gpu
from tests.benchmarks.fake_gpu_engine import FakeEngine
gpu_engine.Engine = lambda *_, **__: FakeEngine(seats=28, budget=128)
measure = gpu_grid.Grid.measure
def killed(self, spec):
    for _ in measure(self, spec):
        yield
        if len(self.cells) == 3:
            os.kill(os.getpid(), 9)
gpu_grid.Grid.measure = killed
gpu_budget.main(["--dry", "--out", sys.argv[1]])
"""
    out = tmp_path / "found.json"
    done = subprocess.run([sys.executable, "-c", script, str(out)], timeout=HANG_S, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (len(read(out)["grid"]), read(out)["complete"]) == (3, False)


def test_steps_of_a_window_are_told_by_kind_beside_what_the_grid_says() -> None:
    """Three steps, of which the last is still under way when the window ends."""
    budget, shape = load("gpu_budget"), load("vllm_ext.simulation.cost.step_shape").StepShape
    shapes = [shape.of_rows([(1, 9), (100, 0)]), shape.of_rows([(1, 10), (1, 100)]), shape.of_rows([(1, 11)])]
    cost = SimpleNamespace(device_s=lambda one: one.num_tokens / 1000)
    found = budget.kinds([*shapes[:2], shape.of_rows([]), shapes[2]], [0.2, 0.01, 0.0], cost)
    names = ("steps", "mean_s", "mean_s_by_the_grid", "mean_requests", "mean_tokens")
    assert {kind: tuple(told[name] for name in names) for kind, told in found.items()} == {
        "decodes alone": (1, 0.01, 0.002, 2, 2), "with prompts": (1, 0.2, 0.101, 2, 101),
    }  # fmt: skip


def test_a_window_notes_what_is_planned_and_leaves_the_scheduler_as_it_was() -> None:
    budget = load("gpu_budget")
    requests = {"a": SimpleNamespace(num_computed_tokens=10), "b": SimpleNamespace(num_computed_tokens=64)}
    schedule = lambda *_: SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 64})  # noqa: E731
    scheduler = SimpleNamespace(schedule=schedule, requests=requests)
    clock = iter([1.0, 1.5])
    engine = SimpleNamespace(scheduler=scheduler, now=lambda: next(clock), step=lambda: scheduler.schedule(False))
    watched = budget.Watched(engine)
    watched.step()
    watched.close()
    assert (watched.rows, watched.seconds) == ([[(1, 9), (64, 0)]], [0.5])
    assert scheduler.schedule is schedule
