"""What is tried: settings that vLLM takes, and systems that may pay."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ext.simulation.plan.candidates import (
    AS_IT_IS,
    DEFAULT,
    Candidate,
    budgets,
    has_objectives,
    nearby,
    systems,
    with_budget,
    with_fp8_kv,
)  # fmt: skip
from vllm_ext.simulation.spec import SimulationSpec, resolve


def described(**fields: Any) -> SimulationSpec:
    return SimulationSpec.model_validate({"hardware": {"model": "llama-3.1-8b", "device": "h100"}, **fields})


def named(spec: SimulationSpec) -> list[str]:
    return [system.name for system in systems(spec)]


def test_budgets_are_powers_of_two_beside_the_servers_own() -> None:
    limits = resolve(described(engine={"max_model_len": 4096})).limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (1024, 8192)
    assert budgets(limits) == [128, 256, 512, 1024, 2048, 4096]
    assert budgets(limits._replace(max_num_batched_tokens=16_384))[-2:] == [4096, 8192]


@pytest.mark.parametrize(("given", "tokens", "seats"), [(None, 256, 256), (64, 256, 64), (512, 256, 256)])
def test_seats_never_exceed_the_budget(given: int | None, tokens: int, seats: int) -> None:
    """vLLM lowers its own number of seats, and refuses one that was given."""
    resolved = resolve(described(engine={"max_model_len": 4096, "max_num_seqs": given}))
    candidate = with_budget(DEFAULT, tokens, resolved)
    limits = resolve(candidate.on(resolved.spec)).limits
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (tokens, seats)
    assert ("--max-num-seqs" in candidate.flags()) is (given == 512)


def test_systems_are_tried_where_the_workload_has_what_they_work_on() -> None:
    plain = ["vLLM", "alise", "alise, for the tail", "past-future", "alise+past-future"]
    assert named(described()) == plain
    gaps = {"tiers": [{"name": "all", "tbt": {"base_s": 0.1}}]}
    assert named(described(workload=gaps)) == [*plain, "sarathi", "alise+sarathi", "auto", "accelgen"]
    first = {"tiers": [{"name": "all", "ttft": {"base_s": 1.0}}]}
    assert named(described(workload=first)) == [*plain, "auto", "accelgen"]
    talks, tier = {"source": "talks.jsonl", "conversations": True}, {"options": {"kv_tier": {"gib": 4.0}}}
    assert named(described(workload=talks)) == named(described(engine=tier)) == plain
    assert named(described(workload=talks, engine=tier)) == [*plain, "pensieve", "alise+pensieve"]


def told(spec: SimulationSpec, name: str) -> Candidate:
    return Candidate(system=next(system for system in systems(spec) if system.name == name))


ALL = {"name": "all", "ttft": {"base_s": 0.5}, "tbt": {"base_s": 0.035}}


def test_objectives_that_all_requests_share_are_options_of_the_server() -> None:
    spec = described(workload={"tiers": [ALL]}, engine={"options": {"slo": {"shed": True}}})
    for name in ("sarathi", "alise+sarathi", "auto", "accelgen"):
        candidate = told(spec, name)
        made = candidate.on(spec)
        assert made.engine.options == {"slo": {"shed": True, "ttft_ms": 500.0, "tbt_ms": 35.0}}
        assert not made.workload.announce_slo
        assert candidate.flags() == ["--scheduler-cls", name, "--ttft-slo-ms", "500", "--tbt-slo-ms", "35"]
        assert candidate.system.needs.endswith("its objectives are those of the flags")
    assert told(spec, "alise").on(spec).engine.options == {"slo": {"shed": True}}, "it follows none, and shares none"
    assert DEFAULT.on(spec).engine.options == {}


@pytest.mark.parametrize(
    "workload",
    [
        {"tiers": [ALL, {"name": "slow", "ttft": {"base_s": 5.0}}]},
        {"tiers": [{"name": "all", "ttft": {"base_s": 0.5, "per_prompt_token_s": 0.001}}]},
        {"tiers": [{"name": "all", "ttft": {"base_s": 0.5, "high": 2.0}}]},
        {"tiers": [{"name": "all", "ttft": {"bucket_s": [0.5, 1.0]}}]},
        {"tiers": [ALL], "announce_slo": True},
    ],
)
def test_objectives_that_differ_are_announced_by_the_clients(workload: dict[str, Any]) -> None:
    spec = described(workload=workload)
    candidate = told(spec, "accelgen")
    assert candidate.on(spec).workload.announce_slo
    assert candidate.on(spec).engine.options == {}
    assert candidate.flags() == ["--scheduler-cls", "accelgen"]
    assert candidate.system.needs.startswith("clients announce their objectives")
    assert DEFAULT.on(spec).workload.announce_slo is spec.workload.announce_slo


def test_objectives_that_the_user_gave_the_server_stay() -> None:
    spec = described(workload={"tiers": [ALL]}, engine={"options": {"slo": {"tbt_ms": 90.0}}})
    candidate = told(spec, "auto")
    assert candidate.on(spec).engine.options == {"slo": {"tbt_ms": 90.0}}
    assert candidate.flags() == ["--scheduler-cls", "auto"]


def test_classes_without_objectives_have_none_to_follow() -> None:
    spec = described(workload={"tiers": [{"name": "a"}, {"name": "b", "priority": 1}]})
    assert not has_objectives(spec)
    assert "auto" not in named(spec)


def test_vllm_alone_keeps_the_scheduling_policy() -> None:
    spec = described(engine={"scheduling_policy": "priority"})
    assert Candidate(tokens=256).on(spec).engine.system == "upstream-priority"
    assert DEFAULT.on(described()).engine.system == "upstream-fcfs"


def test_a_candidates_options_change_no_other_run() -> None:
    spec = described(engine={"options": {"ordering": {"theta": 0.5}}})
    made = told(spec, "alise, for the tail").on(spec)
    assert made.engine.options == {"ordering": {"theta": 0.5, "gamma": 1.0}}
    assert spec.engine.options == {"ordering": {"theta": 0.5}}


def test_a_candidate_is_a_run_and_its_flags() -> None:
    spec = described(engine={"max_model_len": 4096})
    tail = next(system for system in systems(spec) if system.name == "alise, for the tail")
    candidate = Candidate(system=tail, tokens=512, reserve=0.05)
    made = candidate.on(spec).engine
    assert (made.system, made.max_num_batched_tokens, made.watermark) == ("alise", 512, 0.05)
    assert made.options == {"ordering": {"gamma": 1.0}}
    assert candidate.name == "alise, for the tail, 512 tokens, 5 % reserve"
    assert candidate.flags() == [
        "--scheduler-cls", "alise", "--ext-optimise", "tail", "--max-num-batched-tokens", "512", "--watermark", "0.05",
    ]  # fmt: skip
    assert candidate.changed == {"scheduler", "tokens", "reserve"}
    assert (DEFAULT.name, DEFAULT.flags(), DEFAULT.changed) == ("vLLM as it is", [], set())


def test_neighbours_are_one_step_away() -> None:
    resolved = resolve(described(engine={"max_model_len": 4096}))
    found = list(nearby(Candidate(tokens=256), resolved))
    assert found == [
        Candidate(tokens=128), Candidate(tokens=512), Candidate(tokens=256, seats=128),
        Candidate(tokens=256, reserve=0.05),
    ]  # fmt: skip
    assert [one.tokens for one in nearby(Candidate(system=systems(resolved.spec)[1], tokens=4096), resolved)] == [
        2048,
        4096,
    ]
    assert AS_IT_IS.name == "vLLM"


def test_kv_in_8_bits_is_tried_where_it_makes_room() -> None:
    spec = described(engine={"max_model_len": 4096})
    (found,) = with_fp8_kv(Candidate(tokens=512), spec)
    assert (found.name, found.flags()[-2:]) == ("vLLM, 512 tokens, fp8 KV", ["--kv-cache-dtype", "fp8"])
    assert found.changed == {"tokens", "kv-dtype"}
    blocks = [resolve(one.on(spec)).num_blocks for one in (found, Candidate(tokens=512))]
    assert blocks[0] == pytest.approx(2 * blocks[1], abs=1)
    for fields in (
        {"hardware": {"model": "opt-13b", "device": "v100"}},
        {"hardware": {"kv_dtype_bytes": 1}},
        {"engine": {"num_blocks": 100}},
        {"engine": {"options": {"kv_tier": {"gib": 4.0}}}},
    ):
        assert with_fp8_kv(DEFAULT, SimulationSpec.model_validate(fields)) == [], fields
