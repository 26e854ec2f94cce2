"""`vllm-ext sweep`: its folder, going on after an interruption, and what is said of wrong flags."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.extent import HANG_S
from tests.support.processes import until
from vllm_ext.cli.sweep import main
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep import pools
from vllm_ext.simulation.sweep.store import NAME, PointStore

SMALL = ("--cost", "constant", "--dataset", "fixed:20:8", "--num-requests", "8", "--max-model-len", "64")
GRID = (*SMALL, "--system", "upstream-fcfs,alise", "--axis", "workload.rate_per_s=1,5", "--quiet")


def latency(spec: SimulationSpec) -> dict[str, float]:
    """A plain function instead of a simulation: 100 ms at 3 requests per second, 5 with alise."""
    rate = spec.workload.rate_per_s or 0.0
    name = "normalised_latency_mean_ms_per_token"
    return {"requests": 8.0, name: 100 * rate / (5 if spec.engine.system == "alise" else 3)}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[SimulationSpec]:
    """What was run, by `latency`."""
    seen: list[SimulationSpec] = []

    def counted(spec: SimulationSpec) -> Mapping[str, float]:
        seen.append(spec)
        return latency(spec)

    monkeypatch.setattr(pools, "simulate_point", counted)
    return seen


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "summary.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def points(folder: Path) -> list[tuple[str, ...]]:
    with contextlib.closing(sqlite3.connect(folder / NAME)) as rows:
        return rows.execute("select key, spec, metrics from points order by key").fetchall()


def num_points(folder: Path) -> int:
    """Points so far, also while a sweep is at work or has not begun."""
    try:
        return len(points(folder)) if (folder / NAME).is_file() else 0
    except sqlite3.OperationalError:  # not made yet
        return 0


def test_page_has_who_keeps_to_the_constraints_and_every_run(tmp_path: Path, runs: list[SimulationSpec]) -> None:
    page, limit = tmp_path / "sweep.html", "normalised_latency_mean_ms_per_token<=100"
    assert main([*GRID, "--dir", str(tmp_path / "points"), "--constraint", limit, "--html", str(page)]) == 0
    shown = page.read_text(encoding="utf-8")
    assert "3 of 4 combinations keep to normalised_latency_mean_ms_per_token&lt;=100" in shown
    assert (shown.count("<svg"), shown.count("<tr>")) == (1, 5)
    again = [*SMALL, "--quiet", "--dir", str(tmp_path / "more"), "--html", str(page)]
    assert main([*again, "--system", "fcfs,alise"]) == 0
    assert "Not drawn: no axis of numbers" in page.read_text(encoding="utf-8")
    assert main([*again, "--capacity", "--constraint", limit]) == 0
    assert '<li class="met">' in page.read_text(encoding="utf-8")


def test_grid_of_real_simulations_fills_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GRID, "--dir", str(tmp_path), "--constraint", "requests>=8"]) == 0
    got = json.loads(capsys.readouterr().out)
    written = {file.name for file in tmp_path.iterdir()}
    assert written == {NAME, "sweep.json", "summary.csv", "summary.json", "plot.png"}
    assert got == json.loads((tmp_path / "summary.json").read_text())
    assert (got["metrics"], got["name"]) == ({"points": 4, "failed_points": 0}, "sweep")
    rows = [
        [row[key] for key in ("engine.system", "workload.rate_per_s", "requests", "meets")] for row in table(tmp_path)
    ]
    assert rows == [[system, rate, "8.0", "True"] for system in ("upstream-fcfs", "alise") for rate in ("1", "5")]
    assert str(tmp_path) not in (tmp_path / "summary.json").read_text()


def test_folder_alone_goes_on_and_prints_the_same_bytes_and_further_values_run_alone(
    tmp_path: Path, runs: list[SimulationSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for flags in (GRID, ("--quiet",)):
        assert main([*flags, "--dir", str(tmp_path)]) == 0
        outputs.append((capsys.readouterr().out, (tmp_path / "summary.csv").read_bytes()))
    assert outputs[0] == outputs[1]
    assert len(runs) == 4
    main([*GRID, "--dir", str(tmp_path), "--axis", "engine.watermark=0.0,0.1"])
    assert len(runs) == 8, "the points without a watermark were there"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_sweep_that_is_stopped_takes_its_workers_along_and_resumes_to_the_bytes_of_a_whole_one(
    tmp_path: Path, number: signal.Signals, runs: list[SimulationSpec]
) -> None:
    """Ctrl-C reaches the workers too, a kill the parent alone. A worker sleeps: nobody may wait for it."""
    (tmp_path / "sleepy.py").write_text(
        "import time\n"
        "def point(spec):\n"
        "    if spec.workload.rate_per_s == 5:\n"
        "        time.sleep(1000)\n"
        "    rate = spec.workload.rate_per_s\n"
        "    return {'requests': 8.0, 'normalised_latency_mean_ms_per_token': 100 * rate / 3}\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys\n"
        "import sleepy\n"
        "from vllm_ext.cli.sweep import main\n"
        "from vllm_ext.simulation.sweep import pools\n"
        "if __name__ == '__main__':\n"
        # a shell that started the tests in the background has Ctrl-C ignored by all its children
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    pools.simulate_point = sleepy.point\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    folder = tmp_path / "sweep"
    flags = [*SMALL, "--axis", "workload.rate_per_s=1,5,6", "--dir", str(folder), "--jobs", "2", "--quiet"]
    command = [sys.executable, script, *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        until(lambda: process.poll() is not None or num_points(folder) == 2)
        assert process.poll() is None
        (os.killpg if number is signal.SIGINT else os.kill)(process.pid, number)
        _, said = process.communicate(timeout=HANG_S)
        until(lambda: is_gone(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == (130 if number is signal.SIGINT else -number)
    assert (f"--dir {folder}" in said) == (number is signal.SIGINT)
    assert "Traceback" not in said
    assert len(points(folder)) == 2
    assert main(["--dir", str(folder), "--quiet"]) == 0
    assert [spec.workload.rate_per_s for spec in runs] == [5]
    whole = tmp_path / "whole"
    assert main([*flags[: flags.index("--dir")], "--dir", str(whole), "--quiet"]) == 0
    assert points(folder) == points(whole)
    assert (folder / "summary.csv").read_bytes() == (whole / "summary.csv").read_bytes()


def is_gone(group: int) -> bool:
    """Whether no process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_capacity_of_each_system_is_in_the_result(
    tmp_path: Path, runs: list[SimulationSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    limit = "normalised_latency_mean_ms_per_token<=100"
    flags = [*SMALL, "--system", "fcfs,alise", "--capacity", "--constraint", limit, "--tolerance", "0.02"]
    assert main([*flags, "--dir", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    metrics = json.loads(shown.out)["metrics"]
    fcfs, alise = (metrics[f"engine.system={name}.capacity_requests_per_s"] for name in ("fcfs", "alise"))
    assert 3 / 1.02 <= fcfs <= 3
    assert 5 / 1.02 <= alise <= 5
    first, second = table(tmp_path)
    assert float(first["upper_requests_per_s"]) <= float(first["capacity_requests_per_s"]) * 1.02
    assert second["violated_above"] == limit
    assert float(second["lower.normalised_latency_mean_ms_per_token"]) <= 100
    assert "capacity_requests_per_s" in shown.err
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_capacity_that_is_never_met_has_no_rate(tmp_path: Path, runs: list[SimulationSpec]) -> None:
    flags = ["--capacity", "--constraint", "requests>8", "--min-rate", "0.5", "--quiet", "--dir", str(tmp_path)]
    assert main([*SMALL, *flags]) == 0
    (row,) = table(tmp_path)
    assert row["found"] == "never met"
    assert "capacity_requests_per_s" not in row


def test_failed_point_is_named_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(spec: SimulationSpec) -> Mapping[str, float]:
        if spec.engine.system == "alise" and spec.workload.rate_per_s == 5:
            raise ArithmeticError("five is too many")
        return latency(spec)

    monkeypatch.setattr(pools, "simulate_point", fails)
    assert main([*GRID, "--dir", str(tmp_path)]) == 3
    shown = capsys.readouterr()
    assert json.loads(shown.out)["metrics"] == {"points": 4, "failed_points": 1}
    assert "ArithmeticError: five is too many" in shown.err
    assert [row["failed"] for row in table(tmp_path)] == ["0", "0", "0", "1"]


def test_sweep_file_and_flags_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"axes": {"workload.rate_per_s": [1, 2]}, "base": {"engine": {"watermark": 0.1}}}))
    flags = ["--sweep", str(file), "--max-num-seqs", "3", "--system", "fcfs,alise", "--repeats", "2", "--print-spec"]
    assert main([*flags, "--dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "base": {"engine": {"watermark": 0.1, "max_num_seqs": 3}},
        "axes": {"engine.system": ["fcfs", "alise"], "workload.rate_per_s": [1, 2]},
        "repeats": 2,
    }


def test_axis_takes_a_json_list_of_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axis = 'engine.options=[{}, {"prediction": {"window": 5}}]'
    assert main(["--axis", axis, "--print-spec", "--dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["axes"] == {"engine.options": [{}, {"prediction": {"window": 5}}]}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], ["nothing to sweep", "--axis"]),
        (["--axis", "workload.rate=1"], ["workload.rate", "rate_per_s"]),
        (["--axis", "workload.rate_per_s"], ["--axis workload.rate_per_s", "PATH=A,B"]),
        (["--axis", "workload.rate_per_s=1,0"], ["--rate", "workload.rate_per_s=0", "greater than 0"]),
        (["--axis", "engine.system=fcfs,nope"], ["--system", "nope", "alise"]),
        (["--repeats", "0"], ["--repeats: 0: must be a whole number of at least 1"]),
        (["--repeats", "2", "--plot", "x.pdf"], ["--plot: x.pdf: must end in .png, .svg"]),
        (["--capacity"], ["constraints", "at least one"]),
        (["--capacity", "--constraint", "tbt_p99_ms"], ["tbt_p99_ms", "<="]),
        (["--probes", "1", "--axis", "workload.seed=1,2"], ["--probes", "--capacity"]),
        (["--jobs", "0", "--axis", "workload.seed=1,2", "--num-requests", "1"], ["--jobs: 0"]),
        (["--sweep", "none.json"], ["--sweep", "none.json"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_what_is_wrong_is_one_line_that_names_it(
    flags: list[str], says: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main([*flags, "--dir", str(tmp_path / "sweep")])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert [text for text in says if text not in shown.err] == []
    assert not list(tmp_path.rglob("*.csv"))


def test_folder_with_another_sweep_at_work_is_refused(
    tmp_path: Path, runs: list[SimulationSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    with PointStore(tmp_path).locked():
        assert main([*GRID, "--dir", str(tmp_path)]) == 2
    assert "another sweep is at work" in capsys.readouterr().err
    assert runs == []
