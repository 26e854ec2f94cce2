"""Validation against engines whose step times and front end are known exactly, because they are simulated."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.cli.main import main
from vllm_ext.simulation.cost.fitted import Fitted, StepCurve
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.recorded import recording, validation
from vllm_ext.simulation.recorded.recording import Add, Finish, RecordingError, Run
from vllm_ext.simulation.recorded.run import RecordedWorkload, _answers, offsets, timed_steps
from vllm_ext.simulation.recorded.validation import fit, floors, validate
from vllm_ext.simulation.workloads.token_ids import output_ids

from .recorded_runs import DELIVERY_S, INTAKE_S, simulate

COST = Fitted(
    StepCurve(base_s=0.004, slopes=(2e-5,), per_request=1e-4, per_decode_context=1e-6, per_prefill_context=2e-6)
)
"""What steps of these engines take."""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Per system one recording to fit and one of other requests, served twice."""
    folder = tmp_path_factory.mktemp("recordings")
    with pytest.MonkeyPatch.context() as patch:
        for system in ("upstream-fcfs", "alise"):
            for name, seed, repeats in (("fit", 1, 1), ("run", 2, 2)):
                path = folder / f"{system}-{name}.jsonl.gz"
                recording.start(path)
                for repeat in range(repeats):
                    simulate(path, patch, COST, system=system, seed=seed, repeat=repeat)
    return {path.name.partition(".")[0]: path for path in folder.iterdir()}


def runs_of(recordings: dict[str, Path], name: str) -> list[Run]:
    return recording.read(recordings[name])


@pytest.mark.parametrize("system", ["upstream-fcfs", "alise"])
def test_engine_that_is_as_the_simulator_says_is_predicted_almost_exactly(
    recordings: dict[str, Path], system: str
) -> None:
    fitted = fit(runs_of(recordings, f"{system}-fit"))
    found = validate(runs_of(recordings, f"{system}-run")[0], fitted)
    assert found.metrics["judged_requests"] == 50
    assert found.metrics["e2e_error_median"] < 0.002
    assert found.metrics["ttft_error_median"] < 0.01, "the intake is known to a part of a step only"
    assert found.metrics["tbt_mean_error_median"] < 0.002
    assert found.metrics["batch_jaccard_mean"] > 0.98
    assert found.metrics["first_token_order_agreement"] > 0.99
    assert found.metrics["e2e_mean_ms"] == pytest.approx(found.baseline["e2e_mean_ms"], rel=0.002)


def test_fit_finds_the_front_end_and_the_step_times(recordings: dict[str, Path]) -> None:
    fitted = fit(runs_of(recordings, "upstream-fcfs-fit"))
    assert fitted.offsets.delivery_s == pytest.approx(DELIVERY_S, abs=1e-6)
    assert fitted.offsets.intake_s == pytest.approx(INTAKE_S, abs=5e-4)
    for step in timed_steps(runs_of(recordings, "upstream-fcfs-run")[0]):
        if step.back_to_back:
            assert step.duration_s == pytest.approx(COST.device_s(step.shape), rel=1e-6)
            assert fitted.cost.device_s(step.shape) == pytest.approx(step.duration_s, rel=0.02)


def test_asynchronous_steps_last_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "async.jsonl"
    recording.start(path)
    simulate(path, monkeypatch, COST, depth=2)
    steps = [step for step in timed_steps(recording.read(path)[0]) if step.back_to_back]
    exact = sum(step.duration_s == pytest.approx(COST.device_s(step.shape), rel=1e-6) for step in steps)
    assert exact > 0.9 * len(steps)
    found = validate(recording.read(path)[0])
    assert found.metrics["e2e_error_median"] < 0.03


def test_engine_that_is_slower_than_what_was_fitted_shows_as_error(recordings: dict[str, Path]) -> None:
    """The errors must be able to show something: steps of half the time give latencies that are too low."""
    fitted = fit(runs_of(recordings, "upstream-fcfs-fit"))
    fast = replace(fitted, cost=Fitted(fitted.cost.curve.model_copy(update={"base_s": 0.001})))
    found = validate(runs_of(recordings, "upstream-fcfs-run")[0], fast)
    assert found.metrics["e2e_error_median"] > 0.2
    assert found.metrics["e2e_mean_error"] < -0.2


