"""The result of prediction.py: parts measured at different times, and the goals they are judged by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prediction_latency import HALF, LARGER, SAME, SAME_PRECISION, WHOLE
from prediction_pairs import Flat

from vllm_ext.observability.results import Goal, Result, Workload
from vllm_ext.prediction.evaluation.compare import PRIORS
from vllm_ext.prediction.evaluation.proxy import PROXIES
from vllm_ext.prediction.evaluation.rows import DataSet
from vllm_ext.prediction.evaluation.tuned import TUNED

PARTS = ("pairs", "curve", "latency", "worth")
COVERAGE = (0.85, 0.95)
LATENCY_RATIO = 2.0
_SHOWN = 6


class UpdateError(ValueError):
    """The file to update is no result of this benchmark."""


@dataclass(kw_only=True)
class Measured:
    """Metrics and baselines under the names of results, and per part what shaped it."""

    metrics: dict[str, float] = field(default_factory=dict)
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Read an earlier result.

        Raises:
            UpdateError: it is missing, or none of this benchmark.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UpdateError(f"--update {path.name}: cannot be read ({error})") from error
        if not isinstance(found, dict) or found.get("name") != "prediction":
            raise UpdateError(f"--update {path.name}: must be a result of benchmarks/prediction.py")
        return cls(
            metrics=found["metrics"],
            baselines=found["baselines"],
            facts=found["config"]["parts"],
            workload=found["workload"],
        )

    def replace(self, part: str, flat: Flat, command: str, facts: Mapping[str, Any]) -> None:
        """Put in a part that was measured now, instead of what it said before."""
        ours, others = flat
        self.metrics = {k: v for k, v in self.metrics.items() if k.split(".")[1] != part} | ours
        kept = {name: {k: v for k, v in values.items() if k.split(".")[0] != part}
                for name, values in self.baselines.items()}  # fmt: skip
        for name, values in others.items():
            kept[name] = kept.get(name, {}) | values
        self.baselines = {name: values for name, values in kept.items() if values}
        self.facts = {**self.facts, part: {"command": command, **facts}}

    def find(self, part: str, key: Callable[[str], bool]) -> dict[str, dict[str, float]]:
        """Return the keys of a part that are asked for, without the part's name, by system."""
        systems: dict[str, dict[str, float]] = {}
        for full, value in self.metrics.items():
            system, found, metric = full.split(".", 2)
            if found == part and key(metric):
                systems.setdefault(system, {})[metric] = value
        for system, values in self.baselines.items():
            for full, value in values.items():
                found, metric = full.split(".", 1)
                if found == part and key(metric):
                    systems.setdefault(system, {})[metric] = value
        return systems


def result(measured: Measured, command: str, facts: Mapping[str, Any], sets: Sequence[DataSet], seed: int) -> Result:
    """Build the result with its goals."""
    workload = Workload(
        name=", ".join(data.name for data in sets),
        rows=sum(data.rows for data in sets),
        sha256=hashlib.sha256("".join(data.sha256 for data in sets).encode()).hexdigest(),
    )
    if not sets and measured.workload is not None:
        workload = Workload(**measured.workload)
    return Result(
        name="prediction",
        command=command,
        config={**facts, "parts": measured.facts},
        seed=seed,
        workload=workload,
        metrics=measured.metrics,
        baselines=measured.baselines,
        goals=goals(measured, facts["chosen"]),
    )


# --- goals ------------------------------------------------------------------------------------------------------------


def goals(measured: Measured, chosen: str) -> list[Goal]:
    """Judge what was measured so far."""
    found = []
    if "pairs" in measured.facts:
        tuned = [name for name in TUNED if name in measured.find("pairs", lambda _: True)]
        for name in tuned:  # these and the proxies need a training set, and minutes to learn it
            found += _accuracy(measured, name)
        for name in (chosen, *tuned):
            found += [_ranking(measured, name), *_coverage(measured, name)]
    if "latency" in measured.facts:
        found += _latency(measured)
    return found


