"""The results that README.md shows, computed from the files in benchmarks/results.

A headline compares two rows of one run. An A/A pair, two rows that serve by the same rules, shows the noise of the
run: a headline must be larger than the distance of that pair.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ext.report.provenance import RESULTS, measured_at

_WHERE_TO = ("--out", "--keep")
"""Options that say where a benchmark writes, not what it measures."""
AGAIN = "upstream tuned, other seeds"
"""The A/A row of benchmarks/simulated/ordering.py."""
_LOCAL = ("--dataset", "--conversations")
"""Options that name a file of the machine that measured."""


class NoHeadline(ValueError):
    """A result can't be shown; the message names the file, what is wrong and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One line of the table, and what the reader must know beside it."""

    result: Result
    measured: str
    ours: str
    baseline: str
    note: str


class Result:
    """A file of benchmarks/results."""

    def __init__(self, root: Path, name: str) -> None:
        """Read the file.

        Raises:
            NoHeadline: there is no such file, or it is not a result.
        """
        self.name = name
        try:
            self.data: dict[str, Any] = json.loads((root / RESULTS / name).read_text())
        except (OSError, ValueError) as error:
            raise NoHeadline(f"{RESULTS / name} can't be read: {error}") from error

    def value(self, row: str, metric: str) -> float:
        """Return a metric of a baseline, or of one of our systems.

        Raises:
            NoHeadline: the file does not have it.
        """
        baseline = self.data.get("baselines", {}).get(row, {})
        found = baseline.get(metric, self.data.get("metrics", {}).get(f"{row}.{metric}"))
        return self._number(found, f"metric {metric!r} of {row!r}")

    def metrics(self, prefix: str, suffix: str) -> list[float]:
        """Return all metrics whose names begin and end so; the message of an absent one is that of `value`."""
        named = self.data.get("metrics", {})
        found = [value for name, value in named.items() if name.startswith(prefix) and name.endswith(suffix)]
        return [self._number(value, f"metric {prefix}*{suffix}") for value in found or [None]]

    def setting(self, name: str) -> Any:
        """Return an entry of the configuration.

        Raises:
            NoHeadline: the file does not have it.
        """
        config = self.data.get("config", {})
        if name not in config:
            raise NoHeadline(f"{RESULTS / self.name} has no config {name!r}; run: {self.command}")
        return config[name]

    @property
    def goals(self) -> list[dict[str, Any]]:
        """The goals that were set, and whether they were met."""
        return list(self.data.get("goals", []))

    @property
    def command(self) -> str:
        """The command, without the options that say where it wrote, and without folders of the machine it ran on."""
        return shlex.join(_portable(shlex.split(str(self.data.get("command", "")))))

    @property
    def machine(self) -> str:
        """Processor, cores, device and vLLM."""
        machine, versions = self.data.get("machine", {}), self.data.get("versions", {})
        cores = f"{machine.get('cpu_cores', '?')} cores of {str(machine.get('cpu', '?')).removesuffix(' Processor')}"
        return f"{machine.get('gpu', cores)}, vLLM {versions.get('vllm', '?')}"

    @property
    def measured_at(self) -> str:
        """Commit, and the day of it."""
        return measured_at(self.data)

    def _number(self, found: Any, what: str) -> float:
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise NoHeadline(
                f"{RESULTS / self.name} has no {what}: measure it again ({self.command or 'no command recorded'}), "
                "or choose another headline in scripts/headlines.py"
            )
        return float(found)


def _portable(words: list[str]) -> Iterator[str]:
    before = ""
    for word in words:
        if word not in _WHERE_TO and before not in _WHERE_TO:
            yield Path(word).name if before in _LOCAL else word
        before = word


def check_ranks(result: Result, effect: float, noise: float) -> None:
    """Refuse a headline that the noise of its run could have shown as well.

    Raises:
        NoHeadline: the effect is not larger than the distance of an A/A pair.
    """
    name = RESULTS / result.name
    if effect <= noise:
        raise NoHeadline(
            f"{name} ranks nothing: the effect is {effect:.4g}, and its A/A pair differs by {noise:.4g}; "
            "measure with more repeats, or choose another headline in scripts/headlines.py"
        )


def preemptions(root: Path) -> Headline:
    """`past-future` under little KV memory, against vLLM with its watermark, the best of vLLM's rows."""
    result = Result(root, "engine_compare_memory.json")
    count, steps = "load_2.preemptions", "load_2.output_steps"
    ours = result.value("past-future", count)
    stock, reserved = (result.value(row, count) for row in ("upstream-fcfs", "upstream-watermark"))
    noise = abs(result.value("fcfs", count) - stock)
    check_ranks(result, reserved - ours, noise)
    longer = result.value("past-future", steps) / result.value("upstream-watermark", steps) - 1
    share = result.setting("systems")["upstream-watermark"]["watermark"]
    return Headline(
        result=result,
        measured=f"preemptions of {result.value('past-future', 'load_2.requests'):.0f} requests, KV memory full",
        ours=f"**{ours:g}** (`past-future`)",
        baseline=f"{reserved:g} (vLLM, `--watermark {share:g}`)",
        note=f"`past-future` needed {_percent(longer)} more steps than that. vLLM without a watermark had "
        f"{stock:g} preemptions. A/A pair: our `fcfs` and vLLM's differ by {noise:g}. {_repeats(result)}.",
    )


