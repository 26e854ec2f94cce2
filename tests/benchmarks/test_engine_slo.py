"""Requests with objectives in the benchmark of schedulers on the real engine: how they are made, told and judged."""

from __future__ import annotations

import asyncio
import itertools
from importlib import import_module as script
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext import systems
from vllm_ext.simulation.measure.latency import RequestTimeline

from .conftest import Letters

CALIBRATION = {"ttft_base_ms": 10.0, "ttft_ms_per_token": 0.1, "decode_step_ms": 5.0}
GIVEN = '{"ttft_base_ms": 10, "ttft_ms_per_token": 0.1, "decode_step_ms": 5}'
SMALL = ("--num-requests", "20", "--history-requests", "5", "--profile", "none")


def cells(*options: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cells of a mixed-slo run, without a model."""
    requests = script("engine_requests")
    monkeypatch.setattr(requests.Cells, "_vocab_size", lambda self: 2000)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: Letters())
    args = script("engine_compare").parse(["--workload", "mixed-slo", *SMALL, *options])
    return requests.Cells(args, Path("model"))


def timeline(arrival_s: float, *times_s: float) -> RequestTimeline:
    return RequestTimeline(req_id="r", arrival_s=arrival_s, token_times_s=times_s)


def sent(ttft_ms: float, tbt_ms: float, tier: str = "chat") -> dict[str, Any]:
    return {"source_id": f"{tier}-1", "hints": {"ttft_slo_ms": ttft_ms, "tbt_slo_ms": tbt_ms}}


def measured(system: str, repeat: int = 0, load: float = 1.3, **metrics: float) -> Any:
    """A cell with what goals look at."""
    engine_claims, report = script("engine_claims"), script("engine_report")
    values = {
        **dict.fromkeys(engine_claims.RATIOS, 1.0),
        engine_claims.ATTAINED: 0.5,
        engine_claims.GAPS: 2.0,
        engine_claims.TOKENS: 100.0,
        engine_claims.STEPS: 1000.0,
        engine_claims.EVICTIONS: 50.0,
        "goodput_requests_per_s": 5.0,
        "mean_waiting_requests": 1.0,
        "tbt_p99_ms": 20.0,
        report.NORMALISED: 10.0,
    }
    return report.Cell(system=system, at=load, repeat=repeat, metrics={**values, **metrics})


def goals(found: list[Any], workload: str = "mixed-slo") -> dict[str, Any]:
    module, reduced = script("engine_claims"), script("engine_report").reduce(found)
    module.add_ratios(found, reduced)
    return {goal.name: goal for goal in module.claims(found, reduced, workload, "")}


# --- requests ---------------------------------------------------------------------------------------------------------


def test_row_of_auto_is_there_as_soon_as_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = script("engine_rows")
    for known, expected in ((("fcfs",), False), (("fcfs", "auto"), True)):
        monkeypatch.setattr(systems, "known", lambda known=known: known)
        assert ("auto" in rows.default_rows("mixed-slo", quick=False).split(",")) == expected


@pytest.mark.parametrize("workload", ["lengths", "mixed-slo", "memory-bound"])
def test_default_rows_are_known_and_begin_with_upstream(workload: str) -> None:
    args = script("engine_compare").parse(["--workload", workload])
    assert args.systems[0] == "upstream-fcfs"
    quick = script("engine_compare").parse(["--workload", workload, "--quick"])
    assert set(quick.systems) <= set(args.systems)


def test_workload_sets_defaults_that_the_command_line_overrides() -> None:
    larger = ["--hf-overrides", '{"num_hidden_layers": 8}', "--load-format", "dummy"]
    args = script("engine_compare").parse(["--workload", "memory-bound", "--num-gpu-blocks", "99", *larger])
    assert (args.num_gpu_blocks, args.max_output_tokens, args.profile) == (99, 512, "measure")
    expected = {"hf_overrides": {"num_hidden_layers": 8}, "load_format": "dummy", "num_gpu_blocks_override": 99}
    assert script("engine_rows").engine_args(args).items() >= expected.items()
    plain = script("engine_compare").parse([])
    assert (plain.num_gpu_blocks, plain.max_output_tokens, plain.profile) == (64, 256, "none")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workload", "mixed-slo", "--calibration", '{"decode_step_ms": 1}'], "--calibration"),
        (["--workload", "mixed-slo", "--calibration", GIVEN.replace("5}", "-5}")], "decode_step_ms=-5"),
        (["--workload", "mixed-slo", "--dataset", "file.jsonl"], "makes its own requests"),
        (["--calibration", GIVEN], "have no objectives"),
        (["--workload", "mixed-slo", "--slo-scale", "0"], "--slo-scale"),
    ],
)
def test_options_that_contradict_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        script("engine_compare").parse(options)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_workload_has_its_tiers_in_their_shares_and_repeats_for_a_seed() -> None:
    slo = script("engine_slo")
    rows = slo.dataset("mixed-slo", 2000, seed=1).rows
    assert rows == slo.dataset("mixed-slo", 2000, seed=1).rows != slo.dataset("mixed-slo", 2000, seed=2).rows
    tiers = [slo.tier_of(row.source_id) for row in rows]
    for name, tier in slo.TIERS["mixed-slo"].items():
        assert tiers.count(name) / 2000 == pytest.approx(tier.share, abs=0.04)


def test_idle_server_is_a_line_over_prompt_lengths_and_a_median_gap() -> None:
    slo = script("engine_slo")
    phases = slo.phases(vocab_size=2000, max_prompt_tokens=600, seats=3, seed=0)
    assert [len(phase["requests"]) for phase in phases] == [20, 3]
    assert max(len(r["prompt_token_ids"]) for r in phases[0]["requests"]) == 600
    alone = []
    for number, request in enumerate(phases[0]["requests"]):
        hiccup_s = 3.0 if number == 7 else 0.0  # one of four of its length: the median does not see it
        tokens = len(request["prompt_token_ids"])
        first_s = 0.008 + 0.0001 * tokens + hiccup_s
        alone.append({"prompt_tokens": tokens, "sent_s": 0.5, "token_times_s": [0.5 + first_s]})
    full = [{"sent_s": 0.0, "token_times_s": [0.0, 0.004, 0.008, 0.5]}] * 3
    found = slo.calibrate(alone, full)
    assert (found.ttft_base_ms, found.ttft_ms_per_token) == (pytest.approx(8.0), pytest.approx(0.1))
    assert found.decode_step_ms == pytest.approx(4.0)


def test_noise_never_makes_an_idle_server_answer_before_it_is_asked() -> None:
    slo = script("engine_slo")
    phases = slo.phases(vocab_size=2000, max_prompt_tokens=64, seats=1, seed=0)
    full = [{"sent_s": 0.0, "token_times_s": [0.0, 0.004]}]
    for short_s, long_s in ((0.001, 0.100), (0.100, 0.001)):
        lengths = [len(r["prompt_token_ids"]) for r in phases[0]["requests"]]
        alone = [
            {"prompt_tokens": n, "sent_s": 0.0, "token_times_s": [short_s if n == 16 else long_s]} for n in lengths
        ]
        found = slo.calibrate(alone, full)
        assert min(found.idle_ttft_ms(1), found.idle_ttft_ms(5000)) > 0


def test_objectives_are_proportional_to_the_idle_server_and_differ_by_request() -> None:
    slo, workload = script("engine_slo"), script("engine_workload")
    lot = [
        workload.BenchRequest(
            source_id=f"{tier}-{i}", prompt=None, prompt_token_ids=(1,) * 50, output_tokens=3, clipped=False
        )
        for i in range(200)
        for tier in ("assistant", "document")
    ]
    made = slo.objectives(lot, "mixed-slo", slo.Calibration(**CALIBRATION), scale=1.0, seed=3)
    doubled = slo.Calibration(**{name: 2 * value for name, value in CALIBRATION.items()})
    again = slo.objectives(lot, "mixed-slo", doubled, scale=1.0, seed=3)
    assert [r["tbt_slo_ms"] for r in again] == pytest.approx([2 * r["tbt_slo_ms"] for r in made], rel=1e-3)
    assert made == slo.objectives(lot, "mixed-slo", slo.Calibration(**CALIBRATION), scale=1.0, seed=3)
    strict, loose = made[::2], made[1::2]
    assert len({r["ttft_slo_ms"] for r in strict}) > 150
    assert sorted(r["tbt_slo_ms"] for r in strict)[100] == pytest.approx(5 * 5.0, rel=0.1)
    assert sorted(r["ttft_slo_ms"] for r in loose)[100] == pytest.approx(20 * 15.0, rel=0.1)


def test_every_system_is_sent_the_same_requests_and_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cells("--calibration", GIVEN, monkeypatch=monkeypatch)
    found = {}
    for system in ("upstream-fcfs", "upstream-priority", "accelgen"):
        with made.cell(system, 0, 5.0) as spec:
            found[system] = spec["phases"][-1]["requests"]
    plain = found["upstream-fcfs"]
    assert found["accelgen"] == plain
    assert all(request["hints"]["ttft_slo_ms"] > 0 for request in plain)
    assert [request["priority"] for request in plain] == [0] * 20
    by_objective = [round(request["hints"]["ttft_slo_ms"]) for request in plain]
    assert [request["priority"] for request in found["upstream-priority"]] == by_objective


def test_idle_server_is_measured_before_capacity_and_only_if_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = cells(monkeypatch=monkeypatch)
    assert unknown.to_calibrate
    names = [phase["name"] for phase in unknown.at_once("upstream-fcfs")["phases"]]
    assert names == ["warmup", "alone", "full", "history", "measured"]
    known = cells("--calibration", GIVEN, monkeypatch=monkeypatch)
    assert not known.to_calibrate
    assert [p["name"] for p in known.at_once("upstream-fcfs")["phases"]] == ["warmup", "history", "measured"]


def test_profile_is_measured_once_with_the_engines_settings_and_given_to_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(script("engine_process"), "run", lambda _label, command: commands.append(command))
    made = cells("--calibration", GIVEN, "--profile", "measure", monkeypatch=monkeypatch)
    given = {}
    for system in ("upstream-fcfs", "fcfs", "sarathi", "accelgen"):
        with made.cell(system, 0, 5.0) as spec:
            options = spec["engine_args"].get("additional_config", {}).get("vllm_ext", {})
            given[system] = "profile" in options
    assert given == {"upstream-fcfs": False, "fcfs": False, "sarathi": True, "accelgen": True}
    (command,) = commands
    joined = " ".join(command)
    assert "--model model" in joined
    assert "--max-model-len 2048 --max-num-seqs 16 --block-size 32" in joined


def test_profile_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="must be measure, none, or a file"):
        script("engine_prepared").StepTimes("nowhere.json", Path("model"), {}, rounds=1)


# --- results ----------------------------------------------------------------------------------------------------------


def test_objectives_are_judged_request_by_request() -> None:
    """Three requests: one meets both, one has a gap too long, one starts too late."""
    report = script("engine_claims")
    lines = [timeline(0.0, 0.1, 0.2), timeline(0.0, 0.1, 0.9, 1.0), timeline(0.0, 0.6, 0.7, 0.8, 2.0)]
    requests = [sent(200, 150), sent(200, 400), sent(500, 1300, tier="document")]
    found = report.slo_metrics(requests, lines)
    assert found["slo_attainment_fraction"] == pytest.approx(1 / 3)
    assert found["slo_ttft_attainment_fraction"] == pytest.approx(2 / 3)
    assert found["slo_tbt_attainment_fraction"] == pytest.approx(2 / 3)
    assert (found["goodput_requests_per_s"], found["goodput_tokens_per_s"]) == (pytest.approx(0.5), pytest.approx(1.0))
    assert found["tbt_p99_over_slo"] == pytest.approx(2.0, rel=0.1), "0.8 s of 0.4 s is the worst of six gaps"
    assert found["tier_chat_slo_attainment_fraction"] == 0.5
    assert found["tier_document_slo_attainment_fraction"] == 0.0


def test_gain_over_upstream_is_paired_within_repeats() -> None:
    found = []
    for repeat, base in enumerate((0.1, 0.5, 0.2)):
        found.append(measured("upstream-fcfs", repeat, slo_attainment_fraction=base))
        found.append(measured("accelgen", repeat, slo_attainment_fraction=0.6))
    gain = goals(found)["accelgen.load_1.3.slo_attainment_gain_points"]
    assert (gain.value, gain.met) == (pytest.approx(40.0), True)


def test_sarathi_must_keep_gaps_that_upstream_breaks_and_most_of_the_throughput() -> None:
    found = [measured("upstream-fcfs"), measured("sarathi", tbt_p99_over_slo=0.9, throughput_tokens_per_s=96.0)]
    made = goals(found)
    assert made["upstream-fcfs.load_1.3.tbt_p99_over_slo"].met, "the workload is hard enough to tell"
    assert made["sarathi.load_1.3.tbt_p99_over_slo"].met
    cost = made["sarathi.load_1.3.throughput_tokens_per_s_over_upstream-fcfs"]
    assert (cost.value, cost.goal, cost.met) == (0.96, 0.97, False)


def test_past_future_is_compared_with_aggressive() -> None:
    found = [measured("aggressive"), measured("past-future", preemptions=9.0, output_steps=1001.0)]
    made = goals(found, "memory-bound")
    assert made["past-future.load_1.3.preemptions_over_aggressive"].met
    steps = made["past-future.load_1.3.output_steps_over_aggressive"]
    assert (steps.value, steps.met) == (1.001, False)
    assert "past-future 1001, aggressive 1000" in steps.note


def test_no_evictions_anywhere_is_no_division_by_zero() -> None:
    found = [measured("aggressive", preemptions=0.0), measured("past-future", preemptions=0.0)]
    assert goals(found, "memory-bound")["past-future.load_1.3.preemptions_over_aggressive"].value == 1.0


def test_auto_is_judged_by_each_systems_own_metric_and_by_the_best_of_upstream() -> None:
    found = [
        measured("upstream-fcfs", slo_attainment_fraction=0.3),
        measured("upstream-chunked", tbt_p99_over_slo=1.1, slo_attainment_fraction=0.35),
        measured("sarathi", tbt_p99_over_slo=0.8),
        measured("accelgen", slo_attainment_fraction=0.9),
        measured("auto", tbt_p99_over_slo=0.95, slo_attainment_fraction=0.8),
    ]
    made = {name: goal for name, goal in goals(found).items() if name.startswith("auto")}
    assert made["auto.load_1.3.tbt_p99_over_slo_loss_to_sarathi"].value == 1.0, "both are within the objective"
    assert made["auto.load_1.3.tbt_p99_over_slo_loss_to_upstream"].value == pytest.approx(1 / 1.1)
    behind = made["auto.load_1.3.slo_attainment_fraction_loss_to_accelgen"]
    assert (behind.value, behind.goal, behind.met) == (pytest.approx(0.9 / 0.8), 1.02, False)
    assert made["auto.load_1.3.slo_attainment_fraction_loss_to_upstream"].note.startswith(
        "slo_attainment_fraction against upstream-chunked"
    )
    assert not [name for name in goals(found[:4]) if name.startswith("auto")], "not registered, not judged"


def test_counters_of_our_scheduler_are_those_of_the_measured_time() -> None:
    cell = script("engine_cell")
    before = {"policy_s": 1.0, "policy_steps": 100.0, "stalls": 1.0, "preemptions_memory": 2.0}
    now = {"policy_s": 1.5, "policy_steps": 200.0, "stalls": 1.0, "preemptions_memory": 5.0}
    found = cell.since(before, now)
    assert found == {"stalls": 0.0, "preemptions_memory": 3.0, "policy_us_per_step": pytest.approx(5000.0)}
    assert cell.since({}, {}) == {}


class Echo:
    """An engine that answers at once, with as many tokens as the hidden length says, one request at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.extra_args: list[dict[str, Any]] = []
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=None))

    async def generate(self, prompt: Any, sampling: Any, req_id: str, priority: int) -> Any:
        self.extra_args.append(sampling.extra_args)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        completion = SimpleNamespace(token_ids=[1, 2], finish_reason="stop")
        yield SimpleNamespace(outputs=[completion], num_cached_tokens=0)


@pytest.mark.parametrize(("one_by_one", "most"), [(True, 1), (False, 3)])
async def test_requests_of_a_phase_come_one_by_one_or_at_once_and_tell_their_objectives(
    one_by_one: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, engine = script("engine_cell"), Echo()
    ticks = itertools.count(1000)
    monkeypatch.setattr(cell, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    request = {
        "prompt_token_ids": [9],
        "output_tokens": 2,
        "max_tokens": 16,
        "arrival_s": 0.0,
        "extra_args": {"tbt_slo_ms": 5.0},
    }
    phase = {"name": "alone", "requests": [request] * 3, "one_by_one": one_by_one}
    served = (await cell._phase(engine, cell.StepStats(), phase))["requests"]
    assert engine.most == most
    assert engine.extra_args == [{"tbt_slo_ms": 5.0}] * 3
    assert len({one["req_id"] for one in served}) == 3
    assert all(0 <= one["sent_s"] < one["token_times_s"][0] < 100 for one in served), "times count from the start"
    if one_by_one:  # each from its own: as many readings of the clock later
        assert len({one["sent_s"] for one in served}) == 1
