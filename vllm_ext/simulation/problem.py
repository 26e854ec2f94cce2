"""What a pydantic model refused, in one line."""

from __future__ import annotations

from pydantic import ValidationError


def first_problem(error: ValidationError, *, skip: int = 0) -> str:
    """Return field, message and value of what is wrong first; ``skip`` outer parts of its path are left out."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"][skip:]))
    where = f"field {field!r}: " if field else ""
    return f"{where}{first['msg'].removeprefix('Value error, ')} (found {first.get('input')!r:.80})"
