"""Whether KV is loaded between steps or within one: whose time that costs, in request-seconds."""

from __future__ import annotations

import math


def exposed_s(load_s: float, step_s: float, num_layers: int, *, behind_s: float = 0.0) -> float:
    """Return by how much a step gets longer which loads KV layer by layer, and computes meanwhile.

    The first layer's attention waits for a layer's share of the load. After that the slower of both sets the pace: the
    last layer's share is there after ``load_s``, by when all layers but the last one can be through. All of it waits
    for what the link has to bring before.

    Args:
        load_s: To load all layers, in seconds; 0: there is nothing to wait for.
        step_s: A step that loads nothing, in seconds.
        num_layers: At least 1.
        behind_s: Until the load can begin, in seconds.

    Source: Pensieve, section 4.3.3, for the pipeline.
    """
    if not load_s:
        return 0.0
    first, hidden = load_s / num_layers, step_s * (num_layers - 1) / num_layers
    return behind_s + max(first, load_s - hidden)


def between_s(load_s: float, step_s: float, others: int, *, behind_s: float = 0.0) -> float:
    """Return how much later a request computes if its KV is loaded between steps.

    The load begins behind the step at hand, and is seen to be through at the end of a step; where nothing else runs
    there is no step to wait for.

    Args:
        load_s: To load it, in seconds.
        step_s: A step, in seconds; greater than 0.
        others: Requests that run in the step at hand.
        behind_s: Until the link is free, from the step's begin on, in seconds.
    """
    if not others:
        return behind_s + load_s
    return step_s * (1 + math.ceil((max(0.0, behind_s - step_s) + load_s) / step_s))


def in_step_is_cheaper(
    load_s: float, *, planned_s: float, step_s: float, num_layers: int, others: int, behind_s: float = 0.0
) -> bool:
    """Return whether to load within the step at hand, for which all that run in it wait.

    Args:
        load_s: What this request's load takes, in seconds.
        planned_s: What the loads take that this step makes already.
        step_s: A step that loads nothing; greater than 0.
        num_layers: At least 1.
        others: Requests that run in the step beside this one.
        behind_s: Until the link is through with the loads of the steps before, which nobody waits for, in seconds.
    """
    together = exposed_s(planned_s + load_s, step_s, num_layers, behind_s=behind_s)
    added = together - exposed_s(planned_s, step_s, num_layers, behind_s=behind_s)
    return together + added * others <= between_s(planned_s + load_s, step_s, others, behind_s=behind_s)