def test_without_another_recording_the_second_half_is_judged_and_has_no_part_in_the_fit(
    recordings: dict[str, Path],
) -> None:
    run = runs_of(recordings, "upstream-fcfs-run")[0]
    found = validate(run)
    assert found.metrics["judged_requests"] == 25
    first_judged = found.measured.timelines[0].arrival_s
    assert all(timeline.arrival_s >= first_judged for timeline in found.measured.timelines)
    late = [
        request.model_copy(update={"token_times_s": tuple(t + 1.0 for t in request.token_times_s)})
        if request.arrival_s >= first_judged
        else request
        for request in run.requests
    ]
    shifted = validate(replace(run, requests=tuple(late)))
    assert shifted.fit.offsets == found.fit.offsets
    assert shifted.fit.cost.curve == found.fit.cost.curve
    assert shifted.metrics["e2e_error_median"] > found.metrics["e2e_error_median"]


def test_requests_before_the_measured_part_are_simulated_and_not_judged(recordings: dict[str, Path]) -> None:
    run = runs_of(recordings, "alise-run")[0]
    workload = RecordedWorkload(run, offsets([run]))
    served = [request.req_id for request in workload.start()]
    assert len(served) == workload.rows == 60
    assert sum(req_id.startswith("warmup") for req_id in served) == 10
    judged = {timeline.req_id for timeline in validate(run, fit([run])).measured.timelines}
    assert not any(req_id.startswith("warmup") for req_id in judged)


def test_repeats_of_the_same_requests_give_the_floor_and_other_requests_do_not(recordings: dict[str, Path]) -> None:
    repeats = runs_of(recordings, "alise-run")
    floor = floors(repeats)["alise", 0.8]
    assert floor["e2e_error_median"] == 0.0, "these engines have no noise"
    assert floors([repeats[0], runs_of(recordings, "alise-fit")[0]]) == {}


def test_run_with_a_gap_is_refused(recordings: dict[str, Path]) -> None:
    run = runs_of(recordings, "alise-run")[0]
    with pytest.raises(RecordingError, match=r"3 entries of the run of line 1 are missing"):
        validate(replace(run, dropped=3))


def test_request_that_was_aborted_is_refused_with_its_line(recordings: dict[str, Path]) -> None:
    run = runs_of(recordings, "upstream-fcfs-run")[0]
    kept: list[Any] = []
    for entry in run.entries:
        if (ended := getattr(entry, "finished", ())) and ended[0][0].startswith("measured"):
            kept.append(Finish(at_s=entry.at_s, end_s=entry.end_s, clock=(), req_ids=None, status="FINISHED_ABORTED"))
            kept.append(entry.model_copy(update={"finished": ()}))
        else:
            kept.append(entry)
    with pytest.raises(RecordingError, match=r"line \d+: measured-\d+-0a1b2c3d did not end by itself"):
        RecordedWorkload(replace(run, entries=tuple(kept), lines=tuple(range(2, 2 + len(kept)))), offsets([run]))


def test_report_replays_judges_every_system_and_states_the_noise(recordings: dict[str, Path]) -> None:
    path, fit_path = recordings["alise-run"], recordings["alise-fit"]
    report = validation.make_report(recording.read(path), recording.read(fit_path))
    result = validation.make_result(report, path, fit_path, name="validate", command="x")
    assert report.divergences() == []
    assert result.metrics["alise.load_0.8.replayed_equal_steps_fraction"] == 1.0
    assert result.baselines[validation.MEASURED]["alise.load_0.8.e2e_mean_ms"] > 0
    assert result.baselines[validation.REPEAT]["alise.load_0.8.e2e_error_median"] == 0.0
    assert [goal.met for goal in result.claims] == [True] * 4
    assert "differ by 0.0% in this metric" in result.claims[2].note
    own = [result.metrics[f"alise.load_0.8.e2e_error_{q}"] for q in ("median", "p90")]
    assert [result.metrics[f"all.e2e_error_{q}"] for q in ("median", "p90")] == pytest.approx(own)  # equal repeats
    table = str(validation.make_table(report)).splitlines()
    assert len(table) == 5
    assert "real engine, again" in table[-2]
    assert table[-1].startswith("all")