def step_cost(root: Path) -> Headline:
    """The CPU time of a scheduler step, against vLLM's."""
    result = Result(root, "step_overhead.json")
    fewer, running = (end(result.setting("running")) for end in (min, max))
    waiting = max(result.setting("waiting"))
    systems = ("alise", "sarathi", "accelgen", "past-future", "auto")

    def worst(system: str, batch: int = running) -> float:
        return max(result.metrics(f"{system}_{batch}_running_", "_ratio"))

    costs = {system: worst(system) for system in systems}
    dearest = max(costs, key=costs.__getitem__)
    same = worst("fcfs")
    names = ", ".join(f"`{name}`{_measured_to(result, name, running, waiting)}" for name in systems)
    check_ranks(result, costs[dearest] - 1, same - 1)
    return Headline(
        result=result,
        measured=f"CPU time of a scheduler step, {running} running, up to {waiting:,} waiting",
        ours=f"at most **{costs[dearest]:.2f}** times vLLM's (`{dearest}`)",
        baseline="1 (vLLM)",
        note=f"This is what a system costs: of {names}, `{dearest}` costs most. "
        f"With {fewer} running they cost up to {max(worst(name, fewer) for name in systems):.2f}. "
        f"A/A pair: our `fcfs` takes at most {same:.2f}.",
    )


def _measured_to(result: Result, system: str, running: int, waiting: int) -> str:
    """Say that a system was measured with shorter queues only, if it was."""
    measured = [
        length
        for length in result.setting("waiting")
        if f"{system}_{running}_running_{length}_waiting_ratio" in result.data["metrics"]
    ]
    longest = max(measured, default=0)
    return "" if longest == waiting else f" (up to {longest:,} waiting)"


_SMALLER_BUDGET = (
    "A smaller budget alone gains more "
    "([one seed, 300 s, simulated](docs/results/ordering.md#a-smaller-token-budget)): `--max-num-batched-tokens 256` "
    "lowers vLLM's mean by 28 % and its P99 by 21 %, where `alise` at 2,048 tokens lowers the mean by 24 % and raises "
    "P99 by 3 %; both together lower them by 39 % and 20 %. Try the budget first. A comparison with tuned budgets has "
    "yet to be measured."
)
"""Why the gain over the default budget is no headline: single runs, until a result with several seeds replaces them."""


def order(root: Path) -> str:
    """Say why the mean end-to-end latency under `alise` at vLLM's saturation is no headline: the budget is not tuned.

    Raises:
        NoHeadline: the gain over the default budget is within noise.
    """
    result = Result(root, "ordering_predicted.json")

    def times(row: str, measure: str) -> float:
        return result.value(row, f"all.1.{measure}.ratio")

    ours = times("alise, predicted", "mean e2e")
    noise = max(times(AGAIN, "mean e2e"), 1 / times(AGAIN, "mean e2e"))
    check_ranks(result, ours - 1, noise - 1)
    tail = 1 / times("alise, predicted", "P99 e2e") - 1
    return (
        "Not a headline: at the load that vLLM just carries with its default budget of 2,048 tokens a step and "
        f"`--watermark {result.setting('watermark'):g}`, `alise` lowers the mean end-to-end latency of chats by "
        f"{100 * (1 - 1 / ours):.0f} % and raises P99 by {100 * tail:.0f} % (simulated). {_SMALLER_BUDGET}"
    )


def latency(root: Path) -> str:
    """Say why the mean latency near saturation is no headline.

    Raises:
        NoHeadline: the A/A pair is closer than the effect now.
    """
    result = Result(root, "engine_compare.json")
    ratio = "load_0.9.normalised_latency_mean_ratio"
    ours, same = result.value("alise", ratio), result.value("fcfs", ratio)
    if abs(math.log(ours)) > abs(math.log(same)):
        raise NoHeadline(f"{RESULTS / result.name} ranks alise now: make it a headline in scripts/headlines.py")
    return (
        f"Not a headline: at 0.9 of capacity `alise` had {ours:.2f} times vLLM's mean latency. The A/A pair of that "
        f"run, vLLM and our `fcfs`, differs by a factor of {max(same, 1 / same):.2f}."
    )


def objectives(root: Path) -> str:
    """Say why the share of requests that met all objectives is no headline, or that it has become one.

    Raises:
        NoHeadline: the A/A pair is closer than the effect now.
    """
    result = Result(root, "engine_compare_slo.json")
    met = "load_1.2.slo_attainment_fraction"
    ours, same, stock = (result.value(row, met) for row in ("accelgen", "fcfs", "upstream-fcfs"))
    best = max(result.value(row, met) for row in result.data["baselines"])
    if ours - best > abs(stock - same):
        raise NoHeadline(f"{RESULTS / result.name} ranks accelgen now: make it a headline in scripts/headlines.py")
    return (
        f"Not a headline: with `accelgen` {_percent(ours)} of the requests met all objectives, and with vLLM's best "
        f"setting {_percent(best)}. The A/A pair of that run differs by {100 * abs(stock - same):.0f} points."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _repeats(result: Result) -> str:
    repeats = int(result.setting("repeats"))
    return "One repeat" if repeats == 1 else f"Medians of {repeats} repeats"


HEADLINES = (preemptions, step_cost)
"""The lines of the README's table."""
NOT_HEADLINES = (order, latency, objectives)
"""Results that readers look for, of runs that can't rank them or have not the baseline that counts."""
