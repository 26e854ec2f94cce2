"""A file of steps that ``--ext-step-record`` wrote, made a profile."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from vllm_ext.config.model import first_problem
from vllm_ext.step_time.fit import fit
from vllm_ext.step_time.profile import Profile
from vllm_ext.step_time.runtime import StepFeatures
from vllm_ext.step_time.samples import FORMAT

_MOST = 10**15
"""More tokens, or pairs of them, are in no step, and would be more than a fit can square."""
_Count = Annotated[int, Field(ge=0, le=_MOST)]
_Pairs = Annotated[float, Field(ge=0, le=_MOST)]
_Seconds = Annotated[float, Field(gt=0, le=1e9)]
_ROW: TypeAdapter[tuple[int, int, int, float, float]] = TypeAdapter(
    tuple[_Count, _Count, _Count, _Pairs, _Seconds], config=ConfigDict(strict=True)
)
_COLUMNS = (*StepFeatures._fields, "seconds")


def is_record(text: str) -> bool:
    """Whether a file's content is lines of steps."""
    return text.startswith(json.dumps({"format": FORMAT})[:-1])


@dataclass(frozen=True)
class Record:
    """A file of steps."""

    path: Path
    engine: dict[str, Any]
    """Its header: what ran the steps."""
    steps: list[tuple[StepFeatures, float]]
    torn: list[int]
    """Numbers of lines that are left out: half a line, where a writer was stopped."""

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a file. Half a line may be the last one, or stand before a header, with which the next writer begins.

        Raises:
            OSError: it can't be read.
            ValueError: another line is none of a step, or it holds steps of two engines.
        """
        lines = path.read_text(encoding="utf-8").split("\n")
        found = cls(path, {}, [], [])
        for number, line in enumerate(lines, start=1):
            try:
                if line:
                    found._take(line)
            except (ValueError, RecursionError) as error:
                may_be_torn = number == len(lines) or lines[number].startswith("{")
                if not (may_be_torn and _is_no_json(line)):
                    raise ValueError(f"{path}: line {number}: {_problem(error)}") from error
                found.torn.append(number)
        if found.engine.pop("format", None) != FORMAT:
            raise ValueError(f"{path}: is no record of steps, as --ext-step-record writes it")
        return found

    def profile(self) -> Profile:
        """Fit the runtime model.

        Raises:
            ValueError: there are too few steps, or the header lacks something.
        """
        try:
            result = fit(self.steps)
            return Profile(**self.engine, **{field.name: getattr(result, field.name) for field in fields(result)})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: {_problem(error)}") from error

    def notes(self) -> list[str]:
        """Return what was left out, in a line."""
        shown = ", ".join(map(str, self.torn))
        return [f"{self.path.name}: half a line, left out, is line {shown}"] if self.torn else []

    def _take(self, line: str) -> None:
        if line.startswith("{"):
            header = json.loads(line)
            if self.engine and header != self.engine:
                raise ValueError(f"steps of {header} behind those of {self.engine}; keep a file for each engine")
            self.engine.update(header)
        else:
            row = _ROW.validate_json(line)
            self.steps.append((StepFeatures(*row[:4]), row[4]))


def _is_no_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def _problem(error: Exception) -> str:
    """Return what is wrong, in a line; an item of a row by the name of its column."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]["loc"]
    column = f"{_COLUMNS[first[0]]}: " if first and isinstance(first[0], int) else ""
    return column + first_problem(error, skip=1 if column else 0)
