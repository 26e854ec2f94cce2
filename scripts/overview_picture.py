#!/usr/bin/env python3
"""Draw the README's picture from benchmarks/results/tuning.json.

    python scripts/overview_picture.py

The file keeps a checksum of what it shows, by which a test sees that it is of today's result.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from headlines import over_vllm
from result_file import Result

from vllm_ext.files import replaced
from vllm_ext.report.plot_style import RC

ROOT = Path(__file__).resolve().parent.parent
PICTURE = Path("docs/overview.svg")
_LOADS = (0.8, 0.9, 1.0)
_SERVERS = {
    "vLLM tuned": ("vLLM, flags tuned for it", "#7F7F7F", "s"),
    "vLLM, flags of ours tuned": ("vLLM, flags tuned for vllm-ext", "#56B4E9", "^"),
    "ours tuned": ("vllm-ext, the same flags", "#D55E00", "o"),
}
"""Server of the result -> name in the legend, colour and marker."""
_MADE_OF = re.compile(r"made of ([0-9a-f]{64})")

Shares = Mapping[str, Sequence[Sequence[float]]]
"""Server -> for each load, mean latency over vLLM's in each workload."""


def shares(root: Path) -> Shares:
    """Return what is drawn.

    Raises:
        Unshown: the result can't be read.
    """
    result = Result(root, "tuning.json")
    return {server: [over_vllm(result, server, "e2e_mean_ms", load) for load in _LOADS] for server in _SERVERS}


def made_of(shown: Shares) -> str:
    """Return the checksum of what is drawn."""
    return hashlib.sha256(json.dumps([shown, _LOADS, _SERVERS]).encode()).hexdigest()


def says(path: Path) -> str | None:
    """Return the checksum that a picture has."""
    found = _MADE_OF.search(path.read_text(encoding="utf-8"))
    return found[1] if found else None


def draw(shown: Shares, path: Path) -> None:
    """Draw a small mark for each workload and a large one for their geometric mean, by load."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    workloads = len(next(iter(shown.values()))[0])
    with rc_context({**RC, "figure.facecolor": "white", "savefig.facecolor": "white"}):
        figure = Figure(figsize=(7.6, 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.axhline(1, color="black", linewidth=1.2)
        axes.text(len(_LOADS) - 0.52, 1.01, "vLLM, default flags", ha="right", va="bottom", fontsize=8.5)
        for number, (server, (label, colour, marker)) in enumerate(_SERVERS.items()):
            for load, values in enumerate(shown[server]):
                x = load + 0.26 * (number - (len(_SERVERS) - 1) / 2)
                mean = geometric_mean(values)
                spread = [x + 0.06 * (2 * at / max(1, len(values) - 1) - 1) for at in range(len(values))]
                axes.plot(spread, sorted(values), marker, color=colour, alpha=0.35, markersize=3.5, linewidth=0)
                axes.plot([x - 0.09, x + 0.09], [mean, mean], color=colour, linewidth=3.2,
                          label=label if load == 0 else None)  # fmt: skip
                axes.text(x, mean - 0.012, f"{mean - 1:+.0%}".replace("-", "−"), ha="center", va="top", fontsize=8,
                          color=colour, fontweight="bold")  # fmt: skip
        ticks = [f"{load:.0%} of saturation" if load < 1 else "saturation" for load in _LOADS]
        axes.set_xticks(range(len(_LOADS)), ticks)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("mean latency / vLLM's")
        axes.set_title(f"Mean end-to-end latency, {workloads} workloads (simulated; bars: geometric mean)", loc="left")
        axes.legend(loc="lower left")
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Description": f"made of {made_of(shown)}"})
    lines = drawn.getvalue().decode().splitlines()
    with replaced(path) as file:
        file.write("".join(f"{line.rstrip()}\n" for line in lines).encode())


if __name__ == "__main__":
    draw(shares(ROOT), ROOT / PICTURE)
