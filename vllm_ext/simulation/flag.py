"""Marks a field of a description as one that has a flag of its own on the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """Stands in the annotation of a field: ``rate_per_s: Annotated[float, Flag("--rate")]``.

    Type, group and default of the flag are the field's, its help is the first sentence of the field's docstring.
    """

    names: str = ""
    """As typed, separated by blanks; the first is the one in messages. Empty: the field's name with dashes."""
