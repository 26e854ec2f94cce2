"""What scripts that compare kernels with their definition print: a line of JSON for each case, and one for all.

Every line is there as soon as its case is over, so that a process that is ended early has said what it saw. Needs
neither pytest nor vLLM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

Facts = dict[str, float]
"""What a case was found to be."""
RIGHT, WRONG, FAILED = 0, 1, 3
"""Exit statuses: all cases hold; one does not; one could not be compared."""
_ERROR_CHARS = 500


def compare(cases: Iterable[tuple[str, Callable[[], Facts]]], over: Callable[[str, Facts], list[str]]) -> int:
    """Compare cases one after the other, print what became of each, and return the exit status.

    A case that raises does not keep the others from being compared.

    Args:
        cases: Names, and what compares.
        over: Returns the names of those facts of a case that are over their allowance.
    """
    wrong, failed, count = [], [], 0
    for name, facts_of in cases:
        count += 1
        said: dict[str, Any] = {"case": name}
        try:
            facts = facts_of()
        except Exception as error:  # noqa: BLE001 - it is printed, and the exit status tells
            failed.append(name)
            said["failed"] = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
        else:
            said |= {fact: value if math.isfinite(value) else str(value) for fact, value in facts.items()}
            if found := over(name, facts):
                wrong.append(name)
                said["over"] = found
        print(json.dumps(said), flush=True)
    print(json.dumps({"wrong": wrong, "failed": failed, "cases": count}), flush=True)
    return WRONG if wrong else FAILED if failed else RIGHT
