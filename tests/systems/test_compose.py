"""The systems table: names, compositions, parameters, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_ext import systems
from vllm_ext.config import AXES, FLAGS, ConfigError, ExtConfig
from vllm_ext.contract import Ordering, Rank, RequestView
from vllm_ext.experiments import ablations
from vllm_ext.systems import System, build, compose, known, register, resolve
from vllm_ext.systems.alise import BoundedBypass, CostOverWait, Preemptive
from vllm_ext.systems.baselines import ReserveMaximum, SeparateBatches, Watermark, WholePrompts
from vllm_ext.systems.past_future import PeakMemory
from vllm_ext.systems.sarathi import TbtBudget
from vllm_ext.systems.upstream import Arrival, InOrder

ROWS = (*compose._papers().values(), *ablations.ROWS)
"""Without what other tests register."""


@dataclass(frozen=True, kw_only=True)
class Longest(Ordering):
    weight: float = 1.0

    def rank(self, request: RequestView, now: float) -> Rank:
        return Rank((-request.predicted_remaining_s * self.weight,))


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "_SYSTEMS", dict(compose._SYSTEMS))


def test_the_table_has_the_systems_of_today() -> None:
    assert {"fcfs", "alise", "orca", "vllm-2023"} <= set(known())
    assert [s.name for s in systems.table()] == list(known())
    assert known()[0] == "fcfs"


def test_ablations_and_upper_bounds_are_known_by_name_and_not_listed() -> None:
    unserved = {row.name for row in systems.table(unserved=True)} - set(known())
    assert unserved == {
        "accelgen-no-batch", "accelgen-no-chunk", "accelgen-no-era", "accelgen-no-order", "aggressive", "conservative",
        "oracle-accelgen", "oracle-alise", "oracle-past-future", "oracle-sarathi", "pensieve-published-turns",
        "sarathi-chunked-only", "sarathi-hybrid-only",
    }  # fmt: skip
    assert not any(resolve(name).served for name in unserved)


def test_ablations_are_found_by_a_process_that_was_told_their_name_only() -> None:
    code = "from vllm_ext import systems; print(systems.resolve('accelgen-no-era').name, len(systems.known()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["accelgen-no-era", "20"], "20 are listed"


def test_the_oracles_are_marked() -> None:
    assert not resolve("alise").oracle
    assert resolve("oracle-alise").oracle


def test_fcfs_has_nothing_to_steer() -> None:
    policies = build(ExtConfig())
    assert policies.is_upstream
    assert policies.describe().startswith("fcfs: ordering=Arrival()")


def test_parameters_reach_the_policies() -> None:
    policies = build(ExtConfig(system="alise", ordering={"gamma": 1, "theta": 0.0}, admission={"passed_s": 0.0}))
    assert policies.ordering == CostOverWait(gamma=1, theta=0.0)
    assert policies.admission == BoundedBypass(passed_s=0.0)
    assert not policies.is_upstream
    assert "theta=0.0" in policies.describe()


@pytest.mark.parametrize("system", ["alise", "auto"])
@pytest.mark.parametrize(("what", "first"), [("normalised", "cheap"), ("tail", "old")])
def test_what_is_optimised_is_how_much_waiting_counts(system: str, what: str, first: str) -> None:
    """A cost of 9 that has waited 15 s, and one of 1 that has not waited: 16 ** 0.25 is 2, 16 ** 1 is 16."""
    ageing = build(
        ExtConfig(system=system, ordering={"gamma": FLAGS["ordering.gamma"][0].choices[what]})
    ).ordering.ageing
    assert ageing is not None
    scores = {"old": ageing.score(9.0, 15.0), "cheap": ageing.score(1.0, 0.0)}
    assert min(scores, key=scores.__getitem__) == first


def test_the_baselines_have_their_papers_and_differ_from_upstream() -> None:
    rows = {"orca": (ReserveMaximum(), WholePrompts()), "vllm-2023": (Watermark(watermark=0.99), WholePrompts())}
    for name, gates in rows.items():
        policies = build(ExtConfig(system=name))
        assert (policies.admission, policies.gates) == (InOrder(), gates)
        assert policies.system.paper
        assert not policies.is_upstream
    assert build(ExtConfig(system="vllm-2023")).budget == SeparateBatches()
    given = build(ExtConfig(system="orca", admission={"reserve_tokens": 2048}))
    assert given.gates[0] == ReserveMaximum(reserve_tokens=2048)


@pytest.mark.parametrize("name", ["accelgen+alise", "alise+auto"])
def test_two_systems_that_select_differently_are_refused_by_name(name: str) -> None:
    first, _, second = name.partition("+")
    with pytest.raises(ConfigError, match=f"{first} and {second} both set") as caught:
        resolve(name)
    assert (caught.value.field, caught.value.value) == ("system", name)


@pytest.mark.parametrize(
    ("name", "gates"),
    [
        ("alise+past-future", [PeakMemory]),
        ("past-future+alise", [PeakMemory]),
        ("orca+past-future", [ReserveMaximum, WholePrompts, PeakMemory]),
        ("orca+conservative", [ReserveMaximum, WholePrompts]),
        ("past-future+past-future", [PeakMemory]),
    ],
)
def test_gates_of_several_systems_stand_behind_each_other(name: str, gates: list[type]) -> None:
    policies = build(ExtConfig(system=name, admission={"max_passed": 2} if "alise" in name else {}))
    assert [type(gate) for gate in policies.gates] == gates
    assert policies.admission == (BoundedBypass(max_passed=2) if "alise" in name else InOrder())


def test_gates_that_differ_in_a_parameter_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="past-future and oracle-past-future set PeakMemory differently"):
        resolve("past-future+oracle-past-future")


def test_a_policy_that_is_none_is_refused_when_it_is_built() -> None:
    class Duck:
        def rank(self, request: RequestView, now: float) -> Rank:
            return Rank(())

    register(System(name="duck", ordering=Duck))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"system.ordering='Duck': a subclass of .*Ordering"):
        build(ExtConfig(system="duck"))


def test_a_subclass_of_a_default_policy_is_something_to_steer() -> None:
    class Reversed(Arrival):
        def rank(self, request: RequestView, now: float) -> Rank:
            return Rank((-request.arrival_time,))

    register(System(name="lifo", ordering=Reversed))
    assert not build(ExtConfig(system="lifo")).is_upstream


def test_a_composition_takes_each_axis_from_the_system_that_sets_it() -> None:
    register(System(name="longest", ordering=Longest, paper="P"))
    register(System(name="best", admission=Preemptive, paper="Q"))
    system = resolve("longest+best")
    assert (system.name, system.ordering, system.admission, system.budget) == (
        "longest+best",
        Longest,
        Preemptive,
        resolve("fcfs").budget,
    )
    assert system.parts == ("longest", "best")
    assert system.paper == "P; Q"
    assert resolve("best+longest").ordering is Longest


def test_composing_with_fcfs_or_itself_changes_nothing() -> None:
    for name in ("fcfs+alise", "alise+fcfs", "alise+alise"):
        system = resolve(name)
        assert (system.ordering, system.admission) == (CostOverWait, BoundedBypass)


def test_a_composition_with_an_oracle_reads_the_truth() -> None:
    assert resolve("alise+oracle-alise").oracle
    with pytest.raises(ConfigError):
        build(ExtConfig(system="fcfs+oracle-alise"))


def test_a_clash_names_the_axis_and_both_systems() -> None:
    register(System(name="longest", ordering=Longest))
    with pytest.raises(ConfigError, match="alise and longest both set ordering") as caught:
        resolve("alise+longest")
    assert caught.value.field == "system"


@pytest.mark.parametrize("name", ["nonsense", "alise+nonsense", "", "+", "alise+", "ALISE", " alise"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="fcfs, fcfs-tuned, accelgen, accelgen-published, alise"):
        resolve(name)


@pytest.mark.parametrize("name", ["", "a+b", "a.b", "a b"])
def test_reserved_characters_are_refused_in_names(name: str) -> None:
    with pytest.raises(ConfigError):
        register(System(name=name))


def test_registering_the_same_row_again_is_fine_and_another_one_is_not() -> None:
    row = System(name="mine", ordering=Longest)
    assert register(row) is row
    register(System(name="mine", ordering=Longest))
    with pytest.raises(ConfigError, match="mine"):
        register(System(name="mine"))
    assert resolve("mine").ordering is Longest


@pytest.mark.parametrize(
    ("axis", "parameters", "field"),
    [
        ("ordering", {"nonsense": 1}, "ordering.nonsense"),
        ("ordering", {"num_levels": 1.5}, "ordering.num_levels"),
        ("ordering", {"num_levels": True}, "ordering.num_levels"),
        ("ordering", {"num_levels": "3"}, "ordering.num_levels"),
        ("ordering", {"age_limit_s": None}, "ordering.age_limit_s"),
        ("ordering", {"age_limit_s": True}, "ordering.age_limit_s"),
        ("ordering", {"age_limit_s": 0}, "ordering.age_limit_s"),
        ("ordering", {"age_limit_s": 10**400}, "ordering.age_limit_s"),
        ("admission", {"preempt": 1}, "admission.preempt"),
        ("admission", {"preempt": "no"}, "admission.preempt"),
        ("budget", {"tokens": 3}, "budget.tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_parameter_is_named(axis: str, parameters: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(ExtConfig(system="alise-published", **{axis: parameters}))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_parameter_of_another_system_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match="no parameter of fcfs, whose ordering has none"):
        build(ExtConfig(system="fcfs", ordering={"num_levels": 2}))


def test_an_oracle_is_refused_without_permission_and_built_with_it() -> None:
    with pytest.raises(ConfigError, match="offline benchmarks"):
        build(ExtConfig(system="oracle-alise"))
    assert build(ExtConfig(system="oracle-alise", allow_oracle=True)).system.oracle


@pytest.mark.parametrize(
    "body",
    ["import not_a_module_of_anybody", "def broken(:", "raise RuntimeError('no license')", "1 / 0"],
    ids=["missing import", "syntax error", "raises", "divides by zero"],
)
def test_a_module_that_can_t_be_imported_is_named(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_systems.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_systems", raising=False)
    with pytest.raises(ConfigError, match="broken_systems") as caught:
        build(ExtConfig(modules=("broken_systems",)))
    assert caught.value.field == "modules"


def test_modules_are_imported_before_the_name_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from vllm_ext.systems import System, register\nregister(System(name='from-module'))\n"
    (tmp_path / "more_systems.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "more_systems", raising=False)
    assert build(ExtConfig(system="from-module", modules=("more_systems",))).admission == InOrder()


def test_a_missing_module_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_module_anywhere"):
        build(ExtConfig(modules=("no_such_module_anywhere",)))


def test_rows_differ_in_parameters_too() -> None:
    static = build(ExtConfig(system="sarathi-static")).budget
    assert static == TbtBudget(dynamic=False)
    given = build(ExtConfig(system="sarathi-static", budget={"tokens": 512, "tile_tokens": 128})).budget
    assert given == TbtBudget(dynamic=False, tokens=512, tile_tokens=128), "what is given goes before the row's"


def test_a_composition_carries_the_parameters_of_its_parts() -> None:
    system = resolve("sarathi-static+past-future")
    policies = build(ExtConfig(system="sarathi-static+past-future"))
    assert (system.parameters, policies.budget) == ({"budget": {"dynamic": False}}, TbtBudget(dynamic=False))
    assert policies.gates == (PeakMemory(),)
    with pytest.raises(ConfigError, match="sarathi and sarathi-static both set budget"):
        resolve("sarathi+sarathi-static")


@pytest.mark.parametrize("name", ["sarathi+past-future", "alise+sarathi", "sarathi+conservative", "fastserve+fastgen"])
def test_systems_of_different_axes_compose_in_any_order(name: str) -> None:
    one, two = resolve(name), resolve("+".join(reversed(name.split("+"))))
    assert [getattr(one, a) for a in AXES] == [getattr(two, a) for a in AXES]
    assert (one.gates, one.parameters) == (two.gates, two.parameters)
    assert not build(ExtConfig(system=name)).is_upstream


def test_every_row_can_be_built_and_says_what_it_is() -> None:
    for system in ROWS:
        policies = build(ExtConfig(system=system.name, allow_oracle=True))
        assert policies.describe().startswith(f"{system.name}: ordering=")
        assert system.summary
        assert system.paper or system.name in ("fcfs", "fcfs-tuned", "auto")
        assert system.oracle == system.name.startswith("oracle-")


def test_only_systems_that_look_at_lengths_start_a_predictor() -> None:
    use = {
        s.name
        for s in ROWS
        if "-published" not in s.name and build(ExtConfig(system=s.name, allow_oracle=True)).use_predictions
    }
    serving = {name for name in use if not name.startswith("oracle-")}
    assert serving == {"alise", "alise-ttft", "accelgen", "accelgen-no-chunk", "accelgen-no-order",
                       "accelgen-no-batch", "accelgen-no-era", "auto"}  # fmt: skip
