"""`vllm-ext simulate`: what is printed, which files are written, and what is said of wrong flags."""

from __future__ import annotations

import contextlib
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.extent import HANG_S
from vllm_ext import config
from vllm_ext.cli import simulate
from vllm_ext.cli.simulate import main
from vllm_ext.report import common_flags
from vllm_ext.simulation.cost.fitted import Fitted, StepCurve
from vllm_ext.simulation.spec import SimulationSpec

SMALL = ("--cost", "constant", "--dataset", "fixed:20:8", "--num-requests", "12", "--max-model-len", "64")
CROWDED = (*SMALL, "--num-blocks", "9", "--max-num-seqs", "2", "--rate", "20")
"""Two seats and a pool of little more than one sequence."""


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    last: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return last


def test_one_system_gives_its_metrics_as_the_last_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert main([*SMALL, "--seed", "3", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    got = json.loads(shown.out)
    assert got == json.loads(out.read_text())
    assert (got["name"], got["seed"], got["baselines"]) == ("simulate", 3, {})
    assert got["metrics"]["requests"] == 12
    assert got["metrics"]["output_tokens"] == 12 * 8
    assert got["config"]["fcfs"]["cost"]["kind"] == "constant"
    assert "normalised_latency_mean_ms_per_token" in shown.err
    assert "s simulated in" in shown.err


def test_page_compares_systems_and_draws_each_measure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    systems = ("--system", "upstream-fcfs,alise", "--slo", "ttft=1,tbt=0.1", "--quiet")
    assert main([*CROWDED, *systems, "--html", str(page)]) == 0
    shown = page.read_text(encoding="utf-8")
    assert "alise: mean end-to-end latency " in shown
    assert shown.count("<svg") == 5, "objectives, three distributions, the server over time"
    assert "Not drawn" not in shown
    assert f"{result(capsys)['baselines']['upstream-fcfs']['e2e_mean_ms']:.4g}</td>" in shown
    assert main([*SMALL, "--dataset", "fixed:64:8", "--quiet", "--html", str(page)]) == 3
    assert "<li>incomplete: 12 of 12 requests (100.0%) were rejected" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "told"), [("page.txt", "must end in .html"), ("none.json/page.html", "must be a folder")]
)
def test_wrong_page_is_refused_before_anything_runs(
    name: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "none.json").touch()
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "--html", str(tmp_path / name)])
    said = capsys.readouterr().err
    assert said.startswith("vllm-ext simulate: argument --html: ")
    assert told in said
    assert said.count("\n") == 1


def test_rejected_requests_are_said_and_status_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--dataset", "fixed:64:8"]) == 3
    shown = capsys.readouterr()
    assert "incomplete: 12 of 12 requests (100.0%) were rejected" in shown.err
    assert json.loads(shown.out)["metrics"]["rejected_requests"] == 12


