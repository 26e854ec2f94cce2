"""The search on a made-up server whose best settings are known, and what it is told of failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.simulation.plan.answer import Answer, answer, doubt, parts_of_choice
from vllm_ext.simulation.plan.candidates import DEFAULT, Candidate
from vllm_ext.simulation.plan.evidence import Objective
from vllm_ext.simulation.plan.runs import Bench, NoAnswer, Part, Parts, at, parts_of
from vllm_ext.simulation.plan.saturation import carried, saturation
from vllm_ext.simulation.plan.search import LOADS, Coarse, search
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.capacity import Constraint
from vllm_ext.simulation.sweep.pools import InProcessPool
from vllm_ext.simulation.sweep.store import PointStore
from vllm_ext.simulation.workloads.build import build

CARRIES = 4.0
MEAN_ONLY = Objective(with_slo=False)
Model = Callable[[SimulationSpec], float]
"""How many times better than vLLM as it is."""


def measured(spec: SimulationSpec, better: Model) -> dict[str, float]:
    engine, rate = spec.engine, spec.workload.rate_per_s or 0.0
    load = rate / CARRIES
    mean = 1000.0 * (1 + max(0.0, load)) / better(spec)
    part = {"e2e_mean_ms": mean, "e2e_p99_ms": 5 * mean, "ttft_p90_ms": 100.0}
    if engine.system == "past-future":
        part["e2e_p99_ms"] *= 2
    # Windows differ a little, as those of two runs do.
    windows = {f"window_{k}.{name}": value * (1 + 0.001 * k) for k in range(4) for name, value in part.items()}
    return {**part, **windows, "requests": 100.0, "middle_requests_per_s": min(rate, CARRIES), "preemptions": 0.0}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    stores: list[PointStore] = []

    def made(evaluate: Callable[[SimulationSpec], dict[str, float]], **fields: Any) -> Bench:
        spec = SimulationSpec.model_validate({
            "engine": {"max_model_len": 2048}, "workload": {"num_requests": 300, "rate_per_s": 1.0}, **fields,
        })  # fmt: skip
        stores.append(PointStore(tmp_path / f"store{len(stores)}").__enter__())
        return Bench(spec, stores[-1], InProcessPool(evaluate), lambda *_: None)

    yield made
    for store in stores:
        store.__exit__()


def planned(bench: Bench, objective: Objective = MEAN_ONLY, loads: Sequence[float] = LOADS) -> tuple[Coarse, Answer]:
    parts = parts_of(build(bench.base.workload))
    saturated = saturation(bench, parts, 1.0)
    coarse = search(bench, parts, objective, saturated)
    return coarse, answer(bench, parts, objective, saturated, coarse, loads)


def by_budget(spec: SimulationSpec) -> float:
    return {256: 1.4, 512: 1.2, 128: 1.1}.get(spec.engine.max_num_batched_tokens or 0, 1.0)


def test_the_rate_doubles_until_the_server_no_longer_follows(make: Callable[..., Bench]) -> None:
    asked: list[float] = []

    def run(spec: SimulationSpec) -> dict[str, float]:
        asked.append(spec.workload.rate_per_s or 0.0)
        return measured(spec, by_budget) | {"requests": float(spec.workload.num_requests or 0)}

    bench = make(run)
    found = saturation(bench, parts_of(build(bench.base.workload)), 1.0)
    assert (found.rate_per_s, found.own_load) == (CARRIES, 0.25)
    assert asked == [1.0, 2.0, 4.0, 8.0, 6.0]


def test_saturation_counts_conversations_where_the_rate_does(make: Callable[..., Bench]) -> None:
    """Three requests each: the rate is that of the conversations."""

    def run(spec: SimulationSpec) -> dict[str, float]:
        rate = spec.workload.rate_per_s or 0.0
        requests = 3.0 * (spec.workload.num_requests or 0)
        return {"requests": requests, "middle_requests_per_s": 3 * min(rate, 1.5)}

    bench = make(run)
    assert saturation(bench, parts_of(build(bench.base.workload)), 1.0).rate_per_s == pytest.approx(1.5)


def test_of_conversations_clients_grow_until_more_of_them_get_no_more(make: Callable[..., Bench]) -> None:
    """Each has some 5.6 turns a minute apart, so that a hundred of them would be over before many talk at once."""
    asked: list[int] = []

    def run(spec: SimulationSpec) -> dict[str, float]:
        assert (spec.workload.arrivals, spec.workload.rate_per_s) == ("closed-loop", None)
        build(spec.workload)  # what a real run would refuse
        asked.append(spec.workload.clients)
        return {"requests": 100.0, "middle_requests_per_s": min(spec.workload.clients / 60.0, 20.0)}

    bench = make(run, workload={"source": "pensieve-sharegpt", "num_requests": 100})
    parts = parts_of(build(bench.base.workload))
    found = saturation(bench, parts, 0.1)
    assert asked == [64, 192, 576, 1728, 5184]
    assert found.rate_per_s == pytest.approx(20 / parts.turns)
    assert carried(bench, parts, Candidate(tokens=512), found) == (found.rate_per_s, found.rate_per_s)
    assert asked[-1] == 5184


def test_short_thought_is_no_saturation(make: Callable[..., Bench]) -> None:
    """Clients that never wait get few requests each in a run that is shorter than their thought."""
    asked: list[int] = []

    def run(spec: SimulationSpec) -> dict[str, float]:
        asked.append(spec.workload.clients)
        each_s = 120.0 + 1.0
        assert (spec.workload.duration_s or 0.0) / each_s > 4
        return {"requests": 100.0, "middle_requests_per_s": min(spec.workload.clients / each_s, 40.0)}

    parts = Parts(Part(0, 90, 1), Part(0, 90, 2), True, turns=1.2, think_s=120.0)
    saturation(make(run), parts, 0.1)
    assert asked[:3] == [64, 192, 576]
    assert asked[-1] > 40 * 120


def test_a_rate_that_is_followed_is_no_capacity(make: Callable[..., Bench]) -> None:
    """Of thirty rows half seem to be served late; the long run follows what it is asked for."""

    def run(spec: SimulationSpec) -> dict[str, float]:
        rate, requests = spec.workload.rate_per_s or 0.0, float(spec.workload.num_requests or 0)
        fast = 3.0 if spec.engine.max_num_batched_tokens == 512 else 1.0
        served = rate / 2 if requests < 100 else min(rate, 40.0 * fast)
        return {"requests": requests, "middle_requests_per_s": served}

    bench, part = make(run), Part(0, 30, 1)
    parts = Parts(part, part, endless=True)
    found = saturation(bench, parts, 1.0)
    assert found.rate_per_s == 40.0
    assert carried(bench, parts, Candidate(tokens=512), found) == (40.0, 120.0)


def test_what_is_carried_before_and_after_is_asked_alike(make: Callable[..., Bench]) -> None:
    """This server gets less done the more waits: as it is it carries the same as itself."""

    def run(spec: SimulationSpec) -> dict[str, float]:
        rate = spec.workload.rate_per_s or 0.0
        served = rate if rate < CARRIES else CARRIES - 0.01 * rate
        return {"requests": float(spec.workload.num_requests or 0), "middle_requests_per_s": served}

    bench = make(run)
    parts = parts_of(build(bench.base.workload))
    before, now = carried(bench, parts, Candidate(tokens=512), saturation(bench, parts, 1.0))
    assert before == now == pytest.approx(CARRIES, rel=0.05)


def test_next_to_no_load_is_no_reason_to_have_no_answer(make: Callable[..., Bench]) -> None:
    bench = make(lambda spec: measured(spec, by_budget) | {"requests": float(spec.workload.num_requests or 0)})
    found = saturation(bench, parts_of(build(bench.base.workload)), 1e-7)
    assert found.rate_per_s == CARRIES


def test_a_run_that_a_longer_round_repeats_is_told_once(make: Callable[..., Bench]) -> None:
    told: list[tuple[str, float]] = []
    bench = make(lambda spec: measured(spec, by_budget))
    bench.tell = lambda candidate, load, _: told.append((candidate.name, load))
    for candidates in ([DEFAULT], [DEFAULT, Candidate(tokens=256)]):
        bench.tried(candidates, Part(0, 100, 1), (0.9,), CARRIES)
    bench.tried([DEFAULT], Part(0, 100, 2), (0.9,), CARRIES)
    assert told == [("vLLM as it is", 0.9), ("vLLM, 256 tokens", 0.9), ("vLLM as it is", 0.9)]


def test_prompts_beyond_the_context_are_named_where_nothing_ends(make: Callable[..., Bench]) -> None:
    bench = make(lambda _: {"requests": 0.0, "rejected_requests": 30.0})
    with pytest.raises(NoAnswer, match=r"30 of 30 requests were rejected: their prompts fill .* \(--max-model-len\)"):
        saturation(bench, parts_of(build(bench.base.workload)), 1.0)


@pytest.mark.parametrize("pool", [None, (5, 95)])
def test_only_rows_of_the_search_are_drawn_again(
    make: Callable[..., Bench], tmp_path: Path, pool: tuple[int, int] | None
) -> None:
    path, before = tmp_path / "mine.jsonl", 0 if pool is None else pool[0]
    lengths = [900] * before + [4] * 30 + [900] * 60
    rows = [{"prompt_tokens": 20, "output_tokens": tokens, "timestamp": 0.5 * i} for i, tokens in enumerate(lengths)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")

    def run(spec: SimulationSpec) -> dict[str, float]:
        lengths = {request.output_tokens for request in build(spec.workload).start()}
        if spec.workload.num_requests == 2000:
            assert lengths == {4}, "the others are for the final table"
        served = min(spec.workload.rate_per_s or 0.0, CARRIES)
        return {"requests": float(spec.workload.num_requests or 0), "middle_requests_per_s": served}

    bench = make(run, workload={"source": str(path), "arrivals": "recorded", "pool": pool})
    parts = parts_of(build(bench.base.workload))
    assert saturation(bench, parts, 2.0).rate_per_s == CARRIES


def test_what_keeps_to_a_constraint_is_found_although_it_costs_the_mean(make: Callable[..., Bench]) -> None:
    def run(spec: SimulationSpec) -> dict[str, float]:
        small = spec.engine.max_num_batched_tokens == 128
        found = measured(spec, lambda s: 0.97 if small else by_budget(s))
        return {**found, "tbt_p99_ms": 40.0 if small else 200.0}

    limit = Constraint.parse("tbt_p99_ms<=50")
    wanted = Objective(with_slo=False, constraints=(limit,), own_load=0.25)
    _, found = planned(make(run), wanted)
    assert (found.choice.name, found.unmet) == ("vLLM, 128 tokens", False)


def test_seats_that_must_stay_rule_out_half_the_choices_budget(make: Callable[..., Bench]) -> None:
    """With 1,024 seats 1,024 tokens are the least, and what is worth a try otherwise would lower the seats."""
    bench = make(
        lambda spec: measured(spec, lambda s: 1.4 if s.engine.max_num_batched_tokens == 1024 else 1.0),
        hardware={"model": "llama-3.1-8b", "device": "h100"},
    )
    parts = parts_of(build(bench.base.workload))
    coarse = search(bench, parts, MEAN_ONLY, saturation(bench, parts, 1.0), keep=("seats",))
    assert coarse.choice == Candidate(tokens=1024)
    assert min(one.tokens or 8192 for one in coarse.finalists) == 1024


def test_conversations_are_as_many_as_overlap_at_a_load() -> None:
    spec = SimulationSpec.model_validate({"workload": {"source": "pensieve-sharegpt", "num_requests": 100}})
    parts = parts_of(build(spec.workload))
    assert parts.life_s == pytest.approx((parts.turns - 1) * 60)
    loaded = parts.loaded(parts.search, 3.0, 400)
    assert loaded.count == pytest.approx(3.0 * 3 * parts.life_s, abs=1)
    assert parts.loaded(parts.final, 3.0).count == pytest.approx(5 / 3 * loaded.count, abs=1)
    assert parts.loaded(parts.search, 0.01, 400) == parts.search, "those asked for are enough"
    by_requests = replace(parts, counts_sessions=False)
    assert by_requests.loaded(parts.search, 3.0 * parts.turns, 400) == loaded, "the same load in another unit"
    few = replace(parts, endless=False)
    assert few.loaded(few.search, 3.0, 40) == few.search, "a file has no more"
    alone = replace(parts, think_s=0.0)
    assert alone.loaded(alone.search, 3.0, 40).count == 40


def test_the_best_budget_and_system_are_found_together(make: Callable[..., Bench]) -> None:
    bench = make(lambda spec: measured(spec, lambda s: by_budget(s) * (1.3 if s.engine.system == "alise" else 1.0)))
    coarse, found = planned(bench)
    assert found.choice.name == "alise, 256 tokens"
    assert coarse.vllm.name == "vLLM, 256 tokens"
    assert {"vLLM as it is", "vLLM, 256 tokens", "alise", "alise, 256 tokens"} <= {c.name for c in coarse.finalists}
    assert found.helps_from == 0.5
    assert found.over(found.choice, 0.9, "e2e_mean_ms").value == pytest.approx(1.4 * 1.3)
    assert "past-future" in " ".join(coarse.dropped)
    assert not set(coarse.dropped) & {one.name for one in coarse.finalists}


def test_a_system_that_brings_nothing_is_not_recommended(make: Callable[..., Bench]) -> None:
    _, found = planned(make(lambda spec: measured(spec, lambda s: by_budget(s) * (1.005 if s.engine.options else 1.0))))
    assert found.choice.name == "vLLM, 256 tokens"


@pytest.mark.parametrize("allowed", [False, True])
def test_kv_in_8_bits_is_shown_and_chosen_only_if_that_is_allowed(make: Callable[..., Bench], allowed: bool) -> None:
    bench = make(lambda spec: measured(spec, lambda s: by_budget(s) * (3 if s.hardware.kv_dtype_bytes == 1 else 1)))
    _, found = planned(bench, Objective(with_slo=False, allow_fp8_kv=allowed))
    fp8 = Candidate(tokens=256, fp8_kv=True)
    assert found.over(fp8, 0.9, "e2e_mean_ms").value == pytest.approx(3 * 1.4)
    assert found.choice == (fp8 if allowed else Candidate(tokens=256))
    assert ("--allow-fp8-kv" in found.rejected.get(fp8.name, "")) is not allowed


def test_what_a_choice_consists_of_is_run_for_the_reader(make: Callable[..., Bench]) -> None:
    """With 512 tokens the system is best, with its own budget it is worse than vLLM: it is no finalist by itself."""

    def better(spec: SimulationSpec) -> float:
        ours = spec.engine.system == "alise+past-future"
        return (1.5 if spec.engine.max_num_batched_tokens == 256 else 0.9) if ours else by_budget(spec)

    _, found = planned(make(lambda spec: measured(spec, better)))
    assert found.choice.name == "alise+past-future, 256 tokens"
    parts = parts_of_choice(found.choice)
    assert {label: found.over(one, 0.9, "e2e_mean_ms").value for label, one in parts.items()} == {
        "the flags of vLLM": pytest.approx(1.4), "--scheduler-cls alise+past-future": pytest.approx(0.9),
    }  # fmt: skip


def test_where_nothing_helps_the_server_stays_as_it_is(make: Callable[..., Bench]) -> None:
    _, found = planned(make(lambda spec: measured(spec, lambda _: 1.0)))
    assert found.choice == DEFAULT
    assert found.helps_from is None


def test_what_was_best_in_the_search_must_prove_itself_on_other_requests(make: Callable[..., Bench]) -> None:
    """With 256 tokens the P99 is twice as long on the final part, whose seed is another."""

    def run(spec: SimulationSpec) -> dict[str, float]:
        found = measured(spec, by_budget)
        if spec.engine.max_num_batched_tokens == 256 and spec.workload.seed == 0:
            found["e2e_p99_ms"] *= 2
        return found

    coarse, found = planned(make(run))
    assert coarse.choice.name == "vLLM, 256 tokens"
    assert found.choice.name == "vLLM, 512 tokens", "the next larger one stands behind it"
    assert found.rejected["vLLM, 256 tokens"].startswith("P99 end-to-end 1.43 times as long at 0.5")


def slo_run(spec: SimulationSpec, met: Model, mean: Model) -> dict[str, float]:
    """With a share of met objectives in every window."""
    found = measured(spec, mean) | {"slo_attainment_fraction": met(spec)}
    return found | {f"window_{k}.slo_attainment_fraction": met(spec) for k in range(4)}


WITH_SLO = Objective(with_slo=True)


def test_objectives_that_the_server_as_it_is_never_meets_can_be_met(make: Callable[..., Bench]) -> None:
    """A ratio to nothing has no interval: the server of which none met them was left as it is."""
    small = lambda spec: 1.0 if spec.engine.max_num_batched_tokens == 256 else 0.0  # noqa: E731
    _, found = planned(make(lambda spec: slo_run(spec, small, lambda _: 1.0)), WITH_SLO)
    assert found.choice == Candidate(tokens=256)
    assert (found.helps_from, found.is_better(found.choice, 0.9)) == (0.5, True)


def test_what_meets_as_many_objectives_in_less_time_is_better(make: Callable[..., Bench]) -> None:
    _, found = planned(make(lambda spec: slo_run(spec, lambda _: 1.0, by_budget)), WITH_SLO)
    assert found.choice == Candidate(tokens=256)
    assert found.helps_from == 0.5


def test_missed_objectives_outweigh_latency(make: Callable[..., Bench]) -> None:
    misses = lambda spec: 1.0 if spec.engine.max_num_batched_tokens in (None, 2048) else 0.8  # noqa: E731
    _, found = planned(make(lambda spec: slo_run(spec, misses, by_budget)), WITH_SLO)
    assert found.choice.tokens is None


def test_the_choice_is_also_run_at_the_traces_own_load(make: Callable[..., Bench]) -> None:
    """It is not judged there: P90 of the TTFT is twice as long, which the reader is told."""

    def run(spec: SimulationSpec) -> dict[str, float]:
        found = measured(spec, by_budget)
        slow = spec.engine.max_num_batched_tokens == 256 and (spec.workload.rate_per_s or 0.0) < 0.4
        requests = float(spec.workload.num_requests or 0)
        return {**found, "requests": requests, "ttft_p90_ms": 3000.0 if slow else 1500.0}

    _, found = planned(make(run), replace(MEAN_ONLY, own_load=0.05))
    assert found.choice == Candidate(tokens=256)
    assert found.over(found.choice, 0.05, "e2e_mean_ms").value == pytest.approx(1.4)
    assert found.who_pays == ["P90 TTFT is longer: 2.00 times at 0.05"]
    assert 0.05 not in found.pair


def test_a_gain_within_what_two_equal_runs_differ_by_is_none(make: Callable[..., Bench]) -> None:
    """The arrivals of an A/A pair's second run are 0.2 % closer together; here that alone makes it 1.5 times better."""

    def run(spec: SimulationSpec) -> dict[str, float]:
        rate = spec.workload.rate_per_s or 0.0
        jittered = abs(rate / CARRIES * 10 - round(rate / CARRIES * 10)) > 1e-6
        return measured(spec, lambda s: 1.5 if jittered else by_budget(s))

    assert planned(make(run))[1].choice == DEFAULT


