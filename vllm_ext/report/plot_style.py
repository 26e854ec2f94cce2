"""How figures look, and which colour and marker a system has."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#5E3C99")
"""Okabe and Ito's colours for the colour-blind; two darker ones in place of yellow and black, which is vLLM's."""
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: dict[str, Any] = {
    "s": "--", "^": "-.", "D": ":", "v": (0, (8, 2)), "P": (0, (4, 1, 1, 1, 1, 1)), "X": (0, (2, 1)),
    "*": (0, (6, 1, 2, 1)),
}  # fmt: skip


class Style(NamedTuple):
    """Look of one system."""

    colour: str
    marker: str

    @property
    def dash(self) -> Any:
        """Line style, one for each marker, for lines without markers."""
        return _DASHES.get(self.marker, "-")


_FIXED = {
    "upstream-fcfs": Style("#000000", "o"),
    "upstream-priority": Style("#7F7F7F", "s"),
    "offered load": Style("#BFBFBF", ""),
    "paper": Style("#A6A6A6", ""),
    "ours": Style(_COLOURS[0], "o"),
    "mean": Style(_COLOURS[0], "o"),
    "highest": Style(_COLOURS[5], "s"),
    "fcfs": Style(_COLOURS[5], "D"),
    "alise": Style(_COLOURS[1], "^"),
    "oracle-alise": Style(_COLOURS[3], "v"),
    "orca": Style(_COLOURS[4], "P"),
    "vllm-2023": Style(_COLOURS[2], "s"),
}
"""Systems that appear in most figures; the rest get theirs from a checksum of the name."""

RC: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "figure.dpi": 150,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "savefig.bbox": "tight",
    "svg.fonttype": "none",
    "svg.hashsalt": "vllm-ext",
}


def styles(labels: Sequence[str]) -> dict[str, Style]:
    """Give each label its colour and marker; the order of the labels does not matter.

    A name keeps its style from figure to figure, unless another name of the figure has the same colour or marker: then
    the one that comes later in the alphabet takes the next free one. Beyond eight systems colours repeat with other
    markers.
    """
    found = {label: _FIXED[label] for label in labels if label in _FIXED}
    taken = {style.colour for style in found.values()}
    for label in sorted(set(labels) - set(found)):
        seed = zlib.crc32(label.encode())
        colours = [_COLOURS[(seed + step) % len(_COLOURS)] for step in range(len(_COLOURS))]
        colour = next((colour for colour in colours if colour not in taken), colours[0])
        used = {(style.colour == colour, style.marker) for style in found.values()}
        markers = [_MARKERS[(seed // len(_COLOURS) + step) % len(_MARKERS)] for step in range(len(_MARKERS))]
        found[label] = Style(colour, min(markers, key=lambda one: ((True, one) in used, (False, one) in used)))
        taken.add(colour)
    return found
