"""Whether KV is loaded between steps or within one: whose time that costs, in request-seconds."""

from __future__ import annotations

import math


def exposed_s(load_s: float, step_s: float, num_layers: int) -> float:
    """Return by how much a step gets longer which loads KV layer by layer, and computes meanwhile.

    The first layer's attention waits for a layer's share of the load. After that the slower of both sets the pace: the
    last layer's share is there after ``load_s``, by when all layers but the last one can be through.

    Args:
        load_s: To load all layers, in seconds.
        step_s: A step that loads nothing, in seconds.
        num_layers: At least 1.

    Source: Pensieve, section 4.3.3, for the pipeline.
    """
    first, hidden = load_s / num_layers, step_s * (num_layers - 1) / num_layers
    return max(first, load_s - hidden)


def between_s(load_s: float, step_s: float, others: int) -> float:
    """Return how much later a request computes if its KV is loaded between steps.

    The load begins behind the step at hand, and is seen to be through at the end of a step; where nothing else runs
    there is no step to wait for.
    """
    return step_s * (1 + math.ceil(load_s / step_s)) if others else load_s


def in_step_is_cheaper(load_s: float, *, planned_s: float, step_s: float, num_layers: int, others: int) -> bool:
    """Return whether to load within the step at hand, for which all that run in it wait.

    Args:
        load_s: What this request's load takes, in seconds.
        planned_s: What the loads take that this step makes already.
        step_s: A step that loads nothing; greater than 0.
        num_layers: At least 1.
        others: Requests that run in the step beside this one.
    """
    together = exposed_s(planned_s + load_s, step_s, num_layers)
    added = together - exposed_s(planned_s, step_s, num_layers)
    return together + added * others <= between_s(planned_s + load_s, step_s, others)