def test_a_candidate_that_fails_is_dropped_and_a_server_that_fails_is_said(make: Callable[..., Bench]) -> None:
    def run(spec: SimulationSpec) -> dict[str, float]:
        if spec.engine.system == "alise":
            raise ArithmeticError("not today")
        return measured(spec, by_budget)

    coarse, found = planned(make(run))
    assert "ArithmeticError: not today" in coarse.dropped["alise"]
    assert found.choice.name == "vLLM, 256 tokens"

    def dead(spec: SimulationSpec) -> dict[str, float]:
        raise ArithmeticError("never")

    with pytest.raises(NoAnswer, match="failed at 1 requests/s: ArithmeticError: never"):
        planned(make(dead))


def test_costs_that_nobody_measured_are_doubted(make: Callable[..., Bench]) -> None:
    """With memory 30 % slower 512 tokens are best, and with any other constant 256 stay so."""

    def run(spec: SimulationSpec) -> dict[str, float]:
        slow = (spec.cost.memory_efficiency or 1.0) < 0.7
        best = 512 if slow else 256
        return measured(spec, lambda s: 1.4 if s.engine.max_num_batched_tokens == best else 1.0)

    bench = make(run)
    found = doubt(bench, parts_of(build(bench.base.workload)), MEAN_ONLY, Candidate(tokens=256), 1.0)
    assert found.flips
    assert found.budgets["memory -30 %"] == 512
    assert {tokens for case, tokens in found.budgets.items() if case != "memory -30 %"} == {256}


