"""Dotted paths into a description, and the points of a grid."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ext.config import ConfigError
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec, parse, with_values
from vllm_ext.simulation.sweep.capacity import CapacitySpec
from vllm_ext.simulation.sweep.grid import RATE, SEED, SYSTEM, SweepSpec, expand


def test_points_come_in_the_order_of_the_axes_with_repeats_innermost() -> None:
    sweep = SweepSpec(axes={SYSTEM: ("fcfs", "alise"), RATE: (1.0, 2.0)}, repeats=2)
    points = [(p.spec.engine.system, p.spec.workload.rate_per_s, p.spec.workload.seed) for p in expand(sweep)]
    assert points == [
        ("fcfs", 1.0, 0),
        ("fcfs", 1.0, 1),
        ("fcfs", 2.0, 0),
        ("fcfs", 2.0, 1),
        ("alise", 1.0, 0),
        ("alise", 1.0, 1),
        ("alise", 2.0, 0),
        ("alise", 2.0, 1),
    ]


@pytest.mark.parametrize("repeats", [1, 3])
def test_without_axes_the_base_is_repeated_from_its_seed_on(repeats: int) -> None:
    base = with_values(SimulationSpec(max_time_s=5.0), {SEED: 40})
    points = expand(SweepSpec(base=base, repeats=repeats))
    assert [(p.values, p.spec.workload.seed) for p in points] == [({}, 40 + k) for k in range(repeats)]
    assert points[0].spec == base


def test_sweep_survives_json_with_the_same_points() -> None:
    sweep = SweepSpec(axes={RATE: (1, 2.5), "engine.options": ({}, {"prediction": {"window": 5}})}, repeats=2)
    again = SweepSpec.model_validate_json(sweep.model_dump_json())
    assert [p.spec for p in expand(again)] == [p.spec for p in expand(sweep)]


@pytest.mark.parametrize(
    ("axes", "rest", "says"),
    [
        ({"engine.sytem": ("fcfs",)}, {}, ["engine.sytem", "fields here are system, options, scheduling_policy"]),
        ({"motor.system": ("fcfs",)}, {}, ["motor=", "the fields here are engine, hardware, cost, workload"]),
        ({"engine.system.x": ("fcfs",)}, {}, ["engine.system={'x': 'fcfs'}", "must be a string"]),
        ({SYSTEM: ("fcfs", "allise")}, {}, ["engine.system='allise'", "must be one of upstream-fcfs", "alise"]),
        ({SYSTEM: ("alise+accelgen",)}, {}, ["engine.system='alise+accelgen'", "both set ordering"]),
        ({RATE: (1.0, -1.0)}, {}, [RATE, "-1.0", "greater than 0"]),
        ({"workload.arrivals": ("poison",)}, {}, ["'poison'", "'poisson'"]),
        ({"engine.options.ordering.age": (1,), SYSTEM: ("alise",)}, {}, ["engine.options.ordering.age", "grace_s"]),
        ({"engine.options.windows": (1,)}, {}, ["engine.options.windows", "prediction"]),
        ({RATE: ()}, {}, [RATE, "at least one value"]),
        ({RATE: (1.0, 2.0, 1.0)}, {}, [RATE, "1.0", "twice"]),
        ({"engine.options": ({},), "engine.options.modules": ([],)}, {}, ["lies within the axis engine.options"]),
        ({SEED: (1, 2)}, {"repeats": 2}, ["repeats=2", SEED]),
        ({RATE: (1.0,)}, {"capacity": CapacitySpec(), "constraints": ("x<=1",)}, [RATE, "capacity search"]),
        ({}, {"capacity": CapacitySpec()}, ["constraints", "at least one"]),
    ],
    ids=lambda value: None if isinstance(value, (dict, list)) else str(value),
)
def test_wrong_sweep_is_refused_with_what_is_allowed(
    axes: dict[str, Any], rest: dict[str, Any], says: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        expand(SweepSpec(axes=axes, **rest))
    assert [text for text in says if text not in str(refused.value)] == []


def test_options_are_left_out_for_vllm_alone() -> None:
    """One description serves all systems of a comparison; the simulator refuses options for vLLM's own schedulers."""
    base = SimulationSpec(engine=EngineSpec(options={"prediction": {"window": 5}}))
    points = expand(SweepSpec(base=base, axes={SYSTEM: ("upstream-fcfs", "alise")}))
    assert [p.spec.engine.options for p in points] == [{}, {"prediction": {"window": 5}}]


def test_oracle_needs_no_permission_offline() -> None:
    (point,) = expand(SweepSpec(axes={SYSTEM: ("oracle-alise",)}))
    assert point.spec.engine.options == {}


def test_values_are_checked_together() -> None:
    """Neither of the two would be allowed alone."""
    spec = with_values(SimulationSpec(), {"workload.arrivals": "gamma", "workload.cv": 3.0})
    assert (spec.workload.arrivals, spec.workload.cv) == ("gamma", 3.0)
    with pytest.raises(ConfigError, match=r"cv=3.0"):
        with_values(SimulationSpec(), {"workload.cv": 3.0})


def test_default_that_depends_on_another_field_follows_it() -> None:
    """A closed loop has no rate: the default one is left out, an explicit one refused."""
    assert with_values(SimulationSpec(), {"workload.arrivals": "closed-loop"}).workload.rate_per_s is None
    with pytest.raises(ConfigError, match="rate_per_s"):
        with_values(SimulationSpec(), {"workload.arrivals": "closed-loop", RATE: 2.0})


def test_path_leads_into_objects_that_are_not_there_but_not_into_lists() -> None:
    spec = with_values(
        SimulationSpec(), {"engine.kv_offload.cpu_bytes": 5, "workload.mix": [{"source": "alpaca-like"}]}
    )
    assert spec.engine.kv_offload is not None
    with pytest.raises(ConfigError, match=r"workload.mix.0.weight=3.0: workload.mix is .* has no fields of its own"):
        with_values(spec, {"workload.mix.0.weight": 3.0})


def test_unknown_field_of_a_file_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"workload\.rate=2.*source, format"):
        parse(SimulationSpec, {"workload": {"rate": 2}})
    with pytest.raises(ConfigError, match=r"motor=.*engine, hardware"):
        parse(SimulationSpec, {"motor": {}})
