"""Print a page of all metrics: name, type, labels and the text that stands beside each in `/metrics`. `make docs`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from vllm_ext.metrics import engine
from vllm_ext.predictor import metrics as predictor
from vllm_ext.report.table import Table
from vllm_ext.slo import metrics as slo
from vllm_ext.slo import misspelt_hints
from vllm_ext.token_memory import metrics as token_memory

_HEAD = """# All metrics

<!-- Written by scripts/metrics_page.py. -->

What a server shows under `/metrics`, beside vLLM's own. [Metrics](metrics.md) says what to watch and what values mean;
`vllm-ext cellular serve` has [its own](cellular.md#what-to-watch).
"""


class Metric(NamedTuple):
    """As a server shows it; a counter's name ends in ``_total``."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def metrics() -> Iterator[Metric]:
    """Yield all metrics of a server, in the order of the page. Registers them in this process."""
    engine.declare()
    for module in (predictor, slo, token_memory):
        module._metrics()
    misspelt_hints._counter()
    for made in dict.fromkeys(REGISTRY._collector_to_names):
        if isinstance(made, Counter | Gauge | Histogram) and made._name.startswith("vllm_ext:"):
            yield _metric(made)


def _metric(made: Any) -> Metric:
    ending = "_total" if made._type == "counter" else ""
    return Metric(f"{made._name}{ending}", made._type, made._labelnames, made._documentation)


def main() -> None:
    """Print the page."""
    rows = [[f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), one.text]
            for one in metrics()]  # fmt: skip
    print(_HEAD)
    print(Table(("metric", "type", "labels", ""), rows).markdown(), end="")


if __name__ == "__main__":
    main()
