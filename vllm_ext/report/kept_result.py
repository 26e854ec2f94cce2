"""The form in which a checkout keeps a result: what pages show and readers compare, a fifth of the lines.

Metrics and claims stay, to six digits; details do not. All of it lies beside, in a folder that git ignores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_ext.files import replaced

FULL = "full"
"""Folder below ``benchmarks/results`` for results with all details."""
_DIGITS = 6
_WIDTH = 120
_FILLED, _BY_LINE = ("metrics",), ("config", "claims")


def write(result: Mapping[str, Any], out: Path, results: Path) -> None:
    """Write a result into the folder of a checkout's results, and what git does not keep of it below `FULL`.

    Args:
        result: The JSON object of a result.
        out: File below ``results``.
        results: ``benchmarks/results`` of the checkout.

    Raises:
        OSError: a file cannot be written.
    """
    full = results / FULL / out.relative_to(results)
    for file, text in ((full, json.dumps(result, indent=1) + "\n"), (out, kept(result))):
        with replaced(file) as whole:
            whole.write(text.encode())


def kept(result: Mapping[str, Any]) -> str:
    """Return the text of a result that git keeps: JSON, with lines that can be compared."""
    shown = {name: value for name, value in result.items() if name != "details"}
    return "{\n" + ",\n".join(_part(name, value) for name, value in shown.items()) + "\n}\n"


def _part(name: str, value: Any) -> str:
    key = json.dumps(name)
    if name in _FILLED:
        return f"{key}: {_filled(value, ' ')}"
    if name == "baselines":
        rows = (f" {json.dumps(row)}: {_filled(metrics, '  ')}" for row, metrics in value.items())
        return f"{key}: {_braced(rows, '{}')}"
    if name in _BY_LINE and value:
        if isinstance(value, Mapping):
            return f"{key}: {_braced((f' {json.dumps(each)}: {_setting(each, value[each])}' for each in value), '{}')}"
        return f"{key}: {_braced((f' {_compact(each)}' for each in value), '[]')}"
    return f"{key}: {_compact(value)}"


def _setting(name: str, value: Any) -> str:
    if name != "tables":
        return _compact(value)
    tables = (f"  {json.dumps(title)}: {_braced((f'   {_compact(row)}' for row in rows), '[]')}"
              for title, rows in value.items())  # fmt: skip
    return _braced(tables, "{}")


def _filled(metrics: Mapping[str, float], indent: str) -> str:
    """Return an object with as many entries in a line as there is room for."""
    lines: list[str] = []
    for name, value in metrics.items():
        entry = f"{json.dumps(name)}: {_compact(value)}"
        if lines and len(lines[-1]) + len(entry) + 3 <= _WIDTH:
            lines[-1] += f", {entry}"
        else:
            lines.append(indent + entry)
    return _braced(lines, "{}")


def _braced(lines: Iterable[str], braces: str) -> str:
    body = ",\n".join(lines)
    return f"{braces[0]}\n{body}\n{braces[1]}" if body else braces


def _compact(value: Any) -> str:
    return json.dumps(rounded(value), allow_nan=False)


def rounded(value: Any) -> Any:
    """Return a value with every number in it to the digits that are kept."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return value
