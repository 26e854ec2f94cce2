"""Every experiment makes findings of what its runs measured, whatever that is: no simulation runs here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from vllm_ext.experiments import catalogue, report
from vllm_ext.experiments.data import Files
from vllm_ext.experiments.runner import Limits, Runner, Sustained
from vllm_ext.report.claim import PaperClaim
from vllm_ext.simulation.spec import SimulationSpec

SIMULATE_THEMSELVES = ("batchmaker", "alise-fig9", "accelgen-fig3", "accelgen-fig6", "accelgen-fig7")
"""They do not leave their runs to the runner."""
ASKING = [one for name, one in catalogue.experiments().items() if not name.startswith(SIMULATE_THEMSELVES)]


class AnyMetric(dict[str, float]):
    """Has every metric, which grows with the rate; all went well."""

    def __init__(self, rate_per_s: float) -> None:
        self._value = 0.001 + rate_per_s**3

    def __missing__(self, name: str) -> float:
        return self._value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


class MadeUp(Runner):
    def __init__(self, *, quick: bool = True, judged_only: bool = False) -> None:
        self.quick, self.seed, self.files, self.judged_only = quick, 0, Files({}), judged_only
        self.asked = 0

    def metrics(self, specs: Mapping[Any, SimulationSpec]) -> dict[Any, Any]:
        self.asked += len(specs)
        return {key: AnyMetric(spec.workload.rate_per_s or 1.0) for key, spec in specs.items()}

    def sustained(
        self,
        specs: Mapping[Any, Callable[[float], SimulationSpec]],
        limits: Limits | Callable[[Any], Limits],
        *,
        start_per_s: Callable[[Any], float],
        tolerance: float,
    ) -> dict[Any, Sustained]:
        self.asked += len(specs)
        return {
            key: _sustained(make, limits(key) if callable(limits) else limits, start_per_s(key))
            for key, make in specs.items()
        }


def _sustained(make: Callable[[float], SimulationSpec], limits: Mapping[str, float], rate: float) -> Sustained:
    rates = (rate / 2, rate, 2 * rate)
    asked = [make(one).workload.rate_per_s or 0.0 for one in rates]
    assert 0.0 < asked[0] < asked[1] < asked[2]
    trials = tuple((one, AnyMetric(one)) for one in rates)
    return Sustained(rate_per_s=rate, limited_by=tuple(limits), crossing_per_s=rate, trials=trials)


def served(workloads: Any) -> tuple[str, int, str]:
    assert list(workloads)
    return "w", 1, "0" * 64


@pytest.mark.parametrize("experiment", ASKING, ids=lambda one: one.id)
def test_what_was_measured_becomes_a_result_with_tables(experiment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "served", served)
    findings = experiment.run(MadeUp())
    result = report.result(experiment, findings, command="vllm-ext repro", seed=0, quick=True)
    assert findings.claims
    assert [table for table in findings.tables if not table.rows] == []
    assert len(result.claims) == len(findings.claims)
    assert len({claim.name for claim in result.claims}) == len(result.claims)
    shown = "\n".join(map(str, report.tables(experiment, findings)))
    assert all(claim.name in shown for claim in findings.claims if isinstance(claim, PaperClaim))
    assert experiment.id in shown


LATER = ("accelgen-fig11", "alise-fig6", "alise-table3", "past-future-fig7", "past-future-table1", "pensieve-fig12",
         "pensieve-fig13", "pensieve-fig14", "pensieve-fig15", "pensieve-fig16")  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_later_seeds_run_less_and_judge_the_same(name: str) -> None:
    experiment, first, later = catalogue.experiments()[name], MadeUp(quick=False), MadeUp(quick=False, judged_only=True)
    findings, again = experiment.run(first), experiment.run(later)
    assert [replace(one, facts="") for one in again.claims] == [replace(one, facts="") for one in findings.claims]
    assert later.asked < first.asked
