"""How often does `vllm-ext compare` see a difference that is none, and does it see one that is there?

Question: may its verdicts be believed?

Method: four servers by the engine's clock (`vllm_ext.compare.clocked`): vLLM's engine serves a tiny model here, each
step takes what the cost model says of OPT-13B on an A100, and at random 5 % more or less, as no device takes the same
twice. Three of them are the same: the baseline, its twin and a third, called *equal*. Of the fourth, *slower*, each
step takes a fixed time longer. For each seed of arrivals `compare` runs as it does for a user, two repeats at one load,
and says of *equal* and *slower*, measure by measure: better, worse, or no difference seen. Of *equal* every verdict but
the last is false; of *slower* the mean must be worse. Intervals of shares are Wilson's, 95 %.

    python benchmarks/engine/compare_noise.py --quick
    python benchmarks/engine/compare_noise.py --out benchmarks/results/compare_noise.json
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from vllm_ext.compare.duel import BURSTS, HARDWARE, ONE_THREAD, engine_flags
from vllm_ext.compare.observed import MEAN, P99
from vllm_ext.compare.rounds import LEAST_REPEATS, Asked, Cells, Found, compare
from vllm_ext.compare.servers import Clocked, Row, Server
from vllm_ext.report.claim import Claim
from vllm_ext.report.common_flags import at_least
from vllm_ext.report.count_progress import CountProgress
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.spec import CostSpec
from vllm_ext.tiny_model import build

COST, NOISE = CostSpec(), 0.05
DELAY_S = 0.004
"""By which each step of *slower* takes longer; a step of the full server takes some 40 ms."""
LOAD_PER_S = 20.0
"""Requests, 0.8 of what the server carries (`engine_clock.json`)."""
BASELINE, TWIN, EQUAL, SLOWER = Row("vLLM"), Row("vLLM, again"), Row("equal"), Row("slower")
MOST_FALSE, LEAST_SEEN = 0.1, 0.9


class Kept:
    """A backend whose engines start once, and serve seed after seed."""

    def __init__(self, model: str, folder: Path) -> None:
        slow = COST.model_copy(update={"host_base_s": COST.host_base_s + DELAY_S})
        self._of = {
            row.name: Clocked(model, engine_flags(), folder, HARDWARE, cost, NOISE, env=ONE_THREAD)
            for row, cost in ((BASELINE, COST), (TWIN, COST), (EQUAL, COST), (SLOWER, slow))
        }
        self._stack = contextlib.ExitStack()
        self._up: dict[str, Server] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def started(self, row: Row) -> Iterator[Server]:
        """See `Backend`."""
        if row.name not in self._up:
            self._up[row.name] = self._stack.enter_context(self._of[row.name].started(row))
        yield self._up[row.name]


def kinds(backend: Kept, seed: int, requests: int) -> dict[tuple[str, str], str]:
    """Compare once; return what is said by server and measure."""
    workload = BURSTS.model_copy(update={"seed": 1000 * seed, "arrivals": "poisson", "cv": 1.0})
    asked = Asked(
        baseline=BASELINE, twin=TWIN, others=[EQUAL, SLOWER], workload=workload, loads=(1.0,), requests=requests,
        precision=1e9, budget_s=1e9, rate_per_s=LOAD_PER_S,
    )  # fmt: skip
    found = Found()
    with tempfile.TemporaryDirectory(prefix="compare-noise-") as folder:
        compare(backend, Cells(Path(folder), ""), asked, lambda _: None, found)
    return {(one.server, one.measure): one.kind for one in found.verdicts(asked)}


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", type=at_least(1), default=20, help="of arrivals (default: %(default)s)")
    parser.add_argument("--requests", type=at_least(20), default=150, help="of a run (default: %(default)s)")
    args = parser.parse_args(argv)
    seeds, requests = (1, 20) if args.quick else (args.seeds, args.requests)
    told: Counter[tuple[str, str, str]] = Counter()
    with (
        CountProgress(seeds, label="compare_noise", unit="seed") as progress,
        tempfile.TemporaryDirectory(prefix="compare-noise-") as folder,
        Kept(str(build()), Path(folder)) as backend,
    ):
        for seed in range(seeds):
            for (server, measure), kind in kinds(backend, seed, requests).items():
                told[server, measure, kind] += 1
            progress.update(seed + 1, "")
    measures = list(dict.fromkeys(measure for _, measure, _ in told))
    shares = {
        (server, measure, kind): told[server, measure, kind] / seeds
        for server in (EQUAL.name, SLOWER.name) for measure in measures for kind in ("better", "worse", "same")
    }  # fmt: skip
    rows = [[server, measure, *(told[server, measure, kind] for kind in ("better", "worse", "same"))]
            for server in (EQUAL.name, SLOWER.name) for measure in measures]  # fmt: skip
    columns = ["server", "measure", "better", "worse", "no difference seen"]
    false = {measure: 1 - shares[EQUAL.name, measure, "same"] for measure in measures}
    config = {
        "hardware": HARDWARE.model_dump(), "step_noise": NOISE, "delay_s": DELAY_S, "requests": requests,
        "seeds": seeds, "repeats": LEAST_REPEATS, "requests_per_s": LOAD_PER_S,
    }  # fmt: skip
    result = Result(
        name="compare_noise",
        command=command(argv, __file__),
        config={**config, "columns": columns, "rows": rows},
        seed=args.seed,
        workload=Workload(name="sharegpt-like, a quarter", rows=requests,
                          sha256=hashlib.sha256(repr(config).encode()).hexdigest()),
        metrics={f"{server}.{measure}.{kind}_share": share for (server, measure, kind), share in shares.items()},
        claims=[
            Claim(name=f"equal servers told apart by {measure}", value=false[measure], op="<=", goal=MOST_FALSE,
                  facts=f"95 % interval {_interval(false[measure], seeds)} of {seeds} seeds")
            for measure in (MEAN, P99)
        ] + [
            Claim(name=f"a server whose steps take {1000 * DELAY_S:g} ms longer is worse in the mean",
                  value=shares[SLOWER.name, MEAN, "worse"], op=">=", goal=LEAST_SEEN,
                  facts=f"95 % interval {_interval(shares[SLOWER.name, MEAN, 'worse'], seeds)} of {seeds} seeds")
        ],
    )  # fmt: skip
    emit(result, [Table(columns, rows, title=f"verdicts of {seeds} seeds")], args.out)


def _interval(share: float, count: int) -> str:
    from scipy.stats import binomtest

    found = binomtest(round(share * count), count).proportion_ci(method="wilson")
    return f"{found.low:.2f}..{found.high:.2f}"


if __name__ == "__main__":
    main(sys.argv[1:])
