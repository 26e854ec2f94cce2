"""Sarathi-Serve on vLLM's scheduler: decodes never wait behind prefill chunks, and steps keep the TBT objective."""

from __future__ import annotations

import pytest

from tests.support.steering import Rig, Table, steps
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.measure.metrics import summarise
from vllm_ext.simulation.run import simulate
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.workloads.spec import WorkloadSpec


def arrivals_of_figure_4(rig: Rig) -> Table:
    """A and B decode; C and D arrive, with prompts of 24 and 6 tokens."""
    for name in ("a", "b"):
        rig.add(name, 10, length=40)
    rig.step(4)
    rig.add("c", 24, length=40)
    rig.add("d", 6, length=40)
    return steps(rig, 4)


def test_the_schedules_of_figure_4() -> None:
    """Generation stalls under vLLM of 2023, none under Sarathi-Serve (its Figure 4)."""
    budget = {"tokens": 16, "tile_tokens": 1, "min_prefill_tokens": 1}
    sarathi = Rig("sarathi-static", options={"budget": budget})
    assert arrivals_of_figure_4(sarathi) == [
        {"a": 1, "b": 1, "c": 14},
        {"a": 1, "b": 1, "c": 10, "d": 4},
        {"a": 1, "b": 1, "c": 1, "d": 2},
        {"a": 1, "b": 1, "c": 1, "d": 1},
    ]
    assert arrivals_of_figure_4(Rig("vllm-2023"))[0] == {"c": 24, "d": 6}, "A and B stall"
    hybrid = arrivals_of_figure_4(Rig("sarathi-hybrid-only"))
    assert hybrid[0] == {"a": 1, "b": 1, "c": 24, "d": 6}, "nobody stalls, but the step is long"
    apart = arrivals_of_figure_4(Rig("sarathi-chunked-only", options={"budget": {"tokens": 16}}))
    assert [set(step) for step in apart] == [{"c"}, {"a", "b"}, {"c", "d"}, {"a", "b", "c", "d"}]


def test_decodes_go_first_even_when_memory_is_about_to_run_out() -> None:
    """The prefilling request came first, so it ranks first; with too few blocks others would serve it first."""
    options = {"budget": {"tokens": 16, "tile_tokens": 1, "min_prefill_tokens": 1}}
    rig = Rig("sarathi-static", options=options, num_blocks=9, max_model_len=120, enable_prefix_caching=False)
    rig.add("long", 90, length=2)
    rig.step(1)
    for name in ("x", "y"):
        rig.add(name, 5, length=12)
    table = steps(rig, 12)
    decoded: set[str] = set()
    for step in table:
        waiting_decodes = [name for name in decoded if name not in step and name in rig.loop.outcomes]
        unfinished = [n for n in waiting_decodes if rig.loop.outcomes[n].finish_reason is None]
        assert not (unfinished and step.get("long", 0) > 1), f"{unfinished} waited behind a chunk: {step}"
        decoded |= {name for name, tokens in step.items() if tokens <= 5 and name != "long"}
    assert decoded == {"x", "y"}


def longest_gap_ms(system: str, tbt_ms: float) -> tuple[float, float]:
    """Longest and P99 gap between tokens under a load of chats and long prompts, on simulated hardware."""
    upstream = system.startswith("upstream")
    spec = SimulationSpec(
        engine=EngineSpec(
            system=system,
            options={} if upstream else {"slo": {"tbt_ms": tbt_ms}},
            max_model_len=8192,
            prefix_caching=False,
            profiled=not upstream,
        ),
        hardware=HardwareSpec(model="mistral-7b", device="a100-80"),
        workload=WorkloadSpec(
            source="openchat-sharegpt4", rate_per_s=3.0, duration_s=30.0, max_model_len=8192, over_context="cut"
        ),
    )
    metrics = summarise(simulate(spec))
    return metrics["tbt_max_ms"], metrics["tbt_p99_ms"]


@pytest.mark.parametrize("tbt_ms", [60.0, 100.0, 150.0])
def test_no_gap_between_tokens_exceeds_the_objective(tbt_ms: float) -> None:
    assert longest_gap_ms("sarathi", tbt_ms)[0] <= tbt_ms
    assert longest_gap_ms("upstream-fcfs", tbt_ms)[1] > tbt_ms, "or the load says nothing"
