"""A file of steps that ``--ext-step-record`` wrote, made a profile."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vllm_ext.config.model import first_problem
from vllm_ext.step_time.fit import fit
from vllm_ext.step_time.profile import Profile
from vllm_ext.step_time.runtime import StepFeatures
from vllm_ext.step_time.samples import FORMAT, Row

_ROW: TypeAdapter[Row] = TypeAdapter(Row)


def is_record(text: str) -> bool:
    """Whether a file's content is lines of steps."""
    return text.startswith(json.dumps({"format": FORMAT})[:-1])


def profile_of(path: Path) -> Profile:
    """Fit the runtime model to the steps of a file.

    Raises:
        OSError: it can't be read.
        ValueError: a line is none of a step, it holds steps of two engines, or too few.
    """
    header: dict[str, Any] = {}
    steps: list[tuple[StepFeatures, float]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found = json.loads(line)
            if isinstance(found, dict):
                if header and found != header:
                    raise ValueError(f"steps of {found} behind those of {header}; keep a file for each engine")
                header = found
                continue
            row = _ROW.validate_python(tuple(found))
        except ValidationError as error:
            raise ValueError(f"{path}: line {number}: {first_problem(error)}") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {number}: {error}") from error
        steps.append((StepFeatures(*row[:4]), row[4]))
    if header.pop("format", None) != FORMAT:
        raise ValueError(f"{path}: is no record of steps, as --ext-step-record writes it")
    try:
        result = fit(steps)
        return Profile(**header, **{field.name: getattr(result, field.name) for field in fields(result)})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