def _accuracy(measured: Measured, chosen: str) -> list[Goal]:
    """Ours over the better proxy, mean over the pairs of each kind."""
    made = []
    for metric in ("accuracy_deciles_fraction", "accuracy_200_fraction", "tau"):
        for kind in ("in", "cross"):
            values = measured.find("pairs", f"mean_{kind}.{metric}".__eq__)
            by_name = {name: next(iter(v.values())) for name, v in values.items()}
            proxies = {name: by_name[name] for name in PROXIES if name in by_name}
            if not proxies:
                continue
            best = max(proxies, key=lambda name: proxies[name])
            gap = by_name[chosen] - proxies[best]
            made.append(
                Goal(
                    metric=f"{metric} {kind}-distribution, {chosen} less the best proxy",
                    value=round(gap, 4),
                    op=">=",
                    goal=0.0,
                    note=f"{chosen} {by_name[chosen]:.3f}, {best} {proxies[best]:.3f}: the better of two by this",
                )
            )
    return made


def _ranking(measured: Measured, chosen: str) -> Goal:
    """On how many pairs every prior ranks worse."""
    taus = measured.find("pairs", lambda key: key.endswith(".tau") and not key.startswith("mean_"))
    lost = []
    for key, tau in taus[chosen].items():
        prior, best = max(((name, taus[name][key]) for name in PRIORS if name in taus), key=lambda found: found[1])
        if tau <= best:
            lost.append(f"{key.removesuffix('.tau')} {tau:.2f} to {prior}'s {best:.2f}")
    more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    return Goal(
        metric=f"pairs where {chosen} beats every prior in tau",
        value=float(len(taus[chosen]) - len(lost)),
        op=">=",
        goal=float(len(taus[chosen])),
        note=f"lost: {'; '.join(lost[:_SHOWN])}{more}. Across data sets what a prompt is like says little of how "
        "another service answers it; longer prompts have longer answers in some",
    )


def _coverage(measured: Measured, chosen: str) -> list[Goal]:
    """Least and largest coverage of P90 over the pairs of each kind."""
    found = measured.find("pairs", lambda key: "coverage" in key and not key.startswith("mean_"))[chosen]
    made = []
    for kind in ("in", "cross"):
        values = {
            pair: value
            for key, value in found.items()
            if ((pair := key.rpartition(".")[0]).split(">")[0] == pair.split(">")[1]) == (kind == "in")
        }
        if not values:
            continue
        least, most = min(values, key=lambda p: values[p]), max(values, key=lambda p: values[p])
        why = (
            "a test part of some hundred requests moves it by 2 points"
            if kind == "in"
            else "another service's lengths are others: learning from nothing is better than from these (see the "
            "learning curve)"
        )
        for pair, op, goal in ((least, ">=", COVERAGE[0]), (most, "<=", COVERAGE[1])):
            made.append(
                Goal(
                    metric=f"coverage_p90 of {chosen} {kind}-distribution, {'least' if op == '>=' else 'most'}",
                    value=values[pair],
                    op=op,
                    goal=goal,
                    note=f"{pair}; {why}",
                )
            )
    return made


def _latency(measured: Measured) -> list[Goal]:
    """Least ratio over all lengths and batches, of each proxy and each of ours."""
    times = measured.find("latency", lambda _: True)
    made = []
    for ours, how in ((HALF, "half of the layers"), (WHOLE, "all layers")):
        for name in (SAME, SAME_PRECISION, LARGER):
            ratios = {key: times[name][key] / times[ours][key] for key in times[ours]}
            least = min(ratios, key=lambda key: ratios[key])
            made.append(
                Goal(
                    metric=f"latency of a {name} over ours with {how}, least",
                    value=round(ratios[least], 3),
                    op=">=",
                    goal=LATENCY_RATIO,
                    note=f"{least}; a search and a decoder come on top of the forward pass",
                )
            )
    return made
