"""AccelGen, Figures 3 to 7 and 14: what steps and jobs are reduced to, and what the runs are."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ext import config, systems
from vllm_ext.experiments.experiment import Variant
from vllm_ext.experiments.papers import accelgen as base
from vllm_ext.experiments.papers import accelgen_batches as batches
from vllm_ext.experiments.papers import accelgen_methods as methods
from vllm_ext.simulation.cost.spec import build as build_cost
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.simulation.measure.run_data import Events, RequestRow, RequestTable, RunData, StepEvent
from vllm_ext.simulation.workloads.build import build

LOAD = base.Load(arrivals_s=60.0, drain_s=1.0)


def table(*rows: RequestRow) -> RequestTable:
    made = RequestTable()
    for row in rows:
        made.append(row)
    return made


def run(**fields: object) -> RunData:
    return RunData(**{"label": "x", "requests": table(), "gaps": None, "series": None, **fields})  # type: ignore[arg-type]


def test_steps_of_a_run_worked_by_hand() -> None:
    pivot = base.OPT_13B.pivot_tokens
    steps = [StepEvent(0.0, 0.1, 1, pivot // 2, 0, ()), StepEvent(0.1, 0.5, 1, 4 * pivot, 0, ())]
    found = batches._of_steps(
        run(events=Events(10, steps=steps), counters={"mean_kv_used_fraction": 0.3}), base.OPT_13B, reserves=False
    )
    assert found[batches.WITHIN] == 0.5
    assert found[batches.COMPUTE] == pytest.approx(0.75)
    assert found["step_p50_ms"] == pytest.approx(250.0)
    assert found[batches.KV] == 0.3


def test_reserved_memory_is_that_of_all_who_run_up_to_their_bound() -> None:
    kv = base.OPT_13B.kv_tokens
    ended = RequestRow(prompt_tokens=1000, first_scheduled_s=0.0, finish_s=5.0)
    runs = RequestRow(prompt_tokens=kv, first_scheduled_s=8.0)
    waits = RequestRow(prompt_tokens=9000)
    found = batches._reserved(run(requests=table(ended), unserved=table(runs, waits), duration_s=10.0), base.OPT_13B)
    assert found == pytest.approx((5.0 * 3048 / kv + 2.0 * base.OPT_13B.context_tokens / kv) / 10.0)


def test_objectives_of_section_3_are_four_multiples_of_the_reading_speed() -> None:
    described = base.spec(base.ACCELGEN, base.OPT_13B, LOAD, 0)
    told, hidden = (
        list(build(batches.scaled(described, announce=announce).workload).start()) for announce in (True, False)
    )
    assert {round(r.slo.tbt_s / base.READING_TBT_S, 6) for r in told if r.slo.tbt_s} == {0.25, 0.5, 1.0, 2.0}
    plain = list(build(described.workload).start())
    assert [r.slo.ttft_s for r in told] == [r.slo.ttft_s for r in plain]
    assert [r.slo for r in hidden] == [r.slo for r in told]
    assert all(r.extra_args for r in told)
    assert not any(r.extra_args for r in hidden)


def test_steps_on_a_slower_device_take_that_much_longer() -> None:
    (orca, *_), panel = base.baselines(base.OPT_13B), base.OPT_13B
    described = base.spec(base.slower(orca, panel, 8.0), panel, LOAD, 0)
    shape = StepShape(8, 1000, 7, 8, 7000, 993, 993 * 994 / 2)
    took_s = build_cost(described.hardware.resolve(), described.cost).device_s(shape)
    assert took_s == pytest.approx(8.0 * panel.cost.device_s(shape), rel=0.02)  # gaps between kernels stay


def policies(variant: Variant) -> systems.Policies:
    return systems.build(config.parse({"system": variant.system, **variant.options}))


def test_rows_of_a_method_differ_in_that_method_alone() -> None:
    fifo, era, ordered, without, whole = map(
        policies, (methods.FIFO, methods.ERA, methods.ORDERED, methods.NO_ERA, base.ACCELGEN)
    )
    assert fifo.budget == era.budget == ordered.budget == whole.budget
    assert (fifo.ordering, fifo.ordering == ordered.ordering) == (era.ordering, False)
    assert ordered.ordering == whole.ordering == without.ordering
    exclusive = [one.admission.exclusive for one in (fifo, era, ordered, without, whole)]
    assert exclusive == [False, True, False, False, True]
    assert [one.admission.match for one in (fifo, ordered, without)] == [False, False, True]
    assert [one.admission.preempt for one in (fifo, ordered, without)] == [False, False, True]


def test_two_long_prompts_stand_among_twenty_short_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path))
    file = methods._two_long(3)
    described = methods._at_once(methods.ERA, base.OPT_13B, file)
    prompts = [r.prompt_tokens for r in build(described.workload, max_model_len=base.OPT_13B.context_tokens).start()]
    assert len(prompts) == 22
    assert sorted(p for p in prompts if p > methods.SHORT[1]) == [*methods.LONG]
    assert min(prompts) >= methods.SHORT[0]
    assert methods._two_long(3) == file != methods._two_long(4)


@pytest.mark.parametrize("data", methods.IMPROVED)
def test_a_data_set_alone_keeps_rate_and_objectives(data: str) -> None:
    described = base.spec(base.ACCELGEN, base.OPT_13B, LOAD, 0)
    alone = list(build(methods._alone(described, data).workload).start())
    assert {r.tier for r in alone} == {data}
    assert len(alone) == len(list(build(described.workload).start()))
    assert all(r.slo.tbt_s for r in alone)