def test_a_file_is_searched_on_its_beginning_and_judged_on_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt_tokens": 20, "output_tokens": 4, "timestamp": 0.5 * i} for i in range(90)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    spec = SimulationSpec.model_validate({"workload": {"source": str(path), "arrivals": "recorded"}})
    parts = parts_of(build(spec.workload))
    assert (parts.search.first, parts.search.count, parts.final.first, parts.final.count) == (0, 30, 30, 60)
    made = at(spec, DEFAULT, parts.final, 4.0).workload
    assert (made.skip_requests, made.num_requests, made.rate_per_s) == (30, 60, 4.0)
    path.write_text("\n".join(json.dumps(row) for row in rows[:59]), encoding="utf-8")
    with pytest.raises(ValueError, match="59 requests; a plan needs at least 60"):
        parts_of(build(spec.workload))


@pytest.mark.parametrize(("burst", "named"), [(slice(0, 30), "1 to 30"), (slice(30, 90), "31 to 90")])
def test_a_part_that_arrives_at_once_is_named(tmp_path: Path, burst: slice, named: str) -> None:
    path, times = tmp_path / "mine.jsonl", [0.5 * i for i in range(90)]
    times[burst] = [times[burst.start]] * len(times[burst])
    rows = [{"prompt_tokens": 20, "output_tokens": 4, "timestamp": time_s} for time_s in times]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    spec = SimulationSpec.model_validate({"workload": {"source": str(path), "arrivals": "recorded"}})
    with pytest.raises(ValueError, match=f"requests {named} arrive at the same time"):
        parts_of(build(spec.workload))
    drawn = SimulationSpec.model_validate({"workload": {"source": str(path), "num_requests": 90}})
    assert parts_of(build(drawn.workload)).search.count == 30


def test_drawn_requests_are_searched_and_judged_by_other_seeds() -> None:
    spec = SimulationSpec.model_validate({"workload": {"num_requests": 300, "seed": 7}})
    assert parts_of(build(spec.workload)) == Parts(Part(0, 300, 107), Part(0, 300, 7), endless=True)
