"""The benchmark of schedulers on the real engine: its parts without an engine, and one quick run with one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module as script
from pathlib import Path
from typing import Any

import pytest

from tests.support.extent import HANG_S
from vllm_ext.datasets import WorkloadRow

from .conftest import BENCHMARKS, Letters

SCRIPT = BENCHMARKS / "engine" / "engine_compare.py"


def fit(row: WorkloadRow, **limits: Any) -> Any:
    workload = script("engine_workload")
    return workload.fit(row, Letters(), workload.Limits(**limits), lambda length: (9,) * length)


def row(prompt: str, output: str = "ab") -> WorkloadRow:
    return WorkloadRow(source_id=prompt, prompt=prompt, output_text=output)


def phase(*times: list[float], reason: str = "stop") -> dict[str, Any]:
    """Requests that came at 0 s, were sent at 0.5 s and should have two tokens."""
    request = {"req_id": "a", "arrival_s": 0.0, "sent_s": 0.5, "output_tokens": 2, "finish_reason": reason}
    load = {"mean_waiting_requests": 2.0, "preemptions": 1.0}
    return {"requests": [{**request, "token_times_s": one} for one in times], "load": load, "foreign_cpu_cores": None}


def cell(system: str, latency_ms: float, *, load: float = 0.9, repeat: int = 0) -> Any:
    engine_claims, report = script("engine_claims"), script("engine_report")
    metrics = {**dict.fromkeys(engine_claims.RATIOS, 1.0), "mean_waiting_requests": 3.0, "preemptions": 0.0}
    return report.Cell(system=system, at=load, repeat=repeat, metrics={**metrics, report.NORMALISED: latency_ms})


def judged(cells: list[Any], note: str = "") -> tuple[dict[str, Any], Any]:
    """Goals by metric, and what the cells were reduced to."""
    reduced = script("engine_report").reduce(cells)
    script("engine_claims").add_ratios(cells, reduced)
    return {goal.name: goal for goal in script("engine_claims").claims(cells, reduced, "lengths", note)}, reduced


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("alise", ("alise", None, None)),
        ("alise@cold", ("alise", None, "cold")),
        ("fcfs+alise@warm", ("fcfs+alise", None, "warm")),
        ("alise:swap-8@cold", ("alise", "swap-8", "cold")),
    ],
)
def test_a_label_names_a_system_its_variant_and_what_its_predictor_knows(
    label: str, expected: tuple[str, str | None, str | None]
) -> None:
    rows = script("engine_rows")
    assert rows.split(label) == expected
    args = script("engine_compare").parse([])
    sources = rows.system_args(label, args)["additional_config"]["vllm_ext"]["prediction"]["sources"]
    assert ("retrieval" in sources) == (expected[2] is not None)
    args.ext_config = {"prediction": {"sources": ["hint"]}}
    given = rows.system_args(label, args)["additional_config"]["vllm_ext"]["prediction"]
    assert given == {"sources": ["hint"]}, "what was asked for stays"


def test_a_variant_has_options_of_its_own_and_those_given_stay() -> None:
    rows = script("engine_rows")
    args = script("engine_compare").parse(["--workload", "swapping", "--tier-gib", "2"])
    args.ext_config = {"admission": {"gain_ratio": 3.0}, "kv_tier": {"policy": "lru"}}
    found = rows.system_args("alise:swap-8-ahead@cold", args)
    assert found["scheduler_cls"] == "alise"
    options = found["additional_config"]["vllm_ext"]
    assert options["kv_tier"] == {"bits": 8, "store": "ahead", "policy": "lru", "gib": 2.0}
    assert options["admission"] == {"gain_ratio": 3.0}
    assert options["residency"] == {"choose": "swap"}
    args.ext_config = {}
    assert "kv_tier" not in rows.system_args("alise:defer", args)["additional_config"]["vllm_ext"]


@pytest.mark.parametrize(
    ("label", "said"),
    [(f"alise{end}", "must be one of defer, recompute") for end in (":", ":swap-4", ":swap-4@cold")]
    + [(f"alise{end}", "must be cold or warm") for end in ("@", "@hot")],
)
def test_a_label_with_another_variant_or_state_is_refused(label: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        script("engine_rows").split(label)


def test_variants_are_options_that_their_systems_take() -> None:
    from vllm_ext.config import parse
    from vllm_ext.systems import build

    rows = script("engine_rows")
    for workload in (rows.SWAPPING, rows.UNUSED_TIER):
        args = script("engine_compare").parse(["--workload", workload])
        for system in set(args.systems) - {"upstream-fcfs"}:
            found = rows.system_args(system, args)
            config = parse({"system": found["scheduler_cls"], **found["additional_config"]["vllm_ext"]})
            wanted = build(config).tier(config.kv_tier.changed(bits=None)).bits
            assert wanted == (8 if found["scheduler_cls"].startswith("alise") else 16)
            assert bool(config.kv_tier.gib) == (":swap" in system or ":tier" in system or ":cost" in system)


def test_variants_are_judged_against_another_row_of_the_same_repeat() -> None:
    ours, other = "alise-published:swap-8", "alise-published:defer"
    cells = [cell(ours, 8), cell(other, 10), cell(ours, 30.0, repeat=1), cell(other, 40.0, repeat=1), cell("fcfs", 1.0)]
    ((metric, goal),) = judged(cells, "tiny model.")[0].items()
    assert metric == f"{ours}.load_0.9.normalised_latency_mean_ms_per_token_over_alise_published_defer"
    assert (goal.value, goal.met) == (pytest.approx(0.775), True)
    assert goal.note.startswith("tiny model. ")
    assert f"{ours} 19, {other} 25; ratio over repeats 0.750 to 0.800; waiting on average: 3.0" in goal.note


def test_goals_compare_rows_that_are_measured() -> None:
    engine_claims, rows = script("engine_claims"), script("engine_rows")
    without = set(rows.WORKLOADS) - set(rows.WITH_OBJECTIVES)
    for workloads, comparisons in [
        (without, engine_claims.COMPARISONS),
        *(({w}, c) for w, c in engine_claims.SLO_COMPARISONS.items()),
    ]:
        measured = {row for workload in workloads for row in rows.default_rows(workload, quick=False).split(",")}
        assert {row for one in comparisons for row in (one.row, one.other)} <= measured


def test_a_warm_predictor_learns_from_no_row_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, workload = script("engine_prepared"), script("engine_workload")
    rows = [row(f"prompt {i}", output="x" * (i + 1)) for i in range(20)]
    measured = [fit(r) for r in rows[:8]]
    learned: list[dict[str, Any]] = []

    def train(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        dataset = Path(command[command.index("--dataset") + 1])
        learned.extend(json.loads(line) for line in dataset.read_text().splitlines())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(predictor.subprocess, "run", train)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: Letters())
    knows = predictor.Learned(Path("model"), 10, 0)
    for _ in range(2):  # the second time it has learned already
        knows.prepare(rows, [measured], workload.Limits())
    assert len(learned) == 10
    assert {entry["prompt"] for entry in learned} <= {f"prompt {i}" for i in range(8, 20)}
    lengths = {f"prompt {i}": i + 1 for i in range(20)}
    assert all(lengths[entry["prompt"]] == entry["output_tokens"] for entry in learned)


@pytest.mark.parametrize(
    ("source", "limits", "prompt", "prompt_ids", "output_tokens", "clipped"),
    [
        (row("why", output="abcdefgh"), {"length_scale": 0.5}, "why", (1, 119, 104, 121), 4, False),
        (row("why", output=""), {}, "why", (1, 119, 104, 121), 1, False),
        (
            row("abcdef", output="x" * 50),
            {"max_prompt_tokens": 4, "max_output_tokens": 10},
            "abc",
            (1, 97, 98, 99),
            10,
            True,
        ),
        (
            WorkloadRow(source_id="t", prompt_tokens=40, output_tokens=20),
            {"length_scale": 0.25},
            None,
            (9,) * 10,
            5,
            False,
        ),
    ],
    ids=["scaled", "an empty answer is one token", "cut, and the text with it", "of a trace: made up"],
)
def test_row_becomes_a_request_counted_with_the_served_tokenizer(
    source: WorkloadRow,
    limits: dict[str, Any],
    prompt: str | None,
    prompt_ids: tuple[int, ...],
    output_tokens: int,
    clipped: bool,
) -> None:
    request = fit(source, **limits)
    assert (request.prompt, request.prompt_token_ids) == (prompt, prompt_ids)
    assert (request.output_tokens, request.clipped) == (output_tokens, clipped)


def draw(rows: Sequence[WorkloadRow], count: int, seed: int, vocab_size: int = 50) -> list[Any]:
    workload = script("engine_workload")
    found: list[Any] = workload.draw(rows, Letters(), workload.Limits(), vocab_size=vocab_size, count=count, seed=seed)
    return found


def test_requests_have_different_prompts_and_repeat_for_a_seed() -> None:
    rows = [row(str(i % 20)) for i in range(100)]
    drawn = [draw(rows, 15, seed) for seed in (0, 0, 1)]
    assert len({r.prompt for r in drawn[0]}) == len(drawn[0]) == 15
    assert drawn[0] == drawn[1] != drawn[2]


def test_workload_with_too_few_different_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 requests with different prompts are needed, 1 found in 5 rows"):
        draw([row("same")] * 5, 3, 0)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (phase([1.0]), "ended with 1 tokens"),
        (phase([1.0, 2.0, 3.0]), "ended with 3 tokens"),
        (phase([1.0, 2.0], reason="length"), "reason 'length'"),
        (phase(), "0 requests were served, expected 1"),
    ],
    ids=["too-short", "too-long", "not-by-itself", "lost"],
)
def test_cell_with_a_wrong_output_fails_instead_of_reporting_latencies(answer: dict[str, Any], problem: str) -> None:
    report = script("engine_report")
    with pytest.raises(report.WrongOutput, match=f"fcfs.*{problem}"):
        report.phase_metrics("fcfs", answer, 1)


def test_cell_metrics_count_from_the_intended_arrival_and_state_how_late_the_client_was() -> None:
    metrics = script("engine_report").phase_metrics("fcfs", phase([1.0, 3.0]), 1)
    assert metrics["ttft_mean_ms"] == pytest.approx(1000)
    assert metrics["client_lateness_max_ms"] == pytest.approx(500)
    assert metrics["preemptions"] == 1
    assert "foreign_cpu_cores" not in metrics, "not known on this machine, so not reported"


def test_ratios_pair_a_system_with_the_baseline_of_the_same_repeat() -> None:
    cells = [cell("upstream-fcfs", 10.0), cell("upstream-fcfs", 100.0, repeat=1), cell("upstream-fcfs", 1.0, repeat=2)]
    cells += [cell("alise", 5.0), cell("alise", 40.0, repeat=1), cell("alise", 0.8, repeat=2)]
    values = judged(cells)[1]["alise", 0.9]
    name = "normalised_latency_mean_ratio"
    assert values["normalised_latency_mean_ms_per_token"] == 5.0
    assert (values[name], values[f"{name}_min"], values[f"{name}_max"]) == (0.5, 0.4, 0.8)


def test_upstream_is_reported_as_baseline_with_the_same_keys() -> None:
    report = script("engine_report")
    reduced = report.reduce([cell("upstream-fcfs", 10.0), cell("alise", 5.0)])
    metrics, baselines = report.flatten(reduced, ["upstream-fcfs"], "load_{:g}")
    assert baselines["upstream-fcfs"][f"load_0.9.{report.NORMALISED}"] == 10.0
    assert metrics[f"alise.load_0.9.{report.NORMALISED}"] == 5.0
    assert not [key for key in metrics if key.startswith("upstream")]


def test_goals_are_judged_where_measured_and_a_missed_one_states_the_facts() -> None:
    cells = [cell(s, ms, load=load) for s, ms, load in [("upstream-fcfs", 10, 0.5), ("alise", 11, 0.5)]]
    goals, _ = judged([*cells, cell("upstream-fcfs", 10.0), cell("oracle-alise", 5.0)], "tiny model.")
    assert {metric: goal.met for metric, goal in goals.items()} == {
        "alise.load_0.5.normalised_latency_mean_ratio": False,
        "oracle-alise.load_0.9.normalised_latency_mean_ratio": True,
    }
    missed = goals["alise.load_0.5.normalised_latency_mean_ratio"].note
    assert missed.startswith("tiny model. ")
    assert "waiting on average: 3.0 (alise), 3.0 (upstream-fcfs); 0 preemptions" in missed


def test_failing_engine_is_reported_with_its_last_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = script("engine_process")
    child = tmp_path / "child.py"
    child.write_text("raise SystemExit('no memory left')", encoding="utf-8")
    monkeypatch.setattr(process, "CELL", child)
    with pytest.raises(process.CellFailed, match=r"(?s)alise: the engine failed \(exit status 1\).*no memory left"):
        process.serve("alise", {})


def test_an_engine_ends_with_the_benchmark_that_is_told_to(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    engine = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import engine_process, sys; engine_process.run('x', [sys.executable, '-c', {engine!r}])"
    folder = Path(script("engine_process").__file__).parent
    with subprocess.Popen([sys.executable, "-c", code], cwd=folder) as benchmark:
        deadline = time.monotonic() + HANG_S
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        engine_pid = int(pid.read_text())
        benchmark.terminate()
        assert benchmark.wait(HANG_S) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(engine_pid, 0)


def test_made_up_prompts_that_come_out_alike_are_made_up_for() -> None:
    options = ["--synthetic", "sharegpt-vllm", "--num-requests", "200", "--history-requests", "20"]
    args = script("engine_compare").parse(options)
    for args.seed in range(5):
        assert len(draw(script("engine_requests").load(args).rows, 223, args.seed, vocab_size=2300)) == 223


def test_unknown_system_is_refused_with_the_known_ones_before_anything_starts() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--systems", "upstream-fcfs,nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "alise" in done.stderr
    assert "upstream-priority" in done.stderr


@pytest.mark.full
@pytest.mark.e2e
def test_quick_run_serves_to_exact_lengths_and_its_recording_is_repeated_exactly(tmp_path: Path) -> None:
    """One run of two engines; all that needs real ones is asked of it."""
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"Count to {i}.", "output": "one two three " * (1 + i % 5)} for i in range(40)]
    data.write_text("\n".join(json.dumps(r) for r in rows), encoding="utf-8")
    out, record = tmp_path / "out.json", tmp_path / "record.jsonl.gz"
    options = [
        "--systems",
        "upstream-fcfs,alise",
        "--capacity",
        "40",
        "--num-requests",
        "16",
        "--history-requests",
        "4",
    ]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", *options, "--dataset", data, "--out", out, "--record", record],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},  # other tests run beside it
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert result["details"]["engine"]["alise"]["max_num_seqs"] == 8
    assert "steered" in result["details"]["engine"]["alise"]["scheduler_cls"].lower()
    assert result["metrics"]["alise.load_0.9.requests"] == 16
    assert result["baselines"]["upstream-fcfs"]["load_0.9.requests"] == 16
    assert str(tmp_path) not in done.stdout
    check_recording(record)


def check_recording(path: Path) -> None:
    from vllm_ext.simulation.recorded import recording
    from vllm_ext.simulation.recorded.replay import replay
    from vllm_ext.simulation.recorded.validation import fit, validate

    upstream, alise = recording.read(path)
    assert [len(run.requests) for run in (upstream, alise)] == [16, 16]
    assert [r.arrival_s for r in upstream.requests] == [r.arrival_s for r in alise.requests]
    for run in (upstream, alise):
        assert run.dropped == 0
        assert all(len(request.token_times_s) == request.output_tokens for request in run.requests)
        result = replay(run)
        assert result.divergence is None
        assert (result.steps, result.requests) == (result.total_steps, 16 + 4 + 3)
        assert result.steps > 40
    scheduler: Any = result.scheduler
    assert scheduler.tracked.runtime.num_observations > 10
    predicted = validate(alise, fit([upstream]))
    assert predicted.metrics["judged_requests"] == 16