def test_command_writes_result_cost_and_plot(
    recordings: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cost, plot = tmp_path / "out.json", tmp_path / "cost.json", tmp_path / "plot.png"
    argv = ["validate", str(recordings["alise-run"]), "--fit-on", str(recordings["alise-fit"]), "--no-replay"]
    assert main([*argv, "--out", str(out), "--save-cost", str(cost), "--plot", str(plot)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert result["config"]["fitted_on"] == "alise-fit.jsonl.gz"
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    assert Fitted.load(cost).quality is not None
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(["nowhere.jsonl"], "nowhere.jsonl"), (["RUN", "--system", "orca"], "system='orca'")],
)
def test_command_says_what_is_wrong_with_the_recording(
    recordings: dict[str, Path], capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    run = str(recordings["alise-run"])
    assert main(["validate", *(run if text == "RUN" else text for text in arguments)]) == 2
    assert problem in capsys.readouterr().err


def test_a_run_with_a_kv_connector_is_predicted_and_not_replayed(recordings: dict[str, Path]) -> None:
    """When copies end is not recorded."""
    plain, other = runs_of(recordings, "alise-run")
    settings = other.header.settings.model_copy(update={"connector": "TieredConnector"})
    header = other.header.model_copy(update={"settings": settings, "load": 2.0})
    runs, fit_on = [plain, replace(other, header=header)], runs_of(recordings, "alise-fit")
    with pytest.raises(RecordingError, match="has a KV tier; say by --model and --device"):
        validation.make_report(runs, fit_on)
    report = validation.make_report(runs, fit_on, hardware=HardwareSpec(device="cpu"))
    assert len(report.replays) == 1
    assert validation.EQUAL_STEPS in report.groups["alise", plain.header.load]
    assert validation.EQUAL_STEPS not in report.groups["alise", 2.0]
    assert report.groups["alise", 2.0]["e2e_error_median"] < 0.002


def test_repeats_whose_turns_ask_at_other_moments_are_repeats(recordings: dict[str, Path]) -> None:
    """Who goes on with a conversation asks later where the answer before came later."""
    one, other = runs_of(recordings, "alise-run")
    first, second, *rest = other.requests
    late = second.model_copy(update={"arrival_s": second.token_times_s[0] - 0.001})
    found = floors([one, replace(other, requests=(first, *rest, late))])
    assert found.keys() == floors([one, other]).keys()
    assert found["alise", one.header.load]["ttft_error_p90"] < 0.1


def test_a_turn_repeats_what_the_simulation_answers(recordings: dict[str, Path]) -> None:
    """And a third one that of both, or it would find nothing in the prefix cache."""
    run = runs_of(recordings, "upstream-fcfs-run")[0]
    first, second, third, *_ = (entry for entry in run.entries if isinstance(entry, Add))
    answers = _answers(run)
    more = (77, 78)
    turns = {second.req_id: first.prompt + answers[first.req_id] + more}
    turns[third.req_id] = turns[second.req_id] + answers[second.req_id][:3]
    entries = [
        entry.model_copy(update={"prompt": turns[entry.req_id]})
        if isinstance(entry, Add) and entry.req_id in turns else entry
        for entry in run.entries
    ]  # fmt: skip
    workload = RecordedWorkload(replace(run, entries=tuple(entries)), offsets([run]))
    asked = {request.req_id: request.token_ids for request in workload.start()}
    filler = output_ids(len(answers[first.req_id]), ended=False)
    expected = (*first.prompt, *filler, *more)
    assert answers[first.req_id] != tuple(filler)
    assert asked[run.client_id(first.req_id)] == first.prompt
    assert asked[run.client_id(second.req_id)] == expected
    assert asked[run.client_id(third.req_id)] == (*expected, *filler[:1] * 3)


def test_command_asks_for_the_hardware_of_a_run_with_a_tier(
    recordings: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = gzip.decompress(recordings["alise-run"].read_bytes()).replace(b'"connector":null', b'"connector":"Tiered"')
    (path := tmp_path / "run.jsonl").write_bytes(told)
    command = ["validate", str(path), "--fit-on", str(recordings["alise-fit"])]
    assert main(command) == 2
    assert "has a KV tier; say by --model and --device what its copies move" in capsys.readouterr().err
    assert main([*command, "--model", "opt-13b", "--device", "cpu"]) == 0
    assert "replayed_equal_steps_fraction" not in capsys.readouterr().out