def test_bad_rows_are_an_error_or_left_out_counted_and_status_3(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.jsonl"
    good = json.dumps({"prompt": "Why?", "output": "Because it is there."})
    path.write_text(f"{good}\nnonsense\n{good}\n", encoding="utf-8")
    flags = ["--cost", "constant", "--dataset", str(path), "--max-model-len", "64"]
    assert main(flags) == 2
    assert "mine.jsonl: line 2: not JSON" in capsys.readouterr().err
    assert main([*flags, "--skip-bad-rows"]) == 3
    shown = capsys.readouterr()
    assert "incomplete: 1 rows of mine.jsonl cannot be read and were left out; 2 are usable" in shown.err
    assert "mine.jsonl: lengths of texts are estimates" in shown.err
    assert json.loads(shown.out)["metrics"]["requests"] == 2


def test_description_nested_too_deep_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 20_000 + "]" * 20_000, encoding="utf-8")
    assert main(["--spec", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"vllm-ext simulate: --spec {path}: nested too deep")


def test_terminal_gets_the_table_and_how_to_ask_for_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main([*SMALL]) == 0
    shown = capsys.readouterr()
    assert "normalised_latency_mean_ms_per_token" in shown.err
    assert shown.out == f"{common_flags.JSON_HINT}\n"
    assert main([*SMALL, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "simulate"


def test_same_flags_print_the_same_bytes_and_no_wall_clock(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for _ in range(2):
        main([*CROWDED, "--system", "fcfs,alise", "--quiet"])
        shown = capsys.readouterr()
        assert shown.err == ""
        outputs.append(shown.out)
    assert outputs[0] == outputs[1]
    assert "wall" not in outputs[0]


def test_replicas_behind_routers_are_rows_and_files_of_their_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first router is the baseline; what is described is one replica, and the load of all."""
    rows = tmp_path / "rows.csv"
    flags = ["--replicas", "2", "--router", "round-robin,marginal", "--requests", str(rows)]
    assert main([*CROWDED, "--system", "fcfs", *flags]) == 0
    shown = capsys.readouterr()
    got = json.loads(shown.out)
    assert list(got["baselines"]) == ["fcfs round-robin"]
    assert got["config"]["cluster"] == {"replicas": 2, "routers": ["round-robin", "marginal"]}
    assert got["metrics"]["fcfs marginal.requests"] == got["baselines"]["fcfs round-robin"]["requests"] > 0
    assert 0.5 <= got["metrics"]["fcfs marginal.steps_of_busiest_replica_fraction"] < 0.7
    assert {path.name for path in tmp_path.iterdir()} == {"rows.fcfs.round-robin.csv", "rows.fcfs.marginal.csv"}
    assert "fcfs marginal: " in shown.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--router", "best"], "argument --router: 'best': must be among round-robin, least, hash, home, marginal"),
        (["--replicas", "0"], "argument --replicas: 0: must be a whole number of at least 1"),
        (["--replicas", "2", "--report-s", "0"], "argument --report-s: "),
        (["--replicas", "2", "--series", "s.csv"], "--series=s.csv: must be left out with --replicas"),
    ],
)
def test_what_replicas_cannot_have_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # argparse's, or ours
        assert main([*SMALL, *flags]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


def test_systems_side_by_side_have_ratios_to_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CROWDED, "--system", "upstream-fcfs,fcfs,oracle-alise"]) == 0
    shown = capsys.readouterr()
    got = json.loads(shown.out)
    name = "e2e_mean_ms"
    assert list(got["baselines"]) == ["upstream-fcfs"]
    assert got["metrics"][f"fcfs.{name}"] == got["baselines"]["upstream-fcfs"][name]
    assert got["metrics"][f"fcfs.{name}_ratio"] == 1
    assert got["metrics"][f"oracle-alise.{name}_ratio"] == pytest.approx(
        got["metrics"][f"oracle-alise.{name}"] / got["baselines"]["upstream-fcfs"][name]
    )
    header = next(line for line in shown.err.splitlines() if line.startswith("metric"))
    assert " ".join(header.split()) == "metric upstream-fcfs fcfs / upstream-fcfs oracle-alise / upstream-fcfs"


def test_run_in_which_nobody_waited_says_so_and_names_a_rate_at_which_somebody_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*SMALL, "--max-num-seqs", "2", "--num-requests", "40"]
    assert main([*flags, "--rate", "0.5"]) == 0
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("no request waited"))
    rate = said.rpartition(" ")[2]
    assert "raise --rate above" in said
    assert main([*flags, "--rate", rate]) == 0
    shown = capsys.readouterr()
    assert "no request waited" not in shown.err
    assert json.loads(shown.out)["metrics"]["contended_steps"] > 0


def test_files_that_were_asked_for_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = {"requests": "r.csv", "series": "s.parquet", "trace": "t.json.gz", "plot": "p.svg", "cdf": "c.png"}
    flags = [part for option, name in names.items() for part in (f"--{option}", str(tmp_path / name))]
    assert main([*SMALL, *flags]) == 0
    assert {file.name for file in tmp_path.iterdir()} == set(names.values())
    with (tmp_path / "r.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 12
    assert str(tmp_path) not in capsys.readouterr().out, "results hold no absolute paths"


def test_files_of_several_systems_have_their_names_and_one_plot_shows_all(tmp_path: Path) -> None:
    flags = ["--requests", str(tmp_path / "r.csv.gz"), "--plot", str(tmp_path / "p.svg")]
    assert main([*SMALL, "--system", "fcfs,alise", "--quiet", *flags]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"r.fcfs.csv.gz", "r.alise.csv.gz", "p.svg"}


def test_plot_with_nothing_to_show_leaves_the_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main([*SMALL, "--max-time", "1e-300", "--cdf", str(tmp_path / "cdf.png"), "--quiet"])
    shown = capsys.readouterr()
    assert json.loads(shown.out)["metrics"]["unfinished_requests"] == 0
    assert shown.err == f"--cdf {tmp_path / 'cdf.png'}: no request finished, nothing is drawn\n"


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> SimulationSpec:
    assert main([*flags, "--print-spec"]) == 0
    return SimulationSpec.model_validate_json(capsys.readouterr().out)


def test_every_flag_sets_its_field(capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag alone, with a value other than the default."""
    texts = {
        "hardware.model": "opt-6.7b",
        "hardware.device": "a40",
        "cost.kind": "constant",
        "engine.scheduling_policy": "priority",
        "cost.file": "profile.json",
        "workload.source": "alpaca-like",
        "workload.format": "jsonl",
        "workload.arrivals": "recorded",
        "hardware.tensor_parallel": "2",
    }
    needs = {"workload.clients": ["--arrivals", "closed-loop"], "workload.announce_slo": ["--slo", "ttft=1"]}
    before = SimulationSpec().model_dump()
    for path, flag, described in config.flagged(SimulationSpec):
        names = config.flags.names_of(path, flag)
        section, _, field = path.rpartition(".")
        old = before[section][field] if section else before[field]
        for name in names:
            if described.annotation is bool:
                given = [f"--no-{name.removeprefix('--')}" if old else name]
            else:
                given = [name, texts.get(path) or ("77" if "int" in str(described.annotation) else "0.25")]
            after = printed(capsys, *given, *needs.get(path, [])).model_dump()
            new = after[section][field] if section else after[field]
            assert new != old, name
            assert described.annotation is bool or str(new) == given[1], name


def test_flags_win_over_the_file_and_may_set_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text(json.dumps({"engine": {"system": "alise", "max_num_seqs": 9}, "workload": {"rate_per_s": 5}}))
    option = "engine.options.ordering.grace_s=5"
    spec = printed(capsys, "--spec", str(file), "--max-num-seqs", "3", "--set", "workload.cv=1.0", "--set", option)
    assert (spec.engine.system, spec.engine.max_num_seqs, spec.workload.rate_per_s) == ("alise", 3, 5)
    assert spec.engine.options == {"ordering": {"grace_s": 5}}


def test_printed_spec_describes_the_same_run_and_what_is_no_json_is_named_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "spec.json"
    file.write_text('{"engine":\n {]}')
    assert main(["--spec", str(file)]) == 2
    assert f"--spec {file}: line 2: not JSON" in capsys.readouterr().err
    file.write_text("[]")
    assert main(["--spec", str(file)]) == 2
    assert f"--spec {file}: must hold an object" in capsys.readouterr().err
    spec = printed(capsys, *CROWDED, "--system", "alise", "--slo", "ttft=1,tbt=0.5")
    file.write_text(spec.model_dump_json())
    assert printed(capsys, "--spec", str(file)) == spec


def test_objectives_become_those_of_every_request(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--slo", "ttft=0.001,e2e=100", "--quiet"])
    metrics = result(capsys)["metrics"]
    assert metrics["slo_ttft_attainment_fraction"] == 0
    assert metrics["slo_e2e_attainment_fraction"] == 1
    assert metrics["goodput_requests_per_s"] == 0


def test_policy_and_other_options_go_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from vllm_ext.systems.upstream import Arrival\nclass Mine(Arrival):\n    pass\n")
    policy = f"{tmp_path / 'mine.py'}:Mine"
    spec = printed(capsys, "--policy", policy, "--set", 'engine.options={"seed": 3}')
    assert spec.engine.options == {"seed": 3, "policies": [policy]}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rate", "-1"], ["--rate", "-1.0", "greater than 0"]),
        (["--rate", "fast"], ["--rate", "fast"]),
        (["--system", "allise"], ["--system", "allise", "upstream-fcfs", "alise"]),
        (["--system", "fcfs,fcfs"], ["--system", "fcfs,fcfs", "once"]),
        (["--device", "x100"], ["--device", "x100", "a100-40"]),
        (["--set", "workload.foo=1"], ["workload.foo", "rate_per_s"]),
        (["--set", "workload"], ["--set workload", "PATH=JSON"]),
        (["--rate", "1", "--set", "workload.rate_per_s=2"], ["--set", "another flag"]),
        (
            ["--system", "alise", "--set", "engine.options.ordering.age=1"],
            ["engine.options.ordering.age", "grace_s"],
        ),
        (["--slo", "ttft=0"], ["--slo", "above 0"]),
        (["--slo", "tfft=1"], ["--slo", "ttft"]),
        (["--spec", "no-such-file.json"], ["--spec", "no-such-file.json"]),
        (["--dataset", "no-such-file.json"], ["no-such-file.json", "sharegpt-like"]),
        (["--trace", "t.csv"], ["--trace", "t.csv", ".json.gz"]),
        (["--num-blocks", "4", "--num-requests", "3"], ["max_model_len=2048", "48 tokens"]),
        (["--num-request", "4"], ["--num-request"]),
        (["--policy", "none.py:Mine"], ["--policy: engine.options.policies='none.py:Mine'"]),
        (["--arrivals", "gamma", "--set", "workload.cv=1e300"], ["workload.cv=1e+300", "1000"]),
        (["--set", f"workload.cv={'[' * 60_000}"], ["workload.cv='[[", "must be a valid number"]),
        (["--system", "alise", "--set", "engine.options.kv_tier.gib=1e400"], ["engine.options.kv_tier.gib=inf"]),
        (["--max-time", "inf"], ["--max-time", "finite"]),
        (["--num-blocks", "99999999999999999999"], ["--num-blocks", "16777216"]),
        (["--cost-file", "/", "--num-requests", "3"], ["--cost-file: cost.file='/'", "Is a directory"]),
        (["--profile=/", "--num-requests", "3"], ["--profile: cost.file='/'", "Is a directory"]),
        (["--out", ""], ["--out: '': must be a file"]),
        (["--out", "/"], ["--out: /: must be a file"]),
        (["--out", f"{__file__}/x.json"], ["--out", f"{__file__} must be a folder that can be written to"]),
        (["--plot", "x.pdf"], ["--plot: x.pdf: must end in .png, .svg"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else str(value),
)
def test_what_is_wrong_is_one_line_that_names_it(
    flags: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main([*flags, "--quiet"])
    except SystemExit as stopped:
        status = stopped.code
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    assert len(shown.err.splitlines()) == 1
    assert [text for text in says if text not in shown.err] == []


def test_table_shows_a_dash_where_there_is_no_ratio() -> None:
    text = str(simulate.table({"a": {"preemptions": 0.0, "requests": 4.0}, "b": {"preemptions": 3.0, "requests": 2.0}}))
    assert text.splitlines()[2:] == ["requests     4  2  0.5", "preemptions  0  3    -"]


def test_describing_a_run_imports_neither_vllm_nor_torch() -> None:
    program = (
        "import sys\nfrom vllm_ext.cli.simulate import main\nmain(['--rate', '2', '--print-spec'])\n"
        "sys.exit(str([m for m in ('vllm', 'torch', 'matplotlib', 'pandas') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.stderr.strip() == "[]"


def test_what_is_known_of_step_times_from_a_file_is_said_once_and_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Fitted(StepCurve(base_s=0.1)).save(tmp_path / "cost.json")
    flags = ["--cost-file", str(tmp_path / "cost.json"), "--num-requests", "3", "--quiet"]
    assert main(flags) == 0
    assert capsys.readouterr().err == "step times of cost.json: nothing is known of its fit\n"
    assert main([*flags, "--print-spec"]) == 0
    assert capsys.readouterr().err == ""
